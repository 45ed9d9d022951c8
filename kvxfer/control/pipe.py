"""Messages over an inherited stream socket between a process and the worker it started: a 4-byte length, then the
message.
"""

from __future__ import annotations

import select
import socket
import struct
import time

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 << 20


class PipeClosedError(Exception):
    """The other end is gone, or does not take what is sent."""


class Pipe:
    """One end. Sending gives up after `send_timeout_s`; receiving never blocks in the middle of a message."""

    def __init__(self, end: socket.socket, send_timeout_s: float = 3.0) -> None:
        self._socket = end
        self._timeout = send_timeout_s
        self._socket.setblocking(False)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Raises PipeClosedError."""
        left = memoryview(LENGTH.pack(len(data)) + data)
        give_up_at = time.monotonic() + self._timeout
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                remaining = give_up_at - time.monotonic()
                if remaining <= 0 or not self._wait(select.POLLOUT, remaining):
                    raise PipeClosedError("it takes no more messages") from None
            except OSError as error:
                raise PipeClosedError(str(error)) from error

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """The messages that are there, after waiting for the first at most so long (None: for ever).

        Raises PipeClosedError when the other end is gone and nothing is left to hand out.
        """
        if not self._complete():
            self._wait(select.POLLIN, timeout_s)
        closed = self._read()
        messages = []
        while self._complete():
            (length,) = LENGTH.unpack_from(self._buffer)
            messages.append(bytes(self._buffer[LENGTH.size : LENGTH.size + length]))
            del self._buffer[: LENGTH.size + length]
        if closed and not messages:
            raise PipeClosedError("it closed the connection")
        return messages

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        """Whether it came. By poll: select() knows no descriptor beyond 1023, and a server may have as many clients."""
        poller = select.poll()
        poller.register(self._socket, event)
        return bool(poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))

    def _complete(self) -> bool:
        if len(self._buffer) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise PipeClosedError("it sent a message of impossible length")
        return bool(len(self._buffer) >= LENGTH.size + length)

    def _read(self) -> bool:
        """Take what the socket holds; True when the other end is closed."""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._buffer += data
