"""How a cache lies over tensor-parallel ranks, and which slices of its blocks go from which rank to which.

The cache of a layer has parts (K and V together, K and V apart, a latent), each with some heads of so many bytes per
token. A rank holds heads / TP of them, or one when there are more ranks than heads (then heads are replicated), or
all of a part that every rank holds whole (a latent). Blocks are NHD [token, head, cell] or HND [head, token, cell].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvxfer.errors import UsageError

Layout = Literal["nhd", "hnd"]


@dataclass(frozen=True)
class Part:
    """What lies in a region of its own: `cell` bytes per head and token, in blocks of `tokens` tokens.

    `name` tells the parts of a layer apart (kv, k, v, latent, …). `group` is the block table that its blocks are
    found by. A replicated part is held whole by every rank.
    """

    layer: int
    name: str
    heads: int
    cell: int
    tokens: int
    group: int = 0
    replicated: bool = False


@dataclass(frozen=True)
class Region:
    """One part on one rank: heads [first_head, first_head + heads), blocks of block_bytes."""

    part: Part
    rank: int
    first_head: int
    heads: int

    @property
    def block_bytes(self) -> int:
        return self.part.tokens * self.heads * self.part.cell


@dataclass(frozen=True)
class Slice:
    """What of every block of a group goes from one region to another: `count` pieces of `length` bytes, strides apart.

    Regions are numbers in the lists of regions of either side; offsets and strides are bytes within a block.
    """

    layer: int
    group: int
    prefill_region: int
    decode_region: int
    prefill_block: int
    decode_block: int
    prefill_offset: int
    decode_offset: int
    length: int
    count: int = 1
    prefill_stride: int = 0
    decode_stride: int = 0

    @property
    def whole(self) -> bool:
        """Whole blocks on both sides, so that neighbours can be joined."""
        return self.count == 1 and self.length == self.prefill_block == self.decode_block


@dataclass(frozen=True)
class RankPair:
    """What one prefill rank sends to one decode rank, in the order of layers."""

    prefill_rank: int
    decode_rank: int
    slices: tuple[Slice, ...]

    @property
    def bytes_per_block(self) -> dict[int, int]:
        """Bytes that a block of each group moves between the two."""
        sums: dict[int, int] = {}
        for one in self.slices:
            sums[one.group] = sums.get(one.group, 0) + one.length * one.count
        return sums


def regions(parts: list[Part], tp: int) -> list[Region]:
    """The regions of a side: rank after rank, part after part. Raises UsageError when heads and ranks do not divide."""
    return [Region(part, rank, *rank_heads(part, tp, rank)) for rank in range(tp) for part in parts]


def rank_heads(part: Part, tp: int, rank: int) -> tuple[int, int]:
    """(first head, heads) of a part on a rank."""
    if part.replicated:
        return 0, part.heads
    if part.heads % tp == 0:
        heads = part.heads // tp
        return rank * heads, heads
    if tp % part.heads == 0:
        return rank // (tp // part.heads), 1
    raise UsageError(
        f"tensor parallelism of {tp} does not fit {part.heads} KV heads: one must divide the other "
        f"(layer {part.layer}); choose another --tp-prefill or --tp-decode"
    )


def rank_pairs(prefill: list[Region], decode: list[Region], layout: Layout) -> list[RankPair]:
    """Who sends what to whom, so that every decode rank gets each of its heads once.

    Where several prefill ranks hold a head, the decode ranks that want it are spread over them.
    """
    collected: dict[tuple[int, int], list[Slice]] = {}
    sources = _holders(prefill)
    for number, region in enumerate(decode):
        for source, first, heads in _shares(region, sources[region.part]):
            pair = (prefill[source].rank, region.rank)
            moved = _slice(source, number, prefill[source], region, first, heads, layout)
            collected.setdefault(pair, []).append(moved)
    return [RankPair(p, d, tuple(slices)) for (p, d), slices in sorted(collected.items())]


def _holders(prefill: list[Region]) -> dict[Part, list[tuple[int, Region]]]:
    """The regions of each part, with their numbers."""
    holders: dict[Part, list[tuple[int, Region]]] = {}
    for number, region in enumerate(prefill):
        holders.setdefault(region.part, []).append((number, region))
    return holders


def _shares(wanted: Region, holders: list[tuple[int, Region]]) -> Iterator[tuple[int, int, int]]:
    """(prefill region, first head, heads) that together are the heads of `wanted`, each once."""
    head, end = wanted.first_head, wanted.first_head + wanted.heads
    while head < end:
        having = [(n, r) for n, r in holders if r.first_head <= head < r.first_head + r.heads]
        number, source = having[wanted.rank % len(having)]
        stop = min(end, source.first_head + source.heads)
        yield number, head, stop - head
        head = stop


def _slice(source: int, target: int, prefill: Region, decode: Region, first: int, heads: int, layout: Layout) -> Slice:
    """Heads [first, first + heads) of a block: one piece where they are contiguous, else one per token."""
    part = prefill.part
    row = part.cell if layout == "nhd" else part.cell * part.tokens  # bytes from one head to the next
    all_of_both = heads == prefill.heads == decode.heads
    by_token = layout == "nhd" and not all_of_both
    return Slice(
        layer=part.layer,
        group=part.group,
        prefill_region=source,
        decode_region=target,
        prefill_block=prefill.block_bytes,
        decode_block=decode.block_bytes,
        prefill_offset=(first - prefill.first_head) * row,
        decode_offset=(first - decode.first_head) * row,
        length=heads * part.cell * (1 if by_token else part.tokens),
        count=part.tokens if by_token else 1,
        prefill_stride=prefill.heads * part.cell if by_token else 0,
        decode_stride=decode.heads * part.cell if by_token else 0,
    )
