"""Mooncake's transfer engine over tcp: one batched call per request, as its connector makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from environment import Environment, MissingError
from job import Job
from offer import MOVES, Offer
from pool import Pool

VERSION = "0.3.13.post1"
# With the default limits it refuses more than 1,024 pieces at a time.
LIMITS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "MC_LOG_LEVEL": "ERROR",
}


def offers(environment: Environment) -> list[Offer]:
    try:
        environment.pip(f"mooncake-transfer-engine-non-cuda=={VERSION}")
        environment.library("libibverbs.so.1", "libibverbs1", "libnl-3-200", "libnl-route-3-200")
    except MissingError as error:
        environment.leave_out("mooncake-tcp", error)
        return []
    environ = LIMITS | environment.library_path
    return [Offer("mooncake-tcp", "mooncake", MOVES, "tcp", VERSION, python=environment.python, environ=environ)]


class Side:
    def __init__(self, _: dict[str, Any], job: Job, role: str) -> None:
        import mooncake.engine as engine

        self._engine = engine.TransferEngine()
        self._job = job
        self._role = role
        self.address = 0

    def open(self) -> None:
        _check(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")

    def allocate(self) -> None:
        self._pool = Pool(self._job.pool_bytes)
        self.address = self._pool.address

    def connect(self, swap: Callable[[Any], Any]) -> None:
        at = self.address
        for size in self._job.region_bytes:
            _check(self._engine.register_memory(at, size), "register_memory")
            at += size
        port, their_address = swap((self._engine.get_rpc_port(), self.address))
        self._peer = f"127.0.0.1:{port}"
        other = "decode" if self._role == "prefill" else "prefill"
        self._arguments = [
            (
                (self._job.offsets(request, self._role) + self.address).tolist(),
                (self._job.offsets(request, other) + their_address).tolist(),
                request.lengths.tolist(),
            )
            for request in self._job.requests
        ]

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        if self._role != self._job.initiator:
            return None
        engine = self._engine
        call = engine.batch_transfer_sync_write if self._job.op == "push" else engine.batch_transfer_sync_read
        moved = []
        for number in range(first, first + count):
            arguments = self._arguments[number % len(self._arguments)]
            began = time.monotonic_ns()
            _check(call(self._peer, *arguments), self._job.op)
            moved.append((began, time.monotonic_ns()))
        return moved


def _check(status: int, what: str) -> None:
    if status < 0:
        raise RuntimeError(f"{what} returned {status}")
