"""NIXL's UCX backend, over tcp and over shared memory (posix, cma).

A write is done when its state says so (the endpoints are flushed: the bytes are in place) and the target has got the
notification that goes after it. Descriptor lists are prepared once, as its connectors do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from environment import Environment, MissingError
from job import Job
from offer import MOVES, Offer
from pool import Pool

VERSION = "1.5.1"
# Its bundled ib module crashes at exit. Without the device, tcp stripes over every interface there is.
COMMON = {"UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
# What was fastest here of with and without a progress thread, with and without a pause between two looks.
TRANSPORTS = {
    "tcp": ("tcp", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}, {"progress_thread": True, "backend": {}}),
    # UCX leaves these transports out unless the error mode is none. With a progress thread notifications get lost.
    "shm": (
        "memory",
        {"UCX_TLS": "posix,cma"},
        {"progress_thread": False, "backend": {"ucx_error_handling_mode": "none"}},
    ),
}
PAUSE_S = 50e-6
"""Between two looks at a state or at notifications. NIXL has no call that waits, and the other threads need the CPU."""


def offers(environment: Environment) -> list[Offer]:
    try:
        environment.pip(f"nixl=={VERSION}", f"nixl-cu12=={VERSION}")
    except MissingError as error:
        environment.leave_out("nixl", error)
        return []
    return [
        Offer(
            f"nixl-{name}",
            "nixl",
            MOVES,
            transport,
            VERSION,
            python=environment.python,
            environ=COMMON | environ,
            options=options,
        )
        for name, (transport, environ, options) in TRANSPORTS.items()
    ]


class Side:
    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        import nixl._api as api

        self._api = api
        self._options = options
        self._job = job
        self._role = role
        self._initiates = role == job.initiator
        self.address = 0

    def open(self) -> None:
        config = self._api.nixl_agent_config(enable_prog_thread=self._options["progress_thread"], backends=[])
        self._agent = self._api.nixl_agent(f"{self._role}-{os.getpid()}", config)
        self._agent.create_backend("UCX", self._options["backend"])

    def allocate(self) -> None:
        self._pool = Pool(self._job.pool_bytes)
        self.address = self._pool.address

    def connect(self, swap: Callable[[Any], Any]) -> None:
        regions, at = [], self.address
        for size in self._job.region_bytes:
            regions.append((at, size, 0, ""))
            at += size
        self._registered = self._agent.register_memory(regions, "DRAM")
        metadata, their_address = swap((self._agent.get_agent_metadata(), self.address))
        name = self._agent.add_remote_agent(metadata)
        self._other = name.decode() if isinstance(name, bytes) else name
        if self._initiates:
            self._agent.make_connection(self._other)
            self._transfers = [self._prepared(number, their_address) for number in range(len(self._job.requests))]

    def _prepared(self, number: int, their_address: int) -> Any:
        request = self._job.requests[number]
        target = "decode" if self._role == "prefill" else "prefill"
        indices = np.arange(len(request.lengths), dtype=np.int32)
        lists = []
        for agent, base, role in (("NIXL_INIT_AGENT", self.address, self._role), (self._other, their_address, target)):
            addresses = self._job.offsets(request, role) + np.uint64(base)
            rows = np.stack([addresses, request.lengths, np.zeros_like(addresses)], axis=1)
            lists.append(self._agent.prep_xfer_dlist(agent, rows, "DRAM"))
        operation = "WRITE" if self._job.op == "push" else "READ"
        return self._agent.make_prepped_xfer(operation, lists[0], indices, lists[1], indices, b"moved")

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        moved = [self._move(number) for number in range(first, first + count)]
        return moved if self._initiates or self._job.op == "push" else None

    def _move(self, number: int) -> tuple[int, int]:
        began = time.monotonic_ns()
        if not self._initiates:
            self._await_notification()
            ended = time.monotonic_ns()
            self._agent.send_notif(self._other, b"seen")
            return began, ended
        transfer = self._transfers[number % len(self._transfers)]
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(PAUSE_S)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in state {state}")
        ended = time.monotonic_ns()
        # Out of the clock: without a progress thread nothing leaves but while this side looks.
        self._await_notification()
        return began, ended

    def _await_notification(self) -> None:
        while not self._agent.get_new_notifs():
            time.sleep(PAUSE_S)
