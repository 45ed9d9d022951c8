"""TransferPlan: the descriptors of what one rank sends to another for one request, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvxfer.cache.layout import Slice
from kvxfer.cache.tables import Table

Offsets = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Segment:
    """Descriptors that may move once `layer` (the last of them that there are bytes of) is computed for a chunk."""

    chunk: int
    layer: int


@dataclass(frozen=True)
class TransferPlan:
    """Descriptors in the order of chunks of the prompt, and there of layers; arrays of equal length.

    Regions are numbers in the lists of regions of either side. `segment_starts` holds the first descriptor of each
    layer of each chunk, so that these can be sent apart; `segments` says which each is.
    """

    prefill_regions: Numbers
    prefill_offsets: Offsets
    decode_regions: Numbers
    decode_offsets: Offsets
    lengths: Offsets
    segment_starts: Numbers
    segments: tuple[Segment, ...]

    @property
    def descriptors(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class _Pieces:
    """Descriptors of several slices of one form."""

    prefill_regions: Numbers
    prefill_offsets: Offsets
    decode_regions: Numbers
    decode_offsets: Offsets
    lengths: Offsets
    per_slice: int


def transfer_plan(
    slices: Sequence[Slice],
    prefill: Sequence[Table],
    decode: Sequence[Table],
    chunks: Sequence[Sequence[int]] = (),
) -> TransferPlan:
    """The plan of a request with these block tables, one per group and side.

    Blocks that are adjacent in memory on both sides become one descriptor where whole blocks of one chunk move.
    `chunks` holds, for each chunk of the prompt, how many blocks of each group there are at its end; none: the prompt
    is one chunk.
    """
    parts: list[_Pieces] = []
    starts: list[int] = []
    segments: list[Segment] = []
    position = 0
    begins = [0] * len(prefill)
    for chunk, ends in enumerate(chunks or [[len(table) for table in prefill]]):
        layers = None
        for _, same in groupby(slices, _form):
            alike = list(same)
            group = alike[0].group
            if begins[group] == ends[group]:
                continue
            here = slice(begins[group], ends[group])
            pieces = _expand(alike, prefill[group][here], decode[group][here])
            for number, one in enumerate(alike):
                if (one.layer, one.layers) != layers:
                    layers = one.layer, one.layers
                    starts.append(position + number * pieces.per_slice)
                    segments.append(Segment(chunk, one.layer + one.layers - 1))
            position += len(alike) * pieces.per_slice
            parts.append(pieces)
        begins = list(ends)
    return TransferPlan(
        prefill_regions=np.concatenate([part.prefill_regions for part in parts]),
        prefill_offsets=np.concatenate([part.prefill_offsets for part in parts]),
        decode_regions=np.concatenate([part.decode_regions for part in parts]),
        decode_offsets=np.concatenate([part.decode_offsets for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        segment_starts=np.asarray(starts, np.uint32),
        segments=tuple(segments),
    )


def _form(one: Slice) -> tuple[int, ...]:
    """What slices must have in common to be expanded together."""
    return (
        one.group,
        one.prefill_block,
        one.decode_block,
        one.length,
        one.count,
        one.prefill_stride,
        one.decode_stride,
    )


def _expand(alike: list[Slice], prefill: Table, decode: Table) -> _Pieces:
    one = alike[0]
    first, runs = joined_runs(prefill, decode) if one.whole else (np.arange(len(prefill)), None)
    within = np.arange(one.count, dtype=np.uint64)

    def offsets(table: Table, block: int, stride: int, starts: list[int]) -> Offsets:
        blocks = table[first].astype(np.uint64) * np.uint64(block)
        pieces = (blocks[:, None] + within * np.uint64(stride)).reshape(-1)
        every: Offsets = (np.asarray(starts, np.uint64)[:, None] + pieces).reshape(-1)
        return every

    lengths = np.full(len(first) * one.count, one.length, np.uint64)
    if runs is not None:
        lengths *= runs.astype(np.uint64)
    per_slice = len(lengths)
    return _Pieces(
        prefill_regions=np.repeat(np.asarray([s.prefill_region for s in alike], np.uint32), per_slice),
        prefill_offsets=offsets(prefill, one.prefill_block, one.prefill_stride, [s.prefill_offset for s in alike]),
        decode_regions=np.repeat(np.asarray([s.decode_region for s in alike], np.uint32), per_slice),
        decode_offsets=offsets(decode, one.decode_block, one.decode_stride, [s.decode_offset for s in alike]),
        lengths=np.tile(lengths, len(alike)),
        per_slice=per_slice,
    )


def joined_runs(prefill: Table, decode: Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First position and length of each stretch of the tables that is contiguous on both sides."""
    breaks = (np.diff(prefill.astype(np.int64)) != 1) | (np.diff(decode.astype(np.int64)) != 1)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return first, np.diff(np.concatenate([first, [len(prefill)]]))
