"""The requests that a cost model is fitted on, chosen so that its unknowns can be told apart.

Lengths are one block, and from a 64th of the longest prompt asked for up to it, each twice the one before; scattered
and contiguous blocks, and smaller and larger ones, give pieces of different sizes, so that bytes and descriptors do not
rise together. Others, of lengths and fragmentations between these, are held out: they tell how well the model predicts.
A few go several at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvxfer.cache.wire import run_count
from kvxfer.cost.points import Role
from kvxfer.errors import UsageError
from kvxfer.measure.request import Row

INFLIGHT = 4


@dataclass(frozen=True)
class Place:
    """A request of the grid, as shares of the row that it is made of."""

    role: Role
    length: float  # of the longest prompt; 0: one block
    fragmentation: float = 1.0
    block: float = 1.0  # of the block size asked for
    inflight: int = 1


DESIGN = (
    *(Place("fit", length) for length in (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)),
    *(Place("fit", length, fragmentation=0) for length in (1 / 64, 1 / 8, 1)),
    *(Place("fit", length, block=1 / 4) for length in (0, 1 / 32, 1 / 4)),
    *(Place("fit", length, block=1 / 16) for length in (0, 1 / 64, 1 / 16)),
    Place("fit", 1 / 4, block=4),
    Place("held_out", 3 / 4, fragmentation=0.5),
    Place("held_out", 3 / 8, fragmentation=0.75),
    Place("held_out", 3 / 16, block=1 / 2),
    Place("held_out", 3 / 32, fragmentation=0.25),
    Place("held_out", 3 / 64, block=1 / 8),
    Place("held_out", 1 / 128),
    Place("inflight", 0, inflight=INFLIGHT),
    Place("inflight", 0, block=1 / 16, inflight=INFLIGHT),
    Place("inflight", 1 / 64, inflight=INFLIGHT),
)


def design(row: Row) -> list[tuple[Role, Row]]:
    """The grid up to `row`, the longest prompt: without what this cache cannot be cut into, and nothing twice."""
    found: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], tuple[Role, Row]] = {}
    for place in DESIGN:
        for one in _placed(place, row):
            runs = tuple(run_count(blocks, one.fragmentation) for blocks in one.blocks)
            known = (one.spec.block_size, one.inflight, tuple(one.blocks), runs)
            found.setdefault(known, (place.role, one))
    return list(found.values())


def _placed(place: Place, row: Row) -> Iterator[Row]:
    """The row of a place; none where the cache refuses the block size."""
    block_size = max(1, round(row.spec.block_size * place.block))
    tokens = max(block_size, round(row.tokens * place.length / block_size) * block_size)
    try:
        one = replace(
            row,
            spec=replace(row.spec, block_size=block_size),
            tokens=min(tokens, row.tokens),
            held_blocks=0,
            fragmentation=place.fragmentation,
            inflight=place.inflight,
        )
        one.check()
    except UsageError:
        return
    yield one
