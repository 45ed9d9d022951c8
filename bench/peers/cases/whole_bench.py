"""`kvxfer bench --model 70b --backend tcp` with its defaults, everything included."""

from __future__ import annotations

import subprocess
import sys
import time

from goals import Goal
from pair import OursFailedError
from run import Run

ORDER = 11
NAME = "whole-bench"
QUICK = ("--tokens", "128", "--max-seconds", "1", "--setup-repeats", "1")


def measure(run: Run) -> None:
    what = "kvxfer bench --model 70b --backend tcp, wall time"
    run.say(what)
    command = [sys.executable, "-m", "kvxfer.bench", "--model", "70b", "--backend", "tcp"]
    if run.quick:
        command += QUICK
    began = time.monotonic()
    if status := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise OursFailedError(f"kvxfer bench ended with status {status}")
    note = "one run" + (", with " + " ".join(QUICK) if run.quick else "")
    run.goals.append(Goal(what, 60.0, False, [time.monotonic() - began], "s", note))
