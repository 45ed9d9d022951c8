"""In the guest: runs every case once and writes what became of it to EXCHANGE/NAME.json. The tests outside judge it.

python cases.py EXCHANGE
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ADDRESS = "10.9.0.1"
PORT = 7420
COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")

KVXFER = (sys.executable, "-m", "kvxfer.cli")
QUICK = ("--setup-repeats", "1", "--max-seconds", "0.2", "--min-samples", "1", "--quiet")
VERBS = {"UCX_TLS": "rc_verbs", "UCX_NET_DEVICES": "rxe0:1"}

DEADLINE_S = 90
"""For a case: many times what it takes. What is not done by then has hung."""

STRUCK_AFTER_PACKETS = 500
"""2 MB of 4 KiB each: the transfer that is struck is many times longer, and the wire-up far shorter."""


@dataclass(frozen=True)
class Case:
    """A bench against the one `serve`, unless `alone`: then it starts the other side itself."""

    options: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()  # the command that the bench runs under
    struck: str = ""  # the worker that is killed in the middle of a transfer
    alone: bool = False


@dataclass(frozen=True)
class Ran:
    """What became of it. `sent` and `received` are RDMA packets; a status of None: it was not done in time."""

    status: int | None
    out: str
    err: str
    seconds: float
    sent: int
    received: int
    document: dict[str, Any]
    struck: bool
    beware: str = "emulated CPU, clock of instructions: times and bandwidths mean nothing"


UCX = ("--backend", "ucx")
UNTIL_STRUCK = ("--tokens", "128", "--max-seconds", "60")
LITTLE_MEMLOCK = ("prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")


def wheel_library() -> str:
    """The UCX that came with kvxfer's own requirements: it is built without verbs."""
    found = importlib.util.find_spec("libucx")
    assert found is not None
    assert found.submodule_search_locations is not None
    return f"{found.submodule_search_locations[0]}/lib/libucp.so.0"


SYSTEM_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
NIXL = {"PYTHONPATH": str(Path(__file__).parents[3] / "build" / "rdma" / "nixl")}
"""As if NIXL's wheel were installed."""


def hidden(*mounts: str) -> tuple[str, ...]:
    """To run a command under, with these `mount` arguments in force for it alone."""
    return ("unshare", "--mount", "sh", "-ec", "".join(f"mount {one}; " for one in mounts) + 'exec "$@"', "sh")


WITHOUT_SYSTEM_VERBS = f"-t tmpfs none {SYSTEM_LIBRARIES}/ucx"
"""The system's UCX has no modules then."""
WITHOUT_LIBIBVERBS = f"--bind /dev/null {SYSTEM_LIBRARIES}/libibverbs.so.1"

CASES: dict[str, Case] = {
    "tcp": Case(("--backend", "tcp", "--tokens", "16")),
    "verbs": Case((*UCX, "--tokens", "16", "--op", "both", "--dtype", "bf16,fp8", "--require-transport", "rc"), VERBS),
    "plain": Case((*UCX, "--tokens", "16"), alone=True),  # nothing set: it has to find the device by itself
    "push, decode killed": Case((*UCX, "--op", "push", *UNTIL_STRUCK), VERBS, struck="decode"),
    "pull, prefill killed": Case((*UCX, "--op", "pull", *UNTIL_STRUCK), VERBS, struck="prefill"),
    "too little memlock": Case((*UCX, "--tokens", "16"), VERBS, within=LITTLE_MEMLOCK),
    "wrong device": Case((*UCX, "--tokens", "16"), VERBS | {"UCX_NET_DEVICES": "mlx5_7:1"}),
    "wheel": Case(
        (*UCX, "--tokens", "16", "--require-transport", "rc"),
        {"KVXFER_UCX_LIBRARY": wheel_library(), "UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "lo"},
        alone=True,
    ),
    "bundled": Case(
        (*UCX, "--tokens", "16", "--op", "both", "--require-transport", "rc"),
        NIXL,
        within=hidden(WITHOUT_SYSTEM_VERBS),
        alone=True,
    ),
}


def main(exchange: Path) -> None:
    (exchange / "perftest.json").write_text(json.dumps(asdict(perftest())))
    (exchange / "no libibverbs.json").write_text(json.dumps(asdict(doctor_without_libibverbs())))
    with serving(exchange) as server:
        for name, case in CASES.items():
            print(f"guest: {name}", flush=True)
            ran = run(case, exchange, exchange / f"{name}.result", server.pid)
            (exchange / f"{name}.json").write_text(json.dumps(asdict(ran)))
            wait_until(lambda: over(exchange / "serve.log"), 60)
        alive = server.poll() is None
    (exchange / "serve.json").write_text(json.dumps({"alive": alive, "status": server.returncode}))


def perftest() -> Ran:
    """One-sided writes by the verbs themselves, without kvxfer: the device works."""
    command = ["ib_write_bw", "-d", "rxe0", "-x", "1", "-n", "100"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as listening:
        wait_until(lambda: listens(18515), 30)
        ran = watched([*command, ADDRESS], {}, Path("/nonexistent"))
        listening.kill()
    return ran


def doctor_without_libibverbs() -> Ran:
    """Where NIXL's UCX is the one with verbs, and cannot use them."""
    within = hidden(WITHOUT_SYSTEM_VERBS, WITHOUT_LIBIBVERBS)
    return watched([*within, *KVXFER, "doctor", "--json", "-"], NIXL, Path("/nonexistent"))


@contextlib.contextmanager
def serving(exchange: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`kvxfer serve` for all cases. It has to survive what they do."""
    keys = ("--key", str(exchange / "keys/decode.key_secret"), "--allow", str(exchange / "keys/allowed"))
    command = [*KVXFER, "serve", "--bind", ADDRESS, "--port", str(PORT), *keys]
    with (
        (exchange / "serve.log").open("wb") as log,
        subprocess.Popen(command, env=os.environ | VERBS, stdin=subprocess.DEVNULL, stderr=log) as server,
    ):
        try:
            wait_until(lambda: listens(PORT), 60)
            yield server
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()


def over(log: Path) -> bool:
    """Whether the server has ended every run that it began, and so takes the next client."""
    said = log.read_text()
    return said.count("a run begins") == said.count("the run is over")


def run(case: Case, exchange: Path, result: Path, server: int) -> Ran:
    keys = ("--key", str(exchange / "keys/prefill.key_secret"), "--server-key", str(exchange / "keys/decode.key"))
    peer = () if case.alone else ("--peer", f"{ADDRESS}:{PORT}", *keys)
    command = [*case.within, *KVXFER, "bench", "--json", str(result), *QUICK, *peer, *case.options]
    strike = (lambda: kill(case.struck)) if case.struck else None
    return watched(command, case.environment, result, strike)


def watched(
    command: list[str], environment: dict[str, str], result: Path, strike: Callable[[], bool] | None = None
) -> Ran:
    """Run it, and strike once the transfer is under way."""
    sent, received = counter("sent_pkts"), counter("rcvd_pkts")
    began = time.monotonic()
    struck = False
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if strike is not None:
        under_way = sent + STRUCK_AFTER_PACKETS
        wait_until(lambda: counter("sent_pkts") > under_way or process.poll() is not None, DEADLINE_S)
        began = time.monotonic()
        struck = strike()
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        status = None
    return Ran(
        status,
        out,
        err,
        time.monotonic() - began,
        counter("sent_pkts") - sent,
        counter("rcvd_pkts") - received,
        json.loads(result.read_text()) if result.exists() else {},
        struck,
    )


def kill(side: str) -> bool:
    """Kill the one worker of this side; False when there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"kvxfer.measure.worker" in words and side.encode() in words:
                os.kill(int(process.name), signal.SIGKILL)
                return True
    return False


def counter(name: str) -> int:
    return int((COUNTERS / name).read_text())


def listens(port: int) -> bool:
    """Whether a socket listens on this port (state 0A), without talking to it."""
    lines = (line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines())
    return any(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in this time. Where it did not, what follows shows it."""
    give_up_at = time.monotonic() + seconds
    while not true():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
