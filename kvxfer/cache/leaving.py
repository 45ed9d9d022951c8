"""What of a request's cache leaves while its layers are computed: bytes and pieces of each send, of all rank pairs.

Layers weigh what they keep: a window its last blocks, a state one block, and some keep nothing. Where several layers
lie together in a block, it leaves with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from kvxfer.cache.layout import RankPair
from kvxfer.cache.wire import run_count

Weight = tuple[float, float]
"""Bytes and pieces."""

Leaves = Callable[[int, Sequence[float], int], Sequence[Sequence[Weight]]]
"""(tokens of a prompt, where each chunk of it ends, layers per send) → of each chunk what each send weighs."""


class Leaving:
    """A cache that is sent layer by layer: what a block of each group weighs in the first so many layers."""

    def __init__(self, pairs: Sequence[RankPair], layers: int, groups: int) -> None:
        bytes_, joined, apart = ([[0] * (layers + 1) for _ in range(groups)] for _ in range(3))
        for one in (one for pair in pairs for one in pair.slices):
            computed = one.layer + one.layers  # so many layers, once the last of its own is
            bytes_[one.group][computed] += one.length * one.count
            (joined if one.whole else apart)[one.group][computed] += one.count
        self._layers = layers
        self._bytes = [list(accumulate(group)) for group in bytes_]  # of a block, up to each layer
        self._joined = [list(accumulate(group)) for group in joined]  # pieces of a run of blocks
        self._apart = [list(accumulate(group)) for group in apart]  # pieces of a block that joins no run

    def sends(self, ends: Sequence[Sequence[int]], fragmentation: float, together: int) -> list[list[Weight]]:
        """Of each chunk what each send of `together` layers weighs, in the order of compute.

        `ends` are the blocks of each group that there are at the end of each chunk.
        """
        found = []
        begins: Sequence[int] = [0] * len(self._bytes)
        for chunk in ends:
            blocks = [end - begin for begin, end in zip(begins, chunk, strict=True)]
            runs = [run_count(count, fragmentation) if count else 0 for count in blocks]
            parts = range(0, self._layers, together)
            found.append([self._weight(first, min(first + together, self._layers), blocks, runs) for first in parts])
            begins = chunk
        return found

    def _weight(self, first: int, end: int, blocks: Sequence[int], runs: Sequence[int]) -> Weight:
        """Of layers first … end."""
        size = pieces = 0
        for group, count in enumerate(blocks):
            size += count * (self._bytes[group][end] - self._bytes[group][first])
            pieces += runs[group] * (self._joined[group][end] - self._joined[group][first])
            pieces += count * (self._apart[group][end] - self._apart[group][first])
        return size, pieces
