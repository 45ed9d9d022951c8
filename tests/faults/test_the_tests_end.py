"""Nothing goes on when the tests themselves are killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from two_process.processes import Place, wait_until

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent

BEGIN = """
import os, sys, tempfile, time
from two_process.processes import MARK, Place
make = tempfile.mkdtemp
tempfile.mkdtemp = lambda prefix, dir: make(prefix=prefix, dir=sys.argv[1])  # so that nothing is left of it
place = Place()
place.environment[MARK] = os.environ[MARK]
"""

FORKED = """
from faults.matrix import Service
from faults.zygote import Zygote
with Zygote() as zygote:
    service = Service(zygote, place, "tcp", "bench")
    service.bench(None, more=("--max-seconds", "600", "--min-samples", "1000000"))
    time.sleep(600)
"""
FORKED_PROCESSES = 8  # these tests, a zygote, serve and bench with a supervisor and a worker each

STARTED = """
place.serve()
time.sleep(600)
"""


@pytest.mark.parametrize(("script", "processes"), [(FORKED, FORKED_PROCESSES), (STARTED, 2)], ids=["forked", "started"])
def test_processes_end_with_the_tests(place: Place, script: str, processes: int) -> None:
    environment = place.environment | {"PYTHONPATH": str(TESTS)}
    tests = place.start_command([sys.executable, "-c", BEGIN + script, str(place.directory)], env=environment)
    wait_until(lambda: len(place.alive()) >= processes, 60, f"{processes} processes")
    os.kill(tests.pid, signal.SIGKILL)
    wait_until(lambda: not place.alive(), 20, "the end of what the tests have started")
