"""The most memory that a process of `kvxfer bench` ever holds, beyond an idle one, against its pools."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from goals import Goal
from jobs import COLD
from pair import OursFailedError
from run import Run

from kvxfer.control import messages as m
from kvxfer.measure.host import last_level_cache_bytes
from kvxfer.measure.process import WorkerProcess

ORDER = 9
NAME = "memory"
TOKENS = 2048
QUICK_TOKENS = 128
WORKER = b"kvxfer.measure.worker"
LOOK_S = 0.02
START_S = 60


def measure(run: Run) -> None:
    tokens = QUICK_TOKENS if run.quick else TOKENS
    what = f"peak memory of a process beyond an idle one ÷ its pools, {tokens} tokens of 70B"
    run.say(what)
    idle = _idle_bytes()
    peaks, pool = _peaks_and_pool(tokens)
    # The prefill side's copies the same pieces into a third pool, for the memcpy reference.
    pools = {"prefill": 2 * pool, "decode": pool}
    ratios = [(peak - idle) / pools[side] for side, peak in peaks.items()]
    shown = ", ".join(f"{side} {ratio:.3f}" for side, ratio in zip(peaks, ratios, strict=True))
    run.goals.append(Goal(what, 1.15, False, [max(ratios)], note=f"{shown}; idle {idle >> 20} MiB"))


def _idle_bytes() -> int:
    """Of a worker that has its backend open and no pool."""
    worker = WorkerProcess("prefill")
    try:
        worker.send(m.Command(1, m.Open("tcp", secrets.token_bytes(32), {}, "", 0), 0))
        give_up_at = time.monotonic() + START_S
        while not any(isinstance(said, m.Answer) for said in worker.receive()):
            if time.monotonic() > give_up_at:
                raise OursFailedError("a worker of kvxfer did not start")
            time.sleep(LOOK_S)
        return _peak_bytes(worker.pid)
    finally:
        worker.end(lambda: None)


def _peaks_and_pool(tokens: int) -> tuple[dict[str, int], int]:
    """Peak by side, and bytes of one pool."""
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvxfer.bench", "--model", "70b", "--tokens", str(tokens), "--backend", "tcp"]
        command += ["--max-seconds", "1", "--setup-repeats", "1", "--quiet", "--json", str(result)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                for pid in _descendants(process.pid):
                    command_line = _read(pid, "cmdline").split(b"\0")
                    if WORKER in command_line:
                        side = command_line[-2].decode()
                        with contextlib.suppress(IndexError):  # it has just ended
                            peaks[side] = max(peaks.get(side, 0), _peak_bytes(pid))
                time.sleep(LOOK_S)
        if process.returncode != 0:
            raise OursFailedError(f"kvxfer bench ended with status {process.returncode}")
        row = json.loads(result.read_text())["results"][0]
    # Two plans are two requests that share a pool, or one pool that is used in two orders.
    alone = 2 * row["bytes"] >= COLD * last_level_cache_bytes()
    return peaks, row["bytes"] * (1 if alone else row["plans"])


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _peak_bytes(pid: int) -> int:
    """Raises IndexError when there is no such process any more."""
    return int(_read(pid, "status").split(b"VmHWM:")[1].split()[0]) << 10


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
