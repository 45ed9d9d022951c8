"""Both hosts of a run, and what follows from their caches and memory for the pools of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvxfer.control.messages import HostInfo
from kvxfer.errors import UnavailableError
from kvxfer.measure.request import Row
from kvxfer.model.shape import blocks_of

GIB = 1 << 30

COLD_FACTOR = 4
"""A line is out of the cache when this many times the last-level cache was touched since its last use."""

MAX_SLOTS = 256


@dataclass(frozen=True)
class Hosts:
    here: HostInfo  # the prefill side's
    there: HostInfo  # the decode side's
    usable_here: int  # bytes
    usable_there: int
    peer_host: str
    most_there: int | None = None  # the largest pool that the operator of the decode side's server allows

    @property
    def same(self) -> bool:
        """One kernel and one network stack under both sides."""
        return bool(self.here.boot_id) and (self.here.boot_id, self.here.netns) == (
            self.there.boot_id,
            self.there.netns,
        )

    @property
    def scope(self) -> str:
        return "loopback" if self.same else "network"

    @property
    def one_machine(self) -> bool:
        """Two network stacks, but one kernel: containers or network namespaces."""
        return not self.same and bool(self.here.boot_id) and self.here.boot_id == self.there.boot_id

    @property
    def sides_here(self) -> int:
        """Sides of a transfer that use one host's caches and memory."""
        return 2 if self.same or self.one_machine else 1

    @property
    def llc_bytes(self) -> int:
        return max(self.here.llc_bytes, self.there.llc_bytes)

    def slots(self, row: Row) -> int:
        """Requests that share a pool without overlap: what is in flight, and enough to be out of the caches.

        Cold caches are worth half of the memory, not more: a row may then be hot, which it says.
        """
        one = row.largest_side_bytes
        cold = -(-COLD_FACTOR * self.llc_bytes // (one * self.sides_here)) if self.llc_bytes else 2
        affordable = min(self.usable_here, self.usable_there) // (2 * self.sides_here * one)
        if self.most_there is not None:
            affordable = min(affordable, self.most_there // one)
        return max(row.inflight, min(cold, MAX_SLOTS, affordable), 1)

    def is_hot(self, row: Row) -> bool | None:
        """Whether lines may still be cached when they are used again; None when the cache's size is unknown."""
        if not self.llc_bytes:
            return None
        return self.slots(row) * row.largest_side_bytes * self.sides_here < COLD_FACTOR * self.llc_bytes

    def pool_bytes(self, row: Row) -> int:
        """Memory of one side's pool, the larger one's."""
        return self.slots(row) * row.largest_side_bytes

    def spare_bytes(self, row: Row) -> int:
        """Memory beside the pools, with some left for everyone else."""
        return max(0, self.usable_here - self.pool_bytes(row) * self.sides_here)

    def require_memory(self, together: Sequence[Row]) -> None:
        """Raises UnavailableError when the pools of rows that are measured together do not fit; says what would."""
        one_side = sum(self.pool_bytes(row) for row in together)
        largest = max(together, key=self.pool_bytes)
        share = self.pool_bytes(largest) / one_side
        sides = self.sides_here
        what = "both sides'" if sides == 2 else "its"
        for name, usable in (("this host", self.usable_here), ("the decode side's host", self.usable_there)):
            if one_side * sides <= usable:
                continue
            raise UnavailableError(
                f"not enough memory: {_named(largest)} need {_gib(one_side * sides)} for {what} pools on {name}, where "
                f"{_gib(usable)} can be used; " + _what_fits(largest, int(usable / sides * share))
            )
        if self.most_there is not None and self.pool_bytes(largest) > self.most_there:
            raise UnavailableError(
                f"{_named(largest)} need a pool of {_gib(self.pool_bytes(largest))}, and the decode side's server "
                f"allows {_gib(self.most_there)} (its --max-gib); " + _what_fits(largest, self.most_there)
            )


def _what_fits(row: Row, budget: int) -> str:
    """The longest prompt whose pool fits into so many bytes."""
    blocks = blocks_of(row.tokens, row.spec.block_size)
    low, high = 0, row.tokens // row.spec.block_size + 1  # in blocks: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        held = row.held_blocks * middle // blocks  # of the same share of the prompt, or a little less
        shorter = replace(row, tokens=middle * row.spec.block_size, held_blocks=held)
        low, high = (middle, high) if row.inflight * shorter.largest_side_bytes <= budget else (low, middle)
    if low == 0:
        return "not even one block fits: use a smaller model or another host"
    return f"--tokens {low * row.spec.block_size} fits"


def _named(row: Row) -> str:
    return f"{row.tokens} tokens of {row.shape.name} in {row.spec.dtype.name}"


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"
