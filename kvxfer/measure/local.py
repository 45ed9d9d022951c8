"""The second process of a run without --peer: a server for this bench alone, on a socket only this user can reach.

python -m kvxfer.measure.local ENDPOINT OWNER_FD
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import UnavailableError

DATA_ADDRESS = "127.0.0.1"

START_S = 30.0
"""How long the second process may take to start; imports from a slow disk take long."""


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """Start one; yields its endpoint. It ends with the context, or by itself when this process dies."""
    directory = _private_directory()
    endpoint = f"ipc://{directory / 'control'}"
    try:
        process, writer = _start(endpoint)
        try:
            _await_start(process, directory / "control")
            yield endpoint
        finally:
            os.close(writer)  # tells the server to end
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(endpoint: str) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the descriptor with which it ends."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.measure.local", endpoint, str(reader)],
            pass_fds=[reader],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if "KVXFER_DEBUG" in os.environ else subprocess.DEVNULL,
        )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return process, writer


def _await_start(process: subprocess.Popen[bytes], control: Path) -> None:
    give_up_at = time.monotonic() + START_S
    while not control.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise UnavailableError(f"the second process, started on this host, {_how(process.returncode)}")
        time.sleep(0.002)


def _how(status: int | None) -> str:
    """It failed to start, as far as that can be told from here; its limits are ours."""
    if status is None:
        return f"did not start within {START_S:.0f} s; KVXFER_DEBUG=1 shows what it says"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"ended with status {status}; is there memory, a process, threads and files left for it (`ulimit -n` is "
        f"{files})? KVXFER_DEBUG=1 shows why"
    )


def _private_directory() -> Path:
    """For the socket; its path must be short (107 characters), which a long TMPDIR would break."""
    for parent in (None, "/tmp"):
        with contextlib.suppress(OSError):
            directory = Path(tempfile.mkdtemp(prefix="kvxfer-", dir=parent))
            if len(str(directory)) < 90:
                return directory
            directory.rmdir()
    raise UnavailableError("no directory for the control socket: neither TMPDIR nor /tmp can be written; set TMPDIR")


def main() -> None:
    from kvxfer.control.channel import server_socket
    from kvxfer.measure.server import Server, Settings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    endpoint, owner = sys.argv[1], int(sys.argv[2])
    with server_socket(endpoint, None, frozenset()) as socket:
        Server(socket, Settings(data_address=DATA_ADDRESS, owner_fd=owner), lambda _: None).run()
    shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)  # the owner may be dead


if __name__ == "__main__":
    main()
