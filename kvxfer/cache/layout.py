"""How a cache lies over tensor- and pipeline-parallel ranks, and which slices of its blocks go from rank to rank.

The cache of a layer has parts (K and V together, K and V apart, a latent, those of a state), each with some heads of so
many bytes per token. A rank holds heads / TP of them, or one when there are more ranks than heads and these may be
shared (heads are then replicated), or all of a part that every rank holds whole (a latent). Pipeline stages hold
consecutive layers. A block is NHD [token, head, cell] or HND [head, token, cell]; where it holds all layers, NHD
[layer, token, head, cell] or HND [head, layer, token, cell], as vLLM has them (get_kv_cache_stride_order of its
attention backends), so that in HND some heads of all layers are one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Literal

from kvxfer.errors import UsageError

Order = Literal["nhd", "hnd"]
Side = Literal["prefill", "decode"]

LARGEST_RANKS = 64
"""Tensor-parallel ranks, and pipeline stages, of a side."""

MOST_LISTED = 8

Stages = Sequence[range]
"""The layers of each pipeline stage."""


@dataclass(frozen=True)
class Part:
    """What of a layer is cut by heads as one: `cell` bytes per head and token, in blocks of `tokens` tokens.

    `name` tells the parts of a layer apart (kv, k, v, latent, …). `group` is the block table that its blocks are found
    by. A replicated part is held whole by every rank. With more ranks than heads each rank holds one, where heads may
    be shared. A part of a state has no tokens to order, and lies by itself whatever the order.
    """

    layer: int
    name: str
    heads: int
    cell: int
    tokens: int
    group: int = 0
    replicated: bool = False
    shared: bool = True
    of_state: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a block."""
        return self.tokens * self.cell


@dataclass(frozen=True)
class Entry:
    """The heads [first_head, first_head + heads) of a part, the first of them `offset` bytes into a region's blocks.

    Strides are bytes from one token of a head, and from one head, to the next. Entries of one `run` have as many heads
    and lie next to each other: in HND order the same head of all of them.
    """

    part: Part
    first_head: int
    heads: int
    offset: int
    token_stride: int
    head_stride: int
    run: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a block that are this entry's."""
        return self.heads * self.part.head_bytes


@dataclass(frozen=True)
class Region:
    """One contiguous piece of a rank's memory: blocks of block_bytes, each with one entry or several.

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


def regions(parts: Sequence[Part], stages: Stages, ranks: Ranks, order: Order = "nhd") -> list[Region]:
    """The regions of a side, rank after rank. Raises UsageError when the heads do not divide over the ranks."""
    for part in parts:
        if not fits(part, ranks.tp):
            raise _does_not_fit(parts, part, ranks)
    found = []
    for stage, layers in enumerate(stages):
        here = [part for part in parts if part.layer in layers]
        for tp_rank in range(ranks.tp):
            for group, together in _cut(here, ranks.together):
                entries = _entries(together, ranks.tp, tp_rank, order)
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


def _entries(parts: list[Part], tp: int, tp_rank: int, order: Order) -> tuple[Entry, ...]:
    """Where the parts lie in a block: run after run, and in each part after part (NHD) or head after head (HND)."""
    entries: list[Entry] = []
    start = 0
    for run, alike in enumerate(_runs(parts)):
        first, heads = rank_heads(alike[0], tp, tp_rank)
        width = sum(part.head_bytes for part in alike)
        before = 0  # bytes of a head of the parts before this one
        for part in alike:
            if order == "nhd":
                entries.append(Entry(part, first, heads, start + heads * before, heads * part.cell, part.cell, run))
            else:
                entries.append(Entry(part, first, heads, start + before, part.cell, width, run))
            before += part.head_bytes
        start += heads * width
    return tuple(entries)


def _runs(parts: list[Part]) -> list[list[Part]]:
    """The parts that are cut by heads alike; each of a state's is by itself."""
    runs: dict[object, list[Part]] = {}
    for part in parts:
        runs.setdefault(part if part.of_state else (part.heads, part.replicated), []).append(part)
    return list(runs.values())


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
    what = f"heads of the {part.name} state" if part.of_state else "KV heads"
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
    collected: dict[tuple[int, int], list[_Moved]] = {}
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
                collected.setdefault((prefill[source].rank, region.rank), []).append((having.run, moved))
    apart = _cut_apart(one for moved in collected.values() for one in moved)
    return [RankPair(p, d, tuple(_joined(moved, apart))) for (p, d), moved in sorted(collected.items())]


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
    """Heads [first, first + heads) of a block: one piece where they are contiguous, else one per token or per head."""
    (p, prefill, having), (d, decode, wanted) = source, target
    part = wanted.part
    if order == "nhd":
        length, count, strides = heads * part.cell, part.tokens, (having.token_stride, wanted.token_stride)
    else:
        length, count, strides = part.head_bytes, heads, (having.head_stride, wanted.head_stride)
    if count == 1 or strides == (length, length):  # without gaps
        length, count, strides = length * count, 1, (0, 0)
    return Slice(
        layer=part.layer,
        group=part.group,
        prefill_region=p,
        decode_region=d,
        prefill_block=prefill.block_bytes,
        decode_block=decode.block_bytes,
        prefill_offset=having.offset + (first - having.first_head) * having.head_stride,
        decode_offset=wanted.offset + (first - wanted.first_head) * wanted.head_stride,
        length=length,
        count=count,
        prefill_stride=strides[0],
        decode_stride=strides[1],
    )


_Moved = tuple[int, Slice]
"""What moves between two regions, and the run that it is of at prefill."""


def _between(moved: Iterable[_Moved]) -> dict[tuple[int, int], list[_Moved]]:
    """What moves, by prefill region and decode region."""
    between: dict[tuple[int, int], list[_Moved]] = {}
    for run, one in moved:
        between.setdefault((one.prefill_region, one.decode_region), []).append((run, one))
    return between


def _cut_apart(moved: Iterable[_Moved]) -> set[int]:
    """The prefill regions whose blocks do not go everywhere they go as a whole.

    Several decode ranks may get the same bytes of such a region, and these must be cut into the same pieces for all.
    """
    return {prefill for (prefill, _), together in _between(moved).items() if not _whole(together)}


def _joined(moved: list[_Moved], apart: set[int]) -> list[Slice]:
    """The slices, with one where whole blocks go between two regions, layer after layer.

    From the prefill regions `apart` there is one where layers of a run follow each other on both sides. Decode ranks
    that get the same heads of a run get the same layers of it, and so the same pieces: runs are not joined.
    """
    joined: list[Slice] = []
    for (prefill, _), together in _between(moved).items():
        if prefill in apart:
            for _, run in groupby(together, key=lambda one: one[0]):
                joined += _followed(one for _, one in run)
        else:
            every = [one for _, one in together]
            joined.append(_as_one(every, every[0].prefill_block, 1))
    return sorted(joined, key=lambda one: one.layer)


def _followed(slices: Iterable[Slice]) -> list[Slice]:
    """One slice where one begins at both sides where the one before it ends, piece by piece."""
    following: list[list[Slice]] = []
    for one in slices:
        if following and _follows(following[-1][-1], one):
            following[-1].append(one)
        else:
            following.append([one])
    return [_as_one(alike, sum(one.length for one in alike), alike[0].count) for alike in following]


def _follows(before: Slice, one: Slice) -> bool:
    return (
        (before.count, before.prefill_stride, before.decode_stride)
        == (one.count, one.prefill_stride, one.decode_stride)
        and before.prefill_offset + before.length == one.prefill_offset
        and before.decode_offset + before.length == one.decode_offset
    )


def _as_one(slices: Sequence[Slice], length: int, count: int) -> Slice:
    """The slices as one of so many pieces of that length, at the place of the first."""
    one, layers = slices[0], [each.layer for each in slices]
    if len(slices) == 1:
        return one
    strides = one.prefill_stride, one.decode_stride
    if count == 1 or strides == (length, length):  # without gaps
        length, count, strides = length * count, 1, (0, 0)
    return replace(
        one,
        layer=min(layers),
        length=length,
        count=count,
        prefill_stride=strides[0],
        decode_stride=strides[1],
        layers=max(layers) - min(layers) + 1,
    )


def _whole(together: Sequence[_Moved]) -> bool:
    """Whether slices between two regions are their whole blocks."""
    _, first = together[0]
    all_of_them = sum(one.length * one.count for _, one in together)
    return all_of_them == first.prefill_block == first.decode_block and all(_in_place(one) for _, one in together)


def _in_place(one: Slice) -> bool:
    """Whether a slice's pieces lie at the same places in the blocks of both sides."""
    return one.prefill_offset == one.decode_offset and one.prefill_stride == one.decode_stride
