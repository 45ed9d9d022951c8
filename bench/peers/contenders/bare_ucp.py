"""A bare loop of UCP's puts or gets of the same pieces (native/bare_ucp.cpp), by the UCX library that kvxfer uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from environment import Environment, MissingError
from job import Job
from offer import FLOOR, Offer
from pool import Pool
from ucx_library import WAYS, UcxLibrary

SOURCE = Path(__file__).parent.parent / "native" / "bare_ucp.cpp"
WINDOW = 128
WAITING = {"tcp": {"": False, "-polling": True}, "memory": {"": False}}
"""Whether a thread with nothing to do sleeps until UCX has an event, or asks again at once. In memory it never has
nothing to do: each call moves its piece.
"""


def offers(environment: Environment) -> list[Offer]:
    try:
        ucx = UcxLibrary.of_kvxfer()
        library = ucx.compiled(environment, SOURCE)
    except MissingError as error:
        environment.leave_out("bare-ucx", error)
        return []
    return [
        Offer(
            f"bare-ucx-{way.name}{suffix}",
            "bare_ucp",
            FLOOR,
            way.transport,
            ucx.version,
            way.ops,
            environ=way.environ | {"UCX_LOG_LEVEL": "error"},
            options={
                "library": str(library),
                "polling": polling,
                "own_allocation": way.own_allocation,
            },
        )
        for way in WAYS
        for suffix, polling in WAITING[way.transport].items()
    ]


class Side:
    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self._library = ctypes.CDLL(options["library"])
        self._library.bare_pool.restype = ctypes.c_uint64
        for name in ("bare_address", "bare_key"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._options = options
        self._job = job
        self._role = role
        self._moves = role == job.initiator
        self.address = 0

    def open(self) -> None:
        self._library.bare_open(ctypes.c_bool(self._options["polling"]), ctypes.c_uint32(WINDOW))

    def allocate(self) -> None:
        own = self._options["own_allocation"]
        self._pool = None if own else Pool(self._job.pool_bytes)
        given = self._pool.address if self._pool else 0
        self.address = self._library.bare_pool(ctypes.c_uint64(given), ctypes.c_size_t(self._job.pool_bytes))

    def connect(self, swap: Callable[[Any], Any]) -> None:
        address, key, self._there = swap((self._read("bare_address"), self._read("bare_key"), self.address))
        if self._moves:
            self._library.bare_connect(address, key)
        else:
            self._library.bare_serve(ctypes.c_size_t(1))

    def _read(self, name: str) -> bytes:
        at = ctypes.c_void_p()
        size = getattr(self._library, name)(ctypes.byref(at))
        return ctypes.string_at(at, size)

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        if not self._moves:
            self._library.bare_serve(ctypes.c_size_t(count))
            return None
        requests = [self._job.request(number) for number in range(first, first + count)]
        target = "decode" if self._role == "prefill" else "prefill"
        here, there = (
            np.concatenate([self._job.offsets(one, role) for one in requests]) + np.uint64(base)
            for role, base in ((self._role, self.address), (target, self._there))
        )
        lengths = np.concatenate([one.lengths for one in requests])
        taken = np.zeros(count, np.int64)
        self._library.bare_move(
            ctypes.c_bool(self._job.op == "push"),
            *(ctypes.c_void_p(array.ctypes.data) for array in (here, there, lengths)),
            ctypes.c_size_t(self._job.descriptors),
            ctypes.c_size_t(count),
            ctypes.c_void_p(taken.ctypes.data),
        )
        return [(0, int(ns)) for ns in taken]
