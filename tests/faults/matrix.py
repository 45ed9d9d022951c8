"""One fault at one step of a run: which process is hit, what becomes of the others, and what is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from two_process.processes import MARK, Place, children, wait_until

from kvxfer import _native
from kvxfer.control.keys import write_pair

from .spoiling import Shuffle, Spoil
from .zygote import Forked, Zygote

WITHIN_S = 20.0
"""A stopped process is noticed after 3 s, one stopped in its start after 10 s; the rest is for a busy machine."""

QUICKEST = ("--tokens", "16", "--max-seconds", "0.000001", "--min-samples", "1", "--setup-repeats", "1", "--quiet")

VICTIMS = ("bench", "prefill worker", "serve", "decode worker", "control connection", "data connections")
"""The connections are cut (or stand still) with the relay that carries them."""

WITHOUT_RELAY = ("cma",)
"""The kernel says which process is at the other end of the socket, and that is where the data goes: with a relay in
between, the relay."""

_ports = iter(range(20_000, 32_000))  # below those that the kernel gives to connections
_data_ports = iter(range(12_000, 20_000, 8))  # UCX listens on some that follow
_ports_lock = threading.Lock()


def quiet_port(ports: Iterator[int] = _ports) -> int:
    """A free port that no connection will take in the meantime."""
    while True:
        with _ports_lock:
            port = next(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass(frozen=True)
class Steps:
    """The control messages of an undisturbed run, in order."""

    labels: Sequence[str]

    def needs(self, victim: str, step: int, wired_up_alone: bool = False) -> bool | None:
        """Whether the run still needs the victim at that step; None when it may go either way.

        With `wired_up_alone` the data connections serve to make others. Afterwards they carry nothing, and their end,
        which is watched for, may come too late to be seen.
        """
        if victim == "data connections" and wired_up_alone and step >= self._last("from decode: Prepare"):
            return None
        if victim == "data connections":
            return step <= self._last("from decode: Run")
        if victim == "control connection" or victim == "serve":
            return step < self._last("from serve: Dismissed")
        last = self._last("to prefill: Copy" if victim == "prefill worker" else "from decode: Run")
        if step <= last:
            return True
        return None if step <= self._last("to serve: Dismiss") else False

    def _last(self, label: str) -> int:
        return max(i for i, one in enumerate(self.labels) if one == label)


def ended_well(status: int | None, err: str, allowed: Sequence[int]) -> bool:
    """Whether bench ended with one of these, and said why in one line; nothing where it succeeded."""
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("kvxfer bench: error: ")]
    return status in allowed and lines == errors and len(errors) == (status != 0)


class Service:
    """A serve and, where wanted, the relays before it; replaced when a fault has ended them."""

    host = "127.0.0.1"
    """Where serve is."""
    options_of_serve: Sequence[str] = ()

    def __init__(self, zygote: Zygote, place: Place, backend: str, victim: str, keyed: bool = False) -> None:
        """With `keyed` both sides have keys, as beyond one host, so that control is encrypted."""
        self._zygote = zygote
        self._place = place
        self._environment = {name: place.environment[name] for name in ("TMPDIR", MARK, "COLUMNS")}
        self._environment["OPENBLAS_NUM_THREADS"] = "1"  # a worker starts in three quarters of the time
        self._backend = backend
        self._victim = victim
        self._relay: Forked | None = None
        self._rule: Spoil | Shuffle | None = None  # what the relay does to what it carries in the next run
        self._flat: tuple[int, int] | None = None
        self._keys_of_serve, self._keys_of_bench = _exchanged_keys(place.directory) if keyed else ((), ())
        self._begin()

    def _start(self, function: str, *arguments: Any) -> Forked:
        err = self._place.directory / f"{function}-{secrets.token_hex(4)}"
        return self._zygote.start(function, self._environment, err, *arguments)

    def _begin(self) -> None:
        self._port, self._data = quiet_port(), quiet_port(_data_ports)
        words = ["--bind", self.host, "--port", str(self._port), *self._keys_of_serve, *self.options_of_serve]
        if self._relays_ports:
            self._advertised = quiet_port()
            words += ["--data-port", str(self._data), "--advertise", f"127.0.0.1:{self._advertised}"]
        self.serve = self._start("serve", words)
        wait_until(lambda: "waiting on" in self.serve.err or self.serve.wait(0) is not None, 20, "serve")
        self._flat = None

    @property
    def _relays_ports(self) -> bool:
        return self._victim == "data connections" and not _native.one_host(self._backend)

    def _relayed(self) -> dict[str, Any]:
        """A fresh relay for each run: the one before was killed or stopped. What the plan of the run says of it."""
        self._end_relay()
        self._peer = self._port
        ready = self._seen = self._place.directory / f"ready-{secrets.token_hex(4)}"
        at: int | str
        target: int | str
        if self._victim == "control connection":
            at, target = quiet_port(), self._port
            self._peer = at
        elif self._relays_ports:
            at, target = self._advertised, self._data
        elif self._victim == "data connections":
            at, target = f"kvxfer-{secrets.token_hex(8)}", f"{ready}-target"
        else:
            return {}
        rule, control = self._rule and asdict(self._rule), self._victim == "control connection"
        self._relay = self._start("relay", at, target, str(ready), rule, control)
        wait_until(ready.exists, 20, "the relay")
        return {"relay": {"name": at, "target": target}} if isinstance(at, str) else {}

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def bench(self, step: int | None, number: int = 0, more: Sequence[str] = ()) -> tuple[Forked, Path]:
        """A run that is hit by the signal at that step; and the file of its notes. Takes more options."""
        more_of_plan = self._relayed()
        note = self._place.directory / f"note-{secrets.token_hex(4)}"
        note.touch()
        pids = {"serve": self.serve.pid, "control connection": 0, "data connections": 0}
        if self._relay is not None:
            pids[self._victim] = self._relay.pid
        plan = {"note": str(note), "step": step, "victim": self._victim, "signal": number, "pids": pids}
        plan |= more_of_plan
        words = ["--model", self._place.model, "--peer", f"{self.host}:{self._peer}", "--backend", self._backend]
        return self._start("bench", [*words, *self._keys_of_bench, *QUICKEST, *more], plan), note

    def whole_run(self) -> list[str]:
        """An undisturbed run, which has to succeed; its steps."""
        bench, note = self.bench(None)
        status = bench.wait(60)
        assert (status, bench.err) == (0, ""), f"an undisturbed run ended with {status}: {bench.err}"
        bench.close()
        self._end_relay()
        self.settle()
        return note.read_text().splitlines()

    def parts(self) -> list[tuple[str, bool]]:
        """What passed through the relay in the last run, and whether upwards; without a rule, over TCP, just bytes."""
        lines = [line.rsplit(" ", 1) for line in self._seen.read_text().splitlines()]
        return [(name, way == "up") for name, way in lines]

    def spoiled(self, rule: Spoil | Shuffle, *options: str, seconds: float = WITHIN_S) -> tuple[int | None, str]:
        """What becomes of a run through a relay with that rule: its status and stderr. Nothing of it is left then."""
        self._rule = rule
        bench, _ = self.bench(None, more=options)
        status, err = bench.wait(seconds), bench.err
        bench.close()
        self._end_relay()
        self._rule = None
        self.settle()
        return status, err

    def hit(self, steps: Steps, step: int, number: int) -> None:
        """A run with a fault; asserts that it ends as it should and leaves nothing. The next one follows at once."""
        bench, note = self.bench(step, number)
        try:
            self._end_of(bench, note, steps, step, number)
        finally:
            bench.close()
        if number == signal.SIGSTOP and self._victim == "serve":
            self.serve.signal(signal.SIGCONT)
        self._end_relay()
        self.settle()

    def _end_of(self, bench: Forked, note: Path, steps: Steps, step: int, number: int) -> None:
        stopped = self._victim == "bench" and number == signal.SIGSTOP
        if stopped:
            self._wake(bench)
        status = bench.wait(WITHIN_S)
        noted = note.read_text().splitlines()
        assert noted[: step + 1] == list(steps.labels[: step + 1]), f"went another way, {status}: {noted} {bench.err}"
        assert status is not None, f"still running after {WITHIN_S} s; {bench.err}"
        past_the_relay = self._backend == "ucx"  # go the connections that it makes
        needed = None if stopped else steps.needs(self._victim, step, past_the_relay)
        if noted[step + 1] == "nobody":
            needed = False
        says = bench.err.strip().splitlines()
        if self._victim == "bench" and number == signal.SIGKILL:
            assert status == -signal.SIGKILL
        elif self._victim == "bench" and number == signal.SIGINT:
            assert (status, says) == (130, ["kvxfer bench: interrupted"])
        else:
            assert status in {True: (5,), False: (0,), None: (0, 5)}[needed], f"ended with {status}: {says}"
            assert len(says) == (status == 5), says
            assert all(line.startswith("kvxfer bench: error: ") for line in says), says
        if self._victim == "serve" and number == signal.SIGINT:
            assert self.serve.wait(5) == 130
            assert self.serve.err.splitlines()[-1] == "kvxfer serve: interrupted"

    def _wake(self, bench: Forked) -> None:
        """Let a bench that stopped itself go on, once serve has given it up."""
        wait_until(lambda: state(bench.pid) in ("T", ""), 30, "a bench that stops")
        wait_until(lambda: not self._serving(), WITHIN_S, "serve giving up its client")
        bench.signal(signal.SIGCONT)

    def _serving(self) -> bool:
        return self.serve.err.count("a run begins") > self.serve.err.count("the run is over")

    def settle(self) -> None:
        """Assert that nothing of a run is left, in serve neither; a new serve where the fault has ended it."""
        if self.serve.wait(0) is not None:
            self.serve.close()
            self._nobody_left()
            self._begin()
            return
        wait_until(lambda: not self._serving(), 6, f"the end of a run; serve says {self.serve.err!r}")
        self._nobody_left()
        what = f"from {held_by(self.serve.pid)} files and threads of serve to {self._flat}"
        wait_until(self._is_flat, 6, what)

    def _is_flat(self) -> bool:
        """Whether serve holds no more than after any run before: the first may be seen while it still tidies up."""
        held = held_by(self.serve.pid)
        flat = self._flat is None or all(now <= least for now, least in zip(held, self._flat, strict=True))
        if flat:
            self._flat = held
        return flat

    def _nobody_left(self) -> None:
        wait_until(lambda: not self._place.alive(), 6, "the end of the workers")
        left = list(self._place.tmp.iterdir())
        assert left == [], left

    def close(self) -> None:
        self._end_relay()
        self.serve.signal(signal.SIGINT)
        status = self.serve.wait(10)
        self.serve.close()
        assert status == 130, (status, self.serve.err)
        assert children(self.serve.pid) == []


def _exchanged_keys(directory: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Options of serve, and of a bench that it admits."""
    admitted = directory / f"keys-{secrets.token_hex(4)}"
    _, client = write_pair(admitted, "client")
    public, server = write_pair(directory / f"keys-{secrets.token_hex(4)}", "server")
    return ("--key", str(server), "--allow", str(admitted)), ("--key", str(client), "--server-key", str(public))


def state(pid: int) -> str:
    """R, S, T and so on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def held_by(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@dataclass(frozen=True)
class Case:
    backend: str
    victim: str
    signal: int
    step: int

    def __str__(self) -> str:
        return f"{self.backend}: {self.victim} {signal.Signals(self.signal).name} at step {self.step}"


def chain(zygote: Zygote, cases: Sequence[Case], steps: Steps) -> list[str]:
    """Run cases of one backend and victim against one serve, one after another, and a whole run at last.

    So the serve that a fault has left has to take the next run as far as its own step. Returns what went wrong.
    """
    wrong = []
    place = Place()
    try:
        service = Service(zygote, place, cases[0].backend, cases[0].victim)
        try:
            for case in cases:
                try:
                    service.hit(steps, case.step, case.signal)
                except AssertionError as error:
                    wrong.append(f"{case} ({steps.labels[case.step]}): {error}")
                    service.serve.close()
                    for pid in place.alive():
                        os.kill(pid, signal.SIGKILL)
                    service.settle()
            service.whole_run()
        finally:
            service.close()
    except AssertionError as error:
        wrong.append(f"{cases[0]} and those after it: {error}")
    finally:
        try:
            place.close()
        except AssertionError as error:
            wrong.append(f"{cases[0]} and those after it left something: {error}")
    return wrong


def chains(cases: Sequence[Case], length: int) -> Iterator[Sequence[Case]]:
    for first in range(0, len(cases), length):
        yield cases[first : first + length]
