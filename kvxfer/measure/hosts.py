"""Both hosts of a run, and what follows from their caches and memory for the pools of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvxfer.backend.probe import ONE_USER, is_one_host
from kvxfer.control.messages import HostInfo
from kvxfer.errors import UnavailableError
from kvxfer.measure.host import usable_bytes
from kvxfer.measure.request import Row
from kvxfer.model.shape import blocks_of

GIB = 1 << 30

COLD_FACTOR = 4
"""A line is out of the cache when this many times the last-level cache was touched since its last use."""

MAX_SLOTS = 256

FARTHEST_FIRST = ("network", "loopback", "host")
"""What bytes go through."""


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

    def reaches(self, row: Row) -> bool:
        """Whether the row's backend can carry bytes between the two at all."""
        return self.same or not is_one_host(row.backend)

    def may(self, row: Row) -> bool:
        """Whether the kernel is sure to let the row's backend: it may refuse cma between two users' processes."""
        return row.backend not in ONE_USER or self.here.uid == self.there.uid

    def scope_of(self, row: Row, transport: str = "") -> str:
        """What the row's bytes go through; `transport`: what carried them, once that is known.

        UCX may find memory that both sides can reach where it might have used a network (posix/memory, cma/memory).
        """
        if transport and all(lane.endswith("/memory") for lane in transport.split("+")):
            return "host"
        if not self.same:
            return "network"
        return "host" if is_one_host(row.backend) else "loopback"

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
        cold = -(-COLD_FACTOR * self.llc_bytes // self._touched(row)) if self.llc_bytes else 2
        affordable = min(self.usable_here, self.usable_there) // (2 * self._kept(row))
        if self.most_there is not None:
            affordable = min(affordable, self.most_there // row.decode_bytes)
        return max(row.inflight, min(cold, MAX_SLOTS, affordable), 1)

    def is_hot(self, row: Row) -> bool | None:
        """Whether lines may still be cached when they are used again; None when the cache's size is unknown."""
        if not self.llc_bytes:
            return None
        return self.slots(row) * self._touched(row) < COLD_FACTOR * self.llc_bytes

    def _touched(self, row: Row) -> int:
        """Bytes of one request that are read or written on a host; with two hosts, on the one with fewer."""
        read, written = row.read_bytes, row.decode_bytes
        return read + written if self.sides_here == 2 else min(read, written)

    def _kept(self, row: Row) -> int:
        """Memory of one request on a host; with two hosts, on the one with more."""
        prefill, decode = row.prefill_bytes, row.decode_bytes
        return prefill + decode if self.sides_here == 2 else max(prefill, decode)

    def host_bytes(self, row: Row) -> int:
        """Memory of all the pools of a row on one host."""
        return self.slots(row) * self._kept(row)

    def require_memory(self, together: Sequence[Row]) -> None:
        """Raises UnavailableError when the pools of rows that are measured together do not fit; says what would."""
        needed = sum(self.host_bytes(row) for row in together)
        largest = max(together, key=self.host_bytes)
        share = self.host_bytes(largest) / needed
        what = "both sides'" if self.sides_here == 2 else "its"
        for name, usable in (("this host", self.usable_here), ("the decode side's host", self.usable_there)):
            if needed <= usable:
                continue
            raise UnavailableError(
                f"not enough memory: {_named(largest)} need {_gib(needed)} for {what} pools on {name}, where "
                f"{_gib(usable)} can be used; " + what_fits(largest, self._kept, int(usable * share))
            )
        pool = largest.decode_bytes * self.slots(largest)
        if self.most_there is not None and pool > self.most_there:
            raise UnavailableError(
                f"{_named(largest)} need a pool of {_gib(pool)}, and the decode side's server allows "
                f"{_gib(self.most_there)} (its --max-gib); "
                + what_fits(largest, lambda row: row.decode_bytes, self.most_there)
            )

    def with_memory_now(self) -> Hosts:
        """The same hosts with what can be used of this one's memory at the moment."""
        there = usable_bytes() if self.sides_here == 2 else self.usable_there
        return replace(self, usable_here=usable_bytes(), usable_there=there)


def scope_of_all(scopes: Iterable[str]) -> str:
    """Of all rows together: the farthest that one of them goes."""
    return min(scopes, key=FARTHEST_FIRST.index)


def what_fits(row: Row, size: Callable[[Row], int], budget: int) -> str:
    """The longest prompt whose requests in flight fit into so many bytes; `size` is that of one request."""
    blocks = blocks_of(row.tokens, row.spec.block_size)
    low, high = 0, row.tokens // row.spec.block_size + 1  # in blocks: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        held = row.held_blocks * middle // blocks  # of the same share of the prompt, or a little less
        shorter = replace(row, tokens=middle * row.spec.block_size, held_blocks=held)
        low, high = (middle, high) if row.inflight * size(shorter) <= budget else (low, middle)
    if low == 0:
        return "not even one block fits: use a smaller model or another host"
    return f"--tokens {low * row.spec.block_size} fits"


def _named(row: Row) -> str:
    return f"{row.tokens} tokens of {row.shape.name} in {row.spec.dtype.name}"


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"
