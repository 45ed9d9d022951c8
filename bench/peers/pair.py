"""Both sides of a contender, as the driver sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from job import Job
from offer import Offer

PATIENCE_S = 120
HERE = Path(__file__).parent


class ContenderError(Exception):
    """A contender failed; says which one and how."""


class OursFailedError(ContenderError):
    """It is kvxfer that failed."""


@dataclass(frozen=True)
class Moved:
    """Some requests of one round."""

    ns: list[int]
    initiator_cpu_ns: int
    target_cpu_ns: int


class Pair:
    """Two processes that are set up to move a job's requests."""

    def __init__(self, offer: Offer, job: Job) -> None:
        self.offer = offer
        self.job = job
        self.setup_ns = 0
        self._number = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[str, Connection] = {}
        self._log = os.memfd_create("log")
        try:
            self._start()
            # Opening and connecting are set-up; memory is what an engine has anyway.
            self.setup_ns += max(self._both("open"))
            self._both("allocate")
            self.setup_ns += max(self._both("connect"))
            self._both("fill")
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        between = socket.socketpair()
        for role, between_fd in zip(("prefill", "decode"), between, strict=True):
            ours, theirs = socket.socketpair()
            fds = theirs.fileno(), between_fd.fileno()
            self._processes.append(
                subprocess.Popen(
                    [self.offer.python, HERE / "worker.py", self.offer.module, role, *map(str, fds)],
                    env=os.environ | self.offer.environ,
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
            )
            theirs.close()
            between_fd.close()
            self._links[role] = Connection(ours.detach())
        for link in self._links.values():
            link.send((self.offer.options, self.job))
        for role in self._links:
            self._answer(role)

    def move(self, count: int) -> Moved:
        """The next `count` requests, one after another."""
        first = self._number + 1
        self._number += count
        initiator = self.job.initiator
        target = "decode" if initiator == "prefill" else "prefill"
        before = self._both("cpu_ns")
        self._links[target].send(("move", first, count))
        self._links[initiator].send(("move", first, count))
        ours, theirs = self._answer(initiator), self._answer(target)
        after = self._both("cpu_ns")
        ends = [end for _, end in theirs or ours]
        ns = [max(end, other) - begun for (begun, end), other in zip(ours, ends, strict=True)]
        cpu = dict(zip(("prefill", "decode"), (b - a for a, b in zip(before, after, strict=True)), strict=True))
        return Moved(ns, cpu[initiator], cpu[target])

    def verify(self) -> None:
        """Raises ContenderError when the request that was moved last lies wrong in the decode side's memory."""
        self._links["decode"].send(("wrong_pieces", self._number))
        if (wrong := self._answer("decode")) > 0:
            raise self._failure(f"{wrong} of {self.job.descriptors} pieces arrived wrong")

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """A method of the contender's own on both sides at once; prefill's answer comes first."""
        return self._both("call", method, *arguments)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of prefill and decode."""
        return tuple(process.pid for process in self._processes)

    def pause(self) -> None:
        """Engines whose idle threads poll must not slow the others."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        for process in self._processes:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            os.close(self._log)

    def _both(self, command: str, *arguments: Any) -> list[Any]:
        for link in self._links.values():
            link.send((command, *arguments))
        return [self._answer(role) for role in self._links]

    def _answer(self, role: str) -> Any:
        link = self._links[role]
        try:
            if not link.poll(PATIENCE_S):
                raise self._failure(f"{role} did not answer for {PATIENCE_S} s{self._said()}")
            fine, value = link.recv()
        except (EOFError, ConnectionError):
            raise self._failure(f"{role} died{self._said()}") from None
        if not fine:
            raise self._failure(f"{role} failed: {value.strip().splitlines()[-1]}{self._said()}")
        return value

    def _failure(self, how: str) -> ContenderError:
        return (OursFailedError if self.offer.ours else ContenderError)(f"{self.offer.name}: {how}")

    def _said(self) -> str:
        """The last lines that its processes printed."""
        size = os.fstat(self._log).st_size
        lines = os.pread(self._log, 2000, max(0, size - 2000)).decode(errors="replace").strip().splitlines()
        return "; it printed: " + " / ".join(lines[-3:]) if lines else ""


@contextlib.contextmanager
def started(offer: Offer, job: Job) -> Iterator[Pair]:
    """A pair that is ended whatever happens."""
    pair = Pair(offer, job)
    try:
        yield pair
    finally:
        pair.close()
