"""What the processes forked from the zygote do: a bench that acts at one of its steps, a serve, a relay."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts.entering import enter
from two_process.processes import children

from kvxfer import bench as bench_module
from kvxfer import serve as serve_module
from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.measure import pair
from kvxfer.measure.process import WorkerProcess
from kvxfer.measure.session import Session

from . import spoiling, zmtp

SHORT_NS = 3_000_000_000
"""In place of the 10 s that connecting, preparing and a transfer that stands still may take."""


class Steps:
    """Counts the control messages of a bench and acts at one of them, before it is sent or when it was received.

    Messages that only repeat the two before (pings, samples) are not counted. Each step is noted in a file.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._note = Path(plan["note"])
        self._wanted: int | None = plan["step"]
        self._act: Callable[[], None] = lambda: self._strike(plan["victim"], plan["signal"], plan["pids"])
        self._last: list[str] = ["", ""]
        self._count = 0
        self._asked: dict[int, str] = {}
        self.prefill_pid = 0

    def at(self, label: str) -> None:
        repeats = label == self._last[0]
        self._last = [self._last[1], label]
        if repeats:
            return
        self._say(label)
        number, self._count = self._count, self._count + 1
        if number == self._wanted:
            self._act()

    def sending(self, message: m.Message) -> None:
        if isinstance(message, m.Command):
            self._asked[message.seq] = type(message.body).__name__
            self.at(f"to decode: {type(message.body).__name__}")
        elif not isinstance(message, m.Heartbeat):
            self.at(f"to serve: {type(message).__name__}")

    def received(self, message: m.Message | None) -> None:
        if isinstance(message, (m.Answer, m.Failed)):
            self.at(f"from decode: {self._asked.get(message.seq, type(message).__name__)}")
        elif message is not None and not isinstance(message, m.Heartbeat):
            self.at(f"from serve: {type(message).__name__}")

    def _strike(self, victim: str, number: int, pids: dict[str, int]) -> None:
        if victim == "bench":
            pid = os.getpid()
        elif victim == "prefill worker":
            pid = self.prefill_pid
        elif victim == "decode worker":
            pid = next(iter(children(pids["serve"])), 0)
        else:
            pid = pids[victim]
        self._say(f"struck {pid}" if pid else "nobody")
        if pid:
            os.kill(pid, number)

    def _say(self, line: str) -> None:
        with self._note.open("a") as file:
            file.write(line + "\n")


def bench(words: list[str], plan: dict[str, Any]) -> int:
    """A bench with its steps watched. Its own messages are what it is watched by; nothing else of it is touched."""
    steps = Steps(plan)
    if "relay" in plan:
        _through(plan["relay"])
    pair.STALL_NS = pair.CONNECT_NS = SHORT_NS

    def before(kind: type, name: str, call: Callable[..., None]) -> None:
        original = getattr(kind, name)

        def watched(self: Any, *arguments: Any) -> Any:
            call(self, *arguments)
            return original(self, *arguments)

        setattr(kind, name, watched)

    def after(kind: type, name: str, call: Callable[..., None]) -> None:
        original = getattr(kind, name)

        def watched(self: Any, *arguments: Any) -> Any:
            result = original(self, *arguments)
            call(self, result, *arguments)
            return result

        setattr(kind, name, watched)

    def started(worker: WorkerProcess, *_: object) -> None:
        steps.prefill_pid = worker.pid

    def ended(worker: WorkerProcess, *_: object) -> None:
        steps.prefill_pid = 0

    before(Client, "send", lambda _, message: steps.sending(message))
    after(Client, "receive", lambda _, message, *__: steps.received(message))
    after(Client, "first_answer", lambda _, message, *__: steps.received(message))
    before(Session, "prefill", lambda _, __, command, ___: steps.at(f"to prefill: {type(command).__name__}"))
    after(Session, "prefill", lambda _, __, ___, command, ____: steps.at(f"from prefill: {type(command).__name__}"))
    after(WorkerProcess, "__init__", started)
    after(WorkerProcess, "end", ended)
    return bench_module.main(words)


def serve(words: list[str]) -> int:
    return serve_module.main(words)


def on_host(namespace: str, function: str, arguments: list[Any]) -> int:
    """One of these functions, on a host of the tests."""
    enter(namespace)
    status: int = globals()[function](*arguments)
    return status


def relay(at: int | str, target: int | str, seen: str, rule: dict[str, Any] | None, control: bool) -> int:
    """Pass on what comes until killed: then its connections break; or until stopped: then they stall.

    From a port to a port; or from an abstract Unix socket to the one whose name the file `target` holds by the time
    that somebody comes. The rule is a Spoil or Shuffle as a dict. Without `control` it is data connections that come.
    The file `seen` is there once the relay listens, and has a line for each part that has come.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    how = None if rule is None else (spoiling.Shuffle if "seed" in rule else spoiling.Spoil)(**rule)

    def onward() -> socket.socket:
        if isinstance(target, int):
            return socket.create_connection(("127.0.0.1", target))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + Path(target).read_text())
        return connection

    if isinstance(at, int):
        listener = socket.create_server(("127.0.0.1", at))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + at)
        listener.listen()
    parser = _parser(how, control, listener.family)
    with open(seen, "a", buffering=1) as file:

        def note(name: str, up: bool) -> None:
            print(name, "up" if up else "down", file=file)

        spoiling.Relay(listener, onward, how, parser, note).run()
    return 0


def _parser(rule: spoiling.Spoil | spoiling.Shuffle | None, control: bool, family: int) -> spoiling.Parser:
    if control:
        return zmtp.control_parts if isinstance(rule, spoiling.Spoil) else spoiling.any_parts
    # A descriptor belongs to one notice, which so has to stay apart from the one before it.
    return spoiling.data_parts if rule is not None or family == socket.AF_UNIX else spoiling.any_parts


def _through(relay: dict[str, str]) -> None:
    """Lead this bench's data connection over a Unix socket through a relay, which is told where it was to go."""
    real = pair.reachable

    def reachable(endpoint: str, peer_host: str, one_host: bool) -> str:
        Path(relay["target"]).write_text(real(endpoint, peer_host, one_host).removeprefix(f"{m.LOCAL_ENDPOINT}@"))
        return f"{m.LOCAL_ENDPOINT}@{relay['name']}"

    pair.reachable = reachable
