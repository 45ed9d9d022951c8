"""One side of a contender in a process of its own: worker.py MODULE ROLE DRIVER_FD OTHER_FD.

Obeys the driver over one socket; the two sides tell each other addresses and keys over the other. Runs in whatever
Python the contender needs, so it imports nothing of kvxfer.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pool
from job import Job

PR_SET_PDEATHSIG = 1


class Worker:
    """The commands of the driver, one method each; arguments and answers are what pickle carries."""

    def __init__(self, module: str, role: str, options: dict[str, Any], job: Job, other: Connection) -> None:
        self._other = other
        self._job = job
        self._side = importlib.import_module(f"contenders.{module}").Side(options, job, role)
        self._role = role

    def open(self) -> int:
        """Both times of set-up are ns; that of the memory is no part of it."""
        return _timed(self._side.open)

    def allocate(self) -> int:
        return _timed(self._side.allocate)

    def connect(self) -> int:
        return _timed(lambda: self._side.connect(self._swap))

    def fill(self) -> None:
        address = self._side.address
        if address:
            (pool.fill if self._role == "prefill" else pool.poison)(address, self._job.pool_bytes)

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        """(posted, confirmed) of each of `count` requests on the monotonic clock, or nothing from a passive side."""
        moved: list[tuple[int, int]] | None = self._side.move(first, count)
        return moved

    def wrong_pieces(self, number: int) -> int:
        """Of the request that was moved last; asked of the decode side. -1: this contender moves no pieces."""
        return pool.wrong_pieces(self._job, number, self._side.address) if self._side.address else -1

    def cpu_ns(self) -> int:
        """User and system time of this side so far, of processes that it started too."""
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        return round(total * 1e9)

    def call(self, method: str, *arguments: Any) -> Any:
        """Something that only this contender can do."""
        return getattr(self._side, method)(*arguments)

    def _swap(self, mine: Any) -> Any:
        self._other.send(mine)
        return self._other.recv()


def _timed(action: Any) -> int:
    began = time.monotonic_ns()
    action()
    return time.monotonic_ns() - began


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives the driver
    module, role, driver_fd, other_fd = sys.argv[1:5]
    driver, other = Connection(int(driver_fd)), Connection(int(other_fd))
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        options, job = driver.recv()
        worker = Worker(module, role, options, job, other)
        driver.send((True, None))
        while True:
            command, *arguments = driver.recv()
            driver.send((True, getattr(worker, command)(*arguments)))
    except EOFError:
        pass
    except Exception:
        driver.send((False, traceback.format_exc(limit=3)))
    # Not through the interpreter's end: some contenders crash there (UCX's module for InfiniBand).
    os._exit(0)


if __name__ == "__main__":
    main()
