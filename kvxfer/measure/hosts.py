"""Both hosts of a run, and what follows from their caches and memory for the pools of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.cache.spec import CacheSpec
from kvxfer.control.messages import HostInfo
from kvxfer.errors import UnavailableError
from kvxfer.measure.request import Row

GIB = 1 << 30

COLD_FACTOR = 4
"""A line is out of the cache when this many times the last-level cache was touched since its last use."""

MAX_SLOTS = 256

SPARE = 0.95
"""Share of the available memory that pools may take."""


@dataclass(frozen=True)
class Hosts:
    here: HostInfo  # the prefill side's
    there: HostInfo  # the decode side's
    available_here: int
    available_there: int
    peer_host: str

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
        """Requests that share a pool without overlap: enough to be out of the caches, and for what is in flight."""
        cold = -(-COLD_FACTOR * self.llc_bytes // (row.bytes * self.sides_here)) if self.llc_bytes else 2
        return max(row.inflight, min(cold, MAX_SLOTS), 1)

    def is_hot(self, row: Row) -> bool | None:
        """Whether lines may still be cached when they are used again; None when the cache's size is unknown."""
        if not self.llc_bytes:
            return None
        return self.slots(row) * row.bytes * self.sides_here < COLD_FACTOR * self.llc_bytes

    def pool_bytes(self, row: Row) -> int:
        """Memory of one side's pool."""
        return self.slots(row) * row.bytes

    def spare_bytes(self, row: Row) -> int:
        """Memory beside the pools, with some left for everyone else."""
        return max(0, int(SPARE * self.available_here) - self.pool_bytes(row) * self.sides_here)

    def require_memory(self, together: Sequence[Row]) -> None:
        """Raises UnavailableError when the pools of rows that are measured together do not fit; says what would."""
        one_side = sum(self.pool_bytes(row) for row in together)
        largest = max(together, key=lambda row: row.bytes)
        for name, available, sides in (
            ("this host", self.available_here, self.sides_here),
            ("the decode side's host", self.available_there, self.sides_here),
        ):
            usable = int(SPARE * available)
            if one_side * sides <= usable:
                continue
            what = "both sides'" if sides == 2 else "its"
            raise UnavailableError(
                f"not enough memory: {largest.tokens} tokens of {largest.shape.name} in {largest.spec.dtype.name} need "
                f"{one_side * sides / GIB:.1f} GiB for {what} pools on {name}, where {usable / GIB:.1f} GiB can be "
                "used; " + _what_fits(largest.spec, usable // sides * largest.bytes // one_side)
            )


def _what_fits(spec: CacheSpec, budget: int) -> str:
    tokens = budget // sum(spec.block_bytes) * spec.block_size
    if tokens < 1:
        return "not even one block fits: use a smaller model or another host"
    return f"--tokens {tokens} fits"
