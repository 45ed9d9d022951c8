"""Bare sockets, configured as kvxfer's: the same pieces, an answer of a few bytes, no more (native/floor.cpp)."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from environment import Environment, MissingError
from job import Job
from offer import FLOOR, Offer
from pool import Pool

SOURCE = Path(__file__).parent.parent / "native" / "floor.cpp"
SOCKETS = (1, 2)
WAIT_S = 60


def offers(environment: Environment) -> list[Offer]:
    try:
        library = environment.compiled(SOURCE)
    except MissingError as error:
        environment.leave_out("bare-sockets", error)
        return []
    return [
        Offer(
            f"bare-sockets-{sockets}",
            "bare_sockets",
            FLOOR,
            "tcp",
            "",
            ("push",),
            options={"library": str(library), "sockets": sockets},
        )
        for sockets in SOCKETS
    ]


class Side:
    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self._library = ctypes.CDLL(options["library"])
        self._count = options["sockets"]
        self._job = job
        self._role = role
        self.address = 0

    def open(self) -> None:
        if self._role == "decode":
            self._server = socket.create_server(("127.0.0.1", 0))

    def allocate(self) -> None:
        self._pool = Pool(self._job.pool_bytes)
        self.address = self._pool.address

    def connect(self, swap: Callable[[Any], Any]) -> None:
        if self._role == "decode":
            swap(self._server.getsockname())
            self._sockets = [self._server.accept()[0] for _ in range(self._count)]
        else:
            address = swap(None)
            self._sockets = [socket.create_connection(address, WAIT_S) for _ in range(self._count)]
        for one in self._sockets:
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            self._library.floor_no_delay(one.fileno())

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        requests = [self._job.request(number) for number in range(first, first + count)]
        addresses = np.concatenate([self._job.offsets(one, self._role) for one in requests]) + np.uint64(self.address)
        lengths = np.concatenate([one.lengths for one in requests])
        fds = (ctypes.c_int * self._count)(*[one.fileno() for one in self._sockets])
        taken = np.zeros(count, np.int64)
        status = self._library.floor_move(
            fds,
            ctypes.c_size_t(self._count),
            ctypes.c_bool(self._role == "prefill"),
            ctypes.c_void_p(addresses.ctypes.data),
            ctypes.c_void_p(lengths.ctypes.data),
            ctypes.c_size_t(self._job.descriptors),
            ctypes.c_size_t(count),
            ctypes.c_void_p(taken.ctypes.data),
        )
        if status != 0:
            raise RuntimeError("a connection broke")
        return [(0, int(ns)) for ns in taken] if self._role == "prefill" else None
