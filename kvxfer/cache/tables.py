"""Block tables: where a request's blocks lie in the pools of both sides, scattered as a running engine scatters them.

A request of B blocks is cut into runs of neighbouring blocks: 1 + round(f * (B - 1)) of them at fragmentation f. The
blocks of a run are adjacent in memory on both sides; blocks of different runs are never adjacent on both sides, so a
run is exactly one descriptor per region, however descriptors are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.cache.wire import run_count

Table = npt.NDArray[np.uint32]

PLACING_ATTEMPTS = 64


@dataclass(frozen=True)
class BlockTables:
    """Block numbers of several requests: arrays [request, block] of each side's pool of `pool_blocks` blocks."""

    prefill: Table
    decode: Table
    pool_blocks: int


def scatter(blocks: int, slots: int, generations: int, fragmentation: float, seed: int) -> BlockTables:
    """Tables of slots * generations requests of `blocks` blocks each, in pools of slots * blocks blocks.

    The requests of a generation share the pool without overlap; with more than one generation the next one uses the
    same blocks in another order.
    """
    rng = np.random.default_rng([seed, blocks, slots])
    prefill, decode = [], []
    for _ in range(generations):
        lengths = [_run_lengths(blocks, run_count(blocks, fragmentation), rng) for _ in range(slots)]
        ours, theirs = _place(lengths, rng)
        prefill.append(ours)
        decode.append(theirs)
    return BlockTables(np.concatenate(prefill), np.concatenate(decode), slots * blocks)


def _run_lengths(blocks: int, runs: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positive lengths that sum to `blocks`, every composition equally likely."""
    cuts = np.sort(rng.choice(blocks - 1, runs - 1, replace=False)) + 1 if runs > 1 else np.empty(0, np.int64)
    return np.diff(np.concatenate([[0], cuts, [blocks]])).astype(np.int64)


def _place(lengths: list[npt.NDArray[np.int64]], rng: np.random.Generator) -> tuple[Table, Table]:
    """Place all runs of all requests in both pools, each in an order of its own: both tables [request, block]."""
    owner = np.repeat(np.arange(len(lengths)), [len(one) for one in lengths])
    every = np.concatenate(lengths)
    order = rng.permutation(len(every))
    prefill = _starts(every, order)
    for _ in range(PLACING_ATTEMPTS):
        decode = _starts(every, rng.permutation(len(every)))
        if not _adjacent_on_both(order, owner, every, decode):
            break
    else:
        # The reverse order: what is followed by a neighbour on one side is preceded by it on the other.
        decode = _starts(every, order[::-1])
    blocks = int(lengths[0].sum())
    return _table(prefill, every, blocks), _table(decode, every, blocks)


def _starts(lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First block of each run when the runs lie one after another in that order."""
    starts = np.empty(len(lengths), np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    return starts


def _adjacent_on_both(
    order: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    decode: npt.NDArray[np.int64],
) -> bool:
    """Whether two runs of one request that touch in the prefill pool touch in the decode pool too."""
    first, second = order[:-1], order[1:]
    touching = decode[first] + lengths[first] == decode[second]
    return bool(np.any(touching & (owner[first] == owner[second])))


def _table(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], blocks: int) -> Table:
    """Block numbers of all runs in logical order, cut into requests of `blocks` blocks."""
    begin = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(begin, lengths)
    return (np.repeat(starts, lengths) + within).astype(np.uint32).reshape(-1, blocks)
