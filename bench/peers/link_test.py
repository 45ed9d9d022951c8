"""Side of a contender that is a program: it serves on one side, and on the other one measures by its own clock."""

from __future__ import annotations

import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from job import Job

STARTING_S = 30
RETRY_S = 0.01


class LinkTest(ABC):
    """The initiator is the client; the other side serves one test at a time."""

    address = 0  # there is no pool to look into

    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self.program = options["program"]
        self.options = options
        self.job = job
        self._serves = role != job.initiator

    def open(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def allocate(self) -> None:  # noqa: B027
        """The program has memory of its own."""

    def connect(self, swap: Callable[[Any], Any]) -> None:
        theirs = swap(self._port)
        self._port = self._port if self._serves else theirs

    def move(self, _: int, count: int) -> list[tuple[int, int]] | None:
        if not self._serves:
            return [(0, self._measure()) for _ in range(count)]
        for _ in range(count):
            subprocess.run([self.program, *self.server(str(self._port))], capture_output=True, check=True)
        return None

    def _measure(self) -> int:
        give_up_at = time.monotonic() + STARTING_S
        while True:
            command = [self.program, *self.client(str(self._port))]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0 and (rate := self.bytes_per_s(run.stdout)):
                return round(self.job.bytes / rate * 1e9)
            if time.monotonic() > give_up_at:
                raise RuntimeError(" ".join((run.stderr + run.stdout).split()))
            time.sleep(RETRY_S)  # the server is about to listen

    @abstractmethod
    def server(self, port: str) -> list[str]:
        """Arguments with which the program serves one test."""

    @abstractmethod
    def client(self, port: str) -> list[str]:
        """Arguments with which the program measures."""

    @abstractmethod
    def bytes_per_s(self, said: str) -> float:
        """The figure in what the client printed; 0 when it holds none."""
