"""How a cache lies over tensor- and pipeline-parallel ranks, and which slices of its blocks go from rank to rank.

The cache of a layer has parts (K and V together, K and V apart, a latent, those of a state), each with some heads of so
many bytes per token. A rank holds heads / TP of them, or one when there are more ranks than heads and these may be
shared (heads are then replicated), or all of a part that every rank holds whole (a latent). Pipeline stages hold
consecutive layers. A block is NHD [token, head, cell] or HND [head, token, cell].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from kvxfer.errors import UsageError

Order = Literal["nhd", "hnd"]
Side = Literal["prefill", "decode"]

LARGEST_RANKS = 64
"""Tensor-parallel ranks, and pipeline stages, of a side."""

ATTENTION = ("kv", "k", "v")
"""Names of the parts that attention keeps, which have KV heads."""

MOST_LISTED = 8

Stages = Sequence[range]
"""The layers of each pipeline stage."""


@dataclass(frozen=True)
class Part:
    """What of a layer is cut by heads as one: `cell` bytes per head and token, in blocks of `tokens` tokens.

    `name` tells the parts of a layer apart (kv, k, v, latent, …). `group` is the block table that its blocks are found
    by. A replicated part is held whole by every rank. With more ranks than heads each rank holds one, where heads may
    be shared.
    """

    layer: int
    name: str
    heads: int
    cell: int
    tokens: int
    group: int = 0
    replicated: bool = False
    shared: bool = True


@dataclass(frozen=True)
class Entry:
    """The heads [first_head, first_head + heads) of a part, `offset` bytes into each block of a region."""

    part: Part
    first_head: int
    heads: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of a block that are this entry's."""
        return self.part.tokens * self.heads * self.part.cell


@dataclass(frozen=True)
class Region:
    """One contiguous piece of a rank's memory: blocks of block_bytes, each with one entry or several after another.

    Ranks count stage after stage; tp_rank is the one within the stage.
    """

    rank: int
    tp_rank: int
    group: int
    entries: tuple[Entry, ...]

    @property
    def block_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one side, and how their memory is cut into regions.

    tp tensor-parallel ranks in each of pp pipeline stages. With `together`, the layers of a stage lie together in the
    blocks of one region per group; else every part has a region of its own. `side` is what errors call it.
    """

    tp: int = 1
    pp: int = 1
    together: bool = False
    side: Side = "prefill"

    @property
    def count(self) -> int:
        return self.tp * self.pp


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
    layers: int = 1  # from `layer` on

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

    def bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of a request with so many blocks in each group."""
        return sum(one.length * one.count * blocks[one.group] for one in self.slices)


def regions(parts: Sequence[Part], stages: Stages, ranks: Ranks) -> list[Region]:
    """The regions of a side, rank after rank. Raises UsageError when the heads do not divide over the ranks."""
    for part in parts:
        if not fits(part, ranks.tp):
            raise _does_not_fit(parts, part, ranks)
    found = []
    for stage, layers in enumerate(stages):
        here = [part for part in parts if part.layer in layers]
        for tp_rank in range(ranks.tp):
            for group, together in _cut(here, ranks.together):
                entries = _entries(together, ranks.tp, tp_rank)
                found.append(Region(stage * ranks.tp + tp_rank, tp_rank, group, entries))
    return found


def pipeline_stages(layers: int, ranks: Ranks, last: int = 0) -> Stages:
    """The layers of each pipeline stage of a model of so many, whatever they keep; `last` more are on the last stage.

    As vLLM splits them (vllm/distributed/utils.py): evenly, and those that are left over one each to the stages before
    the last, from its neighbour backwards. Raises UsageError when there are more stages than layers.
    """
    if ranks.pp > layers:
        raise UsageError(
            f"--pp-{ranks.side} {ranks.pp}: more pipeline stages than the model's {layers} layers; 1 to {layers} work"
        )
    each, over = divmod(layers, ranks.pp)
    counts = [each + (0 < ranks.pp - 1 - stage <= over) for stage in range(ranks.pp)]
    ends = list(accumulate(counts))
    ends[-1] += last
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _cut(parts: list[Part], together: bool) -> list[tuple[int, list[Part]]]:
    """The parts that share a region, with their group."""
    if not together:
        return [(part.group, [part]) for part in parts]
    groups: dict[int, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    return list(groups.items())


def _entries(parts: list[Part], tp: int, tp_rank: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    offset = 0
    for part in parts:
        entries.append(Entry(part, *rank_heads(part, tp, tp_rank), offset))
        offset += entries[-1].bytes
    return tuple(entries)


def fits(part: Part, tp: int) -> bool:
    """Whether so many tensor-parallel ranks can have a part's heads: as many each, or one each that others have too."""
    return part.replicated or part.heads % tp == 0 or (part.shared and tp % part.heads == 0)


def rank_heads(part: Part, tp: int, tp_rank: int) -> tuple[int, int]:
    """(first head, heads) of a part that fits on a tensor-parallel rank."""
    if part.replicated:
        return 0, part.heads
    if part.heads % tp == 0:
        heads = part.heads // tp
        return tp_rank * heads, heads
    return tp_rank // (tp // part.heads), 1


def _does_not_fit(parts: Sequence[Part], part: Part, ranks: Ranks) -> UsageError:
    what = "KV heads" if part.name in ATTENTION else f"heads of the {part.name} state"
    fitting = [tp for tp in range(1, LARGEST_RANKS + 1) if all(fits(one, tp) for one in parts)]
    listed = ", ".join(map(str, fitting[:MOST_LISTED])) + ", …" * (len(fitting) > MOST_LISTED)
    return UsageError(
        f"--tp-{ranks.side} {ranks.tp} does not fit the {part.heads} {what} of layer {part.layer}, which cannot be "
        f"shared out evenly; for this model {listed} {'works' if len(fitting) == 1 else 'work'}"
    )


def rank_pairs(prefill: Sequence[Region], decode: Sequence[Region], order: Order) -> list[RankPair]:
    """Who sends what to whom, so that every decode rank gets each of its heads once.

    Where several prefill ranks hold a head, the decode ranks that want it are spread over them.
    """
    collected: dict[tuple[int, int], list[Slice]] = {}
    known: dict[tuple[int, int, int, tuple[tuple[int, int], ...]], list[tuple[int, int, int]]] = {}
    holders: dict[Part, list[tuple[int, Entry]]] = {}
    for number, region in enumerate(prefill):
        for entry in region.entries:
            holders.setdefault(entry.part, []).append((number, entry))
    held = {part: tuple((entry.first_head, entry.heads) for _, entry in having) for part, having in holders.items()}
    for number, region in enumerate(decode):
        for entry in region.entries:
            key = entry.first_head, entry.heads, region.tp_rank, held[entry.part]
            if key not in known:  # layers that are cut alike need the search once
                known[key] = list(_shares(*key))
            for holder, first, heads in known[key]:
                source, having = holders[entry.part][holder]
                moved = _slice((source, prefill[source], having), (number, region, entry), first, heads, order)
                collected.setdefault((prefill[source].rank, region.rank), []).append(moved)
    apart = _cut_apart(one for slices in collected.values() for one in slices)
    return [RankPair(p, d, tuple(_joined(slices, apart))) for (p, d), slices in sorted(collected.items())]


def _shares(head: int, heads: int, rank: int, held: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(holder, first head, heads) that together are the wanted heads, each once; `held` are the holders' heads."""
    end = head + heads
    while head < end:
        having = [number for number, (first, count) in enumerate(held) if first <= head < first + count]
        holder = having[rank % len(having)]
        stop = min(end, sum(held[holder]))
        yield holder, head, stop - head
        head = stop


def _slice(
    source: tuple[int, Region, Entry], target: tuple[int, Region, Entry], first: int, heads: int, order: Order
) -> Slice:
    """Heads [first, first + heads) of a block: one piece where they are contiguous, else one per token."""
    (p, prefill, having), (d, decode, wanted) = source, target
    part = wanted.part
    row = part.cell if order == "nhd" else part.cell * part.tokens  # bytes from one head to the next
    all_of_both = heads == having.heads == wanted.heads
    by_token = order == "nhd" and not all_of_both and part.tokens > 1
    return Slice(
        layer=part.layer,
        group=part.group,
        prefill_region=p,
        decode_region=d,
        prefill_block=prefill.block_bytes,
        decode_block=decode.block_bytes,
        prefill_offset=having.offset + (first - having.first_head) * row,
        decode_offset=wanted.offset + (first - wanted.first_head) * row,
        length=heads * part.cell * (1 if by_token else part.tokens),
        count=part.tokens if by_token else 1,
        prefill_stride=having.heads * part.cell if by_token else 0,
        decode_stride=wanted.heads * part.cell if by_token else 0,
    )


def _between(slices: Iterable[Slice]) -> dict[tuple[int, int], list[Slice]]:
    """The slices by prefill region and decode region."""
    between: dict[tuple[int, int], list[Slice]] = {}
    for one in slices:
        between.setdefault((one.prefill_region, one.decode_region), []).append(one)
    return between


def _cut_apart(slices: Iterable[Slice]) -> set[int]:
    """The prefill regions whose blocks do not go everywhere they go as a whole.

    Several decode ranks may get the same bytes of such a region, and these must be cut into the same pieces for all.
    """
    return {prefill for (prefill, _), together in _between(slices).items() if not _whole(together)}


def _joined(slices: list[Slice], apart: set[int]) -> list[Slice]:
    """One slice where whole blocks go between two regions, layer after layer; but for the prefill regions `apart`."""
    joined = []
    for (prefill, _), together in _between(slices).items():
        if prefill in apart:
            joined.extend(together)
        else:
            first, last = together[0], together[-1]
            joined.append(replace(first, length=first.prefill_block, layers=last.layer - first.layer + 1))
    return joined


def _whole(together: list[Slice]) -> bool:
    """Whether slices between two regions are their whole blocks."""
    first = together[0]
    all_of_them = sum(one.length * one.count for one in together)
    return all_of_them == first.prefill_block == first.decode_block and all(_in_place(one) for one in together)


def _in_place(one: Slice) -> bool:
    """Whether a slice is one piece that lies at the same place in the blocks of both sides."""
    return one.count == 1 and one.prefill_offset == one.decode_offset
