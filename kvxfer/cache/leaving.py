"""What of a request's cache leaves while its layers are computed: bytes and pieces of each send, on each link.

Layers weigh what they keep: a window its last blocks, a state one block, and some keep nothing. Where several layers
lie together in a block, it leaves with the last of them. All rank pairs share one link, or every rank of either side
has one of its own, over which all that it sends or receives goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvxfer.cache.layout import RankPair, Side
from kvxfer.cache.wire import run_count

Weight = tuple[float, float]
"""Bytes and pieces."""

Weights = Sequence[Sequence[Weight]]
"""Of each chunk of a prompt what each send weighs."""


Part = tuple[tuple[int, ...], ...]
"""Some layers: of each group a block's bytes, the pieces of a run of blocks, those of a block that joins no run."""


@dataclass(frozen=True)
class Departures:
    """The sends of a chunk leave after so many layers of it, of all; `links` holds the weights on each link."""

    after: Sequence[int]
    links: Sequence[Weights]


Leaves = Callable[[int, Sequence[float], int], Departures]
"""(tokens of a prompt, where each chunk of it ends, layers per send) → what leaves of it."""


def by_rank(pairs: Sequence[RankPair]) -> dict[tuple[Side, int], list[RankPair]]:
    """The pairs that each rank of either side is of: what goes over its link."""
    ranks: dict[tuple[Side, int], list[RankPair]] = {}
    for pair in pairs:
        ranks.setdefault(("prefill", pair.prefill_rank), []).append(pair)
        ranks.setdefault(("decode", pair.decode_rank), []).append(pair)
    return ranks


def shared(whole: Weights, ranks: Sequence[Weights]) -> Weights:
    """The sends of all ranks over one link: all of their bytes, and of pieces the most of any rank."""
    return [
        [(size, max(pieces for _, pieces in sends)) for (size, _), *sends in zip(chunk, *of_ranks, strict=True)]
        for chunk, *of_ranks in zip(whole, *ranks, strict=True)
    ]


class Leaving:
    """What goes between some ranks layer by layer: what a block of each group weighs in the first so many layers."""

    def __init__(self, pairs: Sequence[RankPair], layers: int, groups: int) -> None:
        bytes_, joined, apart = ([[0] * (layers + 1) for _ in range(groups)] for _ in range(3))
        for one in (one for pair in pairs for one in pair.slices):
            computed = one.layer + one.layers  # so many layers, once the last of its own is
            bytes_[one.group][computed] += one.length * one.count
            (joined if one.whole else apart)[one.group][computed] += one.count
        self._bytes = [list(accumulate(group)) for group in bytes_]  # of a block, up to each layer
        self._joined = [list(accumulate(group)) for group in joined]  # pieces of a run of blocks
        self._apart = [list(accumulate(group)) for group in apart]  # pieces of a block that joins no run
        self._known_parts: dict[tuple[int, ...], list[Part]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaving) and self._weighs == other._weighs

    def __hash__(self) -> int:
        return hash(self._weighs)

    @property
    def _weighs(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with the same share of every layer are alike."""
        return tuple(tuple(group) for kind in (self._bytes, self._joined, self._apart) for group in kind)

    def sends(self, ends: Sequence[Sequence[int]], fragmentation: float, after: Sequence[int]) -> list[list[Weight]]:
        """Of each chunk what each send weighs, in the order of compute; they leave `after` so many of all layers.

        `ends` are the blocks of each group that there are at the end of each chunk.
        """
        parts = self._parts(tuple(after))
        found = []
        begins: Sequence[int] = [0] * len(self._bytes)
        for chunk in ends:
            blocks = [end - begin for begin, end in zip(begins, chunk, strict=True)]
            runs = [run_count(count, fragmentation) if count else 0 for count in blocks]
            weights = {part: _weight(part, blocks, runs) for part in set(parts)}
            found.append([weights[part] for part in parts])
            begins = chunk
        return found

    def _parts(self, after: tuple[int, ...]) -> list[Part]:
        """What a block of each group weighs of the layers of each send; layers are mostly alike, and so are these."""
        if after not in self._known_parts:
            spans = list(zip([0, *after[:-1]], after, strict=True))
            groups = list(zip(self._bytes, self._joined, self._apart, strict=True))
            self._known_parts[after] = [
                tuple((*(kind[end] - kind[first] for kind in group),) for group in groups) for first, end in spans
            ]
        return self._known_parts[after]


def _weight(part: Part, blocks: Sequence[int], runs: Sequence[int]) -> Weight:
    size = pieces = 0
    for (bytes_, joined, apart), count, of_runs in zip(part, blocks, runs, strict=True):
        size += count * bytes_
        pieces += of_runs * joined + count * apart
    return size, pieces
