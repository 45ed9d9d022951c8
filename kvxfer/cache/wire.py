"""What one request puts on the wire between the ranks of both sides: bytes and pieces, whole blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.cache.layout import RankPair


def run_count(blocks: int, fragmentation: float) -> int:
    """Runs of neighbouring blocks that a request of so many is cut into: each is a piece of every region."""
    return 1 + round(fragmentation * (blocks - 1))


def pieces(pairs: Sequence[RankPair]) -> Callable[[Sequence[int], float], int]:
    """Descriptors of a request by its blocks in each group and their fragmentation; only whole blocks join to runs."""
    joined: Counter[int] = Counter()
    apart: Counter[int] = Counter()
    for one in (one for pair in pairs for one in pair.slices):
        (joined if one.whole else apart)[one.group] += one.count

    def of_request(blocks: Sequence[int], fragmentation: float) -> int:
        runs = sum(count * run_count(blocks[group], fragmentation) for group, count in joined.items())
        return runs + sum(count * blocks[group] for group, count in apart.items())

    return of_request


@dataclass(frozen=True)
class Wire:
    """Bytes of one request by (prefill rank, decode rank); heads and latents that ranks replicate count each time.

    `pieces` are all pairs' descriptors when no two blocks are adjacent on both sides: the most there can be.
    """

    pair_bytes: Mapping[tuple[int, int], int]
    pieces: int

    @property
    def bytes(self) -> int:
        """All rank pairs together."""
        return sum(self.pair_bytes.values())

    @property
    def busiest_rank_bytes(self) -> int:
        """The most that any prefill rank sends or any decode rank receives."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for (prefill, decode), size in self.pair_bytes.items():
            sent[prefill] += size
            received[decode] += size
        return max([*sent.values(), *received.values()], default=0)


def on_the_wire(pairs: Sequence[RankPair], blocks: Sequence[int]) -> Wire:
    """What a request with so many blocks in each group moves."""
    return Wire(
        {(pair.prefill_rank, pair.decode_rank): pair.bytes(blocks) for pair in pairs},
        sum(one.count * blocks[one.group] for pair in pairs for one in pair.slices),
    )
