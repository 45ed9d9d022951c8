"""Memory of the contenders that bring none of their own, and the pattern by which every side's bytes are checked.

Anonymous memory with huge pages advised, as kvxfer's pools are; every page is touched when the pattern is written.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt
from job import Job

HUGE_PAGE = 2 << 20
POISON = 0xDB
STEP = np.uint64(0x9E3779B97F4A7C15)
CHUNK = 64 << 20


class Pool:
    """`address` is aligned to a huge page and holds `bytes`."""

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-base // HUGE_PAGE) * HUGE_PAGE
        self.bytes = size
        seen(self.address, size)[:] = POISON


def seen(address: int, size: int) -> npt.NDArray[np.uint8]:
    """The memory at an address as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def fill(address: int, size: int) -> None:
    """Every word of 8 bytes tells its place in the pool."""
    words = seen(address, size).view(np.uint64)
    for start in range(0, len(words), CHUNK // 8):
        part = words[start : start + CHUNK // 8]
        part[:] = np.arange(start + 1, start + 1 + len(part), dtype=np.uint64) * STEP


def poison(address: int, size: int) -> None:
    seen(address, size)[:] = POISON


def wrong_pieces(job: Job, number: int, address: int) -> int:
    """Pieces of a moved request that do not hold what their place at prefill holds, in the decode side's pool."""
    request = job.request(number)
    here = seen(address, job.pool_bytes)
    wrong = 0
    for source, target, length in zip(
        job.offsets(request, "prefill"), job.offsets(request, "decode"), request.lengths, strict=True
    ):
        first, count = int(source) // 8, int(length) // 8
        expected = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * STEP
        got = here[int(target) : int(target) + int(length)].view(np.uint64)
        wrong += not np.array_equal(got, expected)
    return wrong
