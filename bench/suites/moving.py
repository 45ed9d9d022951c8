"""Two contexts of one backend in this process, joined on this host, with plans for scattered pieces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvxfer import _native
from kvxfer.cache.layout import Slice
from kvxfer.cache.plan import TransferPlan, transfer_plan
from kvxfer.cache.tables import scatter

MIB = 1 << 20
WAIT_NS = 10_000_000_000


def rate(benchmark, size: int) -> None:
    """Say in a benchmark's record what bandwidth its median is."""
    if benchmark.stats:  # absent under --benchmark-disable
        benchmark.extra_info["gbyte_s"] = round(size / benchmark.stats.stats.median / 1e9, 3)


def blocks_of(piece: int, regions: int) -> list[Slice]:
    """Whole blocks of `piece` bytes in so many regions, to the regions of the same number."""
    return [Slice(r, 0, r, r, piece, piece, 0, 0, piece) for r in range(regions)]


@dataclass
class Moving:
    """A request of `bytes` in scattered pieces, ready to be posted from the prefill side."""

    prefill: _native.Context
    decode: _native.Context
    peer: _native.Peer
    plans: list[_native.Plan]
    bytes: int
    tag: int = 0

    def push(self) -> None:
        """One request to its confirmation, on the next of two block tables."""
        self.tag += 1
        self.prefill.post(self.plans[self.tag % len(self.plans)], _native.Op.push, [], self.tag)
        waiting = True
        while waiting:
            events = self.prefill.poll(16, WAIT_NS)
            assert events, "nothing was confirmed in time"
            waiting = all(event.kind != _native.EventKind.confirmed for event in events)
        while self.decode.poll(16, 0):
            pass


def connected(backend: str, piece: int, total: int, regions: int = 16, options: dict[str, int] | None = None) -> Moving:
    """A pair whose pools hold one request of total / piece pieces."""
    token = bytes(32)
    prefill, decode = (_native.open_context(backend, token, options or {}) for _ in range(2))
    endpoint = decode.listen("127.0.0.1", 0)
    blocks = total // piece // regions
    sides = []
    with ThreadPoolExecutor(2) as both:
        accepting = both.submit(decode.accept, WAIT_NS)
        peers = [prefill.connect(endpoint, WAIT_NS), accepting.result()]
        for context in (prefill, decode):
            whole = context.allocate(total)
            sides.append(
                [context.register_memory(whole.address + r * blocks * piece, blocks * piece) for r in range(regions)]
            )
        peers[0].import_keys(decode.export_keys(sides[1]))
        peers[1].import_keys(prefill.export_keys(sides[0]))
        tables = scatter(blocks, 1, 2, 1.0, 0)
        plans = []
        for p, d in zip(tables.prefill, tables.decode, strict=True):
            plan = transfer_plan(blocks_of(piece, regions), [p], [d])
            ours = both.submit(prepare, prefill, peers[0], plan, sides[0][0].id, True)
            prepare(decode, peers[1], plan, sides[1][0].id, False)
            plans.append(ours.result())
    return Moving(prefill, decode, peers[0], plans, total)


def prepare(
    context: _native.Context, peer: _native.Peer, plan: TransferPlan, first: int, is_prefill: bool
) -> _native.Plan:
    ours = plan.prefill_regions + np.uint32(first), plan.prefill_offsets
    theirs = plan.decode_regions + np.uint32(first), plan.decode_offsets
    local, remote = (ours, theirs) if is_prefill else (theirs, ours)
    return context.prepare(peer, *local, *remote, plan.lengths, plan.segment_starts, WAIT_NS)
