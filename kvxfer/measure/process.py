"""A worker process and the starter's end of the socket to it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from kvxfer.control import messages as m
from kvxfer.control.pipe import Pipe, PipeClosedError
from kvxfer.errors import ExitStatus

START_S = 10.0
"""How long a worker may take to its first sign of life; on a busy host an interpreter starts in seconds."""


class WorkerProcess:
    """Started with the object, killed with end()."""

    def __init__(self, side: str) -> None:
        self.side = side
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvxfer.measure.worker", str(theirs.fileno()), side],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if "KVXFER_DEBUG" in os.environ else subprocess.DEVNULL,
            )
        self._pipe = Pipe(ours)
        self._heard_at = time.monotonic()
        self._has_started = False
        self._dead = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._pipe.fileno()

    def limit_memory(self, most_bytes: int) -> None:
        """From now on the kernel refuses the worker more private memory than that."""
        with contextlib.suppress(ProcessLookupError):  # dead already, which receive() tells
            resource.prlimit(self.pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))

    def send(self, command: m.Command) -> None:
        try:
            self._pipe.send(m.encode(command))
        except PipeClosedError:
            self._dead = True  # receive() tells why

    def receive(self) -> list[m.FromWorker]:
        """What the worker said since the last call, without waiting. Its death or silence is a Failed with seq 0."""
        try:
            said = [m.decode_from_worker(data) for data in self._pipe.receive(0)]
        except PipeClosedError:
            self._dead = True
            return [self._how_it_ended()]
        except msgspec.DecodeError as error:
            return [self._obituary(f"said what is no message: {error}")]
        if said:
            self._heard_at, self._has_started = time.monotonic(), True
        elif self._dead:
            return [self._how_it_ended()]
        elif time.monotonic() - self._heard_at > self._patience_s:
            return [self._obituary(f"has not answered for {self._patience_s:.0f} s")]
        return [message for message in said if not isinstance(message, m.Heartbeat)]

    def kill(self) -> None:
        """Without waiting for its end; end() is still to come. Idempotent."""
        self._process.kill()

    def end(self, meanwhile: Callable[[], None]) -> None:
        """Kill the worker and wait until its memory is back. Idempotent.

        The kernel takes seconds to free many GiB, so `meanwhile` is called again and again: whoever counts on the
        caller's heartbeat has to hear it.
        """
        self.kill()
        while self._is_there():
            meanwhile()
        self._pipe.close()

    def _is_there(self) -> bool:
        """Whether the process has not ended, after waiting a little for that."""
        try:
            self._process.wait(m.HEARTBEAT_S / 5)
        except subprocess.TimeoutExpired:
            return True
        return False

    def cpu_ns(self) -> int:
        """User and system time of the worker so far, 0 when it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            return 0
        return (int(fields[11]) + int(fields[12])) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))

    @property
    def _patience_s(self) -> float:
        return m.SILENCE_S if self._has_started else START_S

    def _obituary(self, how: str) -> m.Failed:
        return m.Failed(0, ExitStatus.PEER_LOST, f"the {self.side} worker {how}")

    def _how_it_ended(self) -> m.Failed:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return self._obituary("closed its connection")
        if code < 0:
            why = " (the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
            return self._obituary(f"was killed by {_signal_name(-code)}{why}")
        if not self._has_started:
            what = f"the {self.side} worker could not start; is there memory, a process, threads and files left for it?"
            return m.Failed(0, ExitStatus.UNAVAILABLE, f"{what} KVXFER_DEBUG=1 shows why")
        if code == ExitStatus.UNAVAILABLE:
            return m.Failed(0, code, f"the {self.side} worker ran out of memory")
        return self._obituary(f"ended by itself with status {code}")


def _signal_name(number: int) -> str:
    """Such as SIGTERM; of the real-time signals only the first and the last have a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
