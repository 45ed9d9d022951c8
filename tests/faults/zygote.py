"""Processes forked from one that has imported all of kvxfer: a bench starts in 20 ms of CPU time instead of 400.

A zygote waits on a socket. For each request it forks a supervisor, which forks the process asked for, tells its pid,
waits for it and tells its exit status.

python -m faults.zygote SOCKET
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from two_process.processes import die_with_parent

PRELOADED = (
    "kvxfer._native",
    "kvxfer.bench",
    "kvxfer.serve",
    "kvxfer.measure.local",
    "kvxfer.measure.run",
    "kvxfer.measure.server",
    "kvxfer.measure.session",
    "kvxfer.measure.worker",
    "kvxfer.result.file",
    "kvxfer.result.progress",
    "kvxfer.result.tables",
    "faults.children",
)
TESTS = Path(__file__).parent.parent


class Forked:
    """A process under way. Its standard error is a file."""

    def __init__(self, connection: socket.socket, err: Path) -> None:
        self._connection = connection
        self._said = connection.makefile("r")
        self._err = err
        self.status: int | None = None
        self.pid = int(self._said.readline())

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None when it has not ended within so many seconds."""
        if self.status is None and select.select([self._connection], [], [], seconds)[0]:
            self.status = int(self._said.readline())
        return self.status

    def signal(self, number: int) -> None:
        if self.wait(0) is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it if it still runs."""
        self.signal(signal.SIGKILL)
        self.wait(10)
        self._said.close()
        self._connection.close()


class Zygote:
    """The parent to be of many; safe to use from several threads."""

    def __enter__(self) -> Zygote:
        self._directory = Path(tempfile.mkdtemp(prefix="kz-", dir="/tmp"))
        self._path = self._directory / "socket"
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.zygote", str(self._path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        shutil.rmtree(self._directory)

    def start(self, function: str, environment: Mapping[str, str], err: Path, *arguments: Any) -> Forked:
        """Call faults.children.FUNCTION(*arguments) in a new process; what it returns is the exit status."""
        err.touch()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._path))
        request = {"function": function, "environment": dict(environment), "err": str(err), "arguments": arguments}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Forked(connection, err)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(128)
        print("ready", flush=True)
        while listener in select.select([listener, 0], [], [])[0]:  # our standard input ends with our starter
            connection, _ = listener.accept()
            us = os.getpid()
            if os.fork() == 0:
                listener.close()
                die_with_parent(us)  # which ends with its starter, as said above
                sys.exit(_supervise(connection))
            connection.close()


def _supervise(connection: socket.socket) -> int:
    """Returns in the process asked for only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile("r").readline())
    us = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        die_with_parent(us)
        return _become(request)
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any]) -> int:
    os.setsid()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    nothing = os.open(os.devnull, os.O_RDWR)
    err = os.open(request["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, target in ((nothing, 0), (nothing, 1), (err, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(err)
    children = importlib.import_module("faults.children")
    status: int = getattr(children, request["function"])(*request["arguments"])
    return status


if __name__ == "__main__":
    main()
