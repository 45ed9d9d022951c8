"""kvxfer itself: every backend of this build that moves data and is available here, with its default options, and
again with those of --also.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from environment import Environment
from job import Job, Request
from offer import MOVES, Offer

TOKEN = bytes(32)
WAIT_NS = 60_000_000_000
MEMORY = "memory"


def offers(environment: Environment) -> list[Offer]:
    from kvxfer import __version__, _native

    found = []
    for name, _ in _native.backends():
        probe = _native.probe(name)
        if not probe.available:
            environment.leave_out(f"kvxfer-{name}", probe.why_not)
            continue
        can = _native.open_context(name, TOKEN, {}).capabilities
        if can.moves_data:
            ops = tuple(op for op in ("push", "pull") if getattr(can, op))
            transport = "tcp" if "tcp" in probe.transports.split(",") else MEMORY
            options = {"backend": name, "options": {}}
            offer = Offer(f"kvxfer-{name}", "kvxfer_backends", MOVES, transport, __version__, ops, options=options)
            found += [offer, *(_with(offer, given) for backend, given in environment.variants if backend == name)]
    return found


def _with(offer: Offer, given: dict[str, int]) -> Offer:
    shown = ",".join(f"{name}={value}" for name, value in given.items())
    return replace(offer, name=f"{offer.name}:{shown}", options=offer.options | {"options": given})


class Side:
    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        from kvxfer import _native

        self._native = _native
        self._backend = options["backend"]
        self._options = options.get("options", {})
        self._job = job
        self._prefill = role == "prefill"
        self.address = 0

    def open(self) -> None:
        self._context = self._native.open_context(self._backend, TOKEN, self._options)
        self._endpoint = "" if self._prefill else self._context.listen("127.0.0.1", 0)

    def allocate(self) -> None:
        self._whole = self._context.allocate(self._job.pool_bytes)
        if self._context.capabilities.moves_data:
            self.address = self._whole.address

    def connect(self, swap: Callable[[Any], Any]) -> None:
        regions, at = [], self._whole.address
        for size in self._job.region_bytes:
            regions.append(self._context.register_memory(at, size))
            at += size
        self._first = np.uint32(regions[0].id)
        endpoint = swap(self._endpoint)
        connect = self._context.connect
        self._peer = connect(endpoint, WAIT_NS) if self._prefill else self._context.accept(WAIT_NS)
        self._peer.import_keys(swap(self._context.export_keys([self._whole, *regions])))
        self._requests = [self._prepared(request) for request in self._job.requests]

    def _prepared(self, request: Request) -> Any:
        plan = self._context.prepare(self._peer, *self._arrays(request), WAIT_NS)
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
        leg = self._native.Leg(self._peer, plan, *nothing, *nothing, nothing[1])
        return self._native.LoopRequest([leg])

    def _arrays(self, request: Request) -> tuple[Any, Any, Any, Any, Any, Any]:
        prefill = request.prefill_regions + self._first, request.prefill_offsets
        decode = request.decode_regions + self._first, request.decode_offsets
        own, other = (prefill, decode) if self._prefill else (decode, prefill)
        return (*own, *other, request.lengths, request.segment_starts)

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        """Timed by the native loop, which is what kvxfer bench reports; posting is at 0 on its clock."""
        result = self._native.run_loop(
            self._context,
            self._requests,
            self._native.Regions([]),
            self._native.Side.prefill if self._prefill else self._native.Side.decode,
            self._native.Op[self._job.op],
            first,
            count,
            1,
            False,
            0,
            WAIT_NS,
        )
        return [(0, int(ns)) for ns in np.frombuffer(result.transfer_ns, np.int64)] or None

    def describe(self) -> list[str]:
        return self._peer.describe()

    def own_cpu(self, repeats: int, first: int) -> int:
        """User time in ns of `repeats` times preparing a request and moving it once: of this side, all threads."""
        arrays = [self._arrays(request) for request in self._job.requests]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
        for number in range(first, first + repeats):
            plan = self._context.prepare(self._peer, *arrays[number % len(arrays)], WAIT_NS)
            leg = self._native.Leg(self._peer, plan, *nothing, *nothing, nothing[1])
            self._requests = [self._native.LoopRequest([leg])]
            self.move(number, 1)
        return round((resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) * 1e9)

    def copying(self, repeats: int) -> int:
        """Median ns of copying the job's pieces within this side's pool: what a memory transport leaves to memcpy."""
        if not self.address:
            return 0
        request = self._job.requests[0]
        to, source = (self._job.offsets(request, role) for role in ("decode", "prefill"))
        taken = []
        for _ in range(repeats):
            began = time.thread_time_ns()
            self._native.copy_pieces(self.address, to, self.address, source, request.lengths)
            taken.append(time.thread_time_ns() - began)
        return int(np.median(taken))
