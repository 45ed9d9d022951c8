"""Files that a user names: never more of them than is allowed, and never for longer.

What is no regular file, a pipe or a device, need not end: a FIFO that nobody writes to never begins. All of it has to
be there within PIPE_S.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import time
from typing import BinaryIO, cast

PIPE_S = 30.0
MIB = 1 << 20
BUFFER = 1 << 16


def open_to_read(path: str | os.PathLike[str], most: int) -> BinaryIO:
    """The file, to be read in blocks or by lines, from its beginning.

    It and its reads raise OSError, whose strerror says why: also for what has more than `most` bytes, or takes longer
    than PIPE_S.
    """
    # Without waiting for a writer; what a pipe does not hold yet is waited for when it is read.
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    return cast("BinaryIO", io.BufferedReader(_Bounded(file, most), BUFFER))


class _Bounded(io.RawIOBase):
    """A file that does not let itself be read on and on."""

    def __init__(self, file: io.FileIO, most: int) -> None:
        self._file = file
        self._ends = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        self._until = time.monotonic() + PIPE_S
        self._most = self._left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # of mypy's wider Buffer
        count = None
        while count is None:  # nothing yet
            if not self._ends:
                self._wait()
            count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise OSError(errno.EFBIG, f"it has more than {self._most / MIB:g} MiB")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _wait(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0 or not select.select([self._file], [], [], left)[0]:
            raise TimeoutError(errno.ETIMEDOUT, f"it is no regular file, and has not ended within {PIPE_S:g} s")
