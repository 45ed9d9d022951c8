"""Jobs made of kvxfer's own block tables and transfer plans, fully fragmented."""

from __future__ import annotations

from dataclasses import fields

from job import Job, Request

from kvxfer.cache.layout import Slice
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.tables import scatter
from kvxfer.measure.host import last_level_cache_bytes

COLD = 4
"""A line is used again only after so many times the last-level cache have been touched."""


def scattered(op: str, piece: int, regions: int, blocks: int, cold: bool = True) -> Job:
    """Requests of `blocks` blocks of `piece` bytes in each of so many regions; as many as it takes to be cold."""
    size = piece * regions * blocks
    slots = max(1, -(-COLD * last_level_cache_bytes() // size)) if cold else 1
    tables = scatter(blocks, slots, 2 if slots == 1 else 1, 1.0, 0)
    slices = [Slice(r, 0, r, r, piece, piece, 0, 0, piece) for r in range(regions)]
    requests = []
    for prefill, decode in zip(tables.prefill, tables.decode, strict=True):
        plan = transfer_plan(slices, [prefill], [decode])
        requests.append(Request(**{field.name: getattr(plan, field.name) for field in fields(Request)}))
    return Job(op, [piece * tables.pool_blocks] * regions, requests)
