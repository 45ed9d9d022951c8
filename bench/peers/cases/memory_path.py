"""Between two processes through this host's memory, against one thread that copies the same pieces."""

from __future__ import annotations

from goals import faster
from run import Run

from cases.scattered import everyone

ORDER = 4
NAME = "shm"


def measure(run: Run) -> None:
    found = everyone(run, "push")
    ours = found.row("kvxfer-shm")
    memcpy = found.row("memcpy-shm") or found.row("memcpy")
    run.goals.append(faster("shm push ÷ one-thread memcpy of the same pieces", 0.85, ours, memcpy))
    run.goals.append(faster("shm push ÷ NIXL's shared-memory write", 1.5, ours, found.row("nixl-shm")))
