"""Tensor-parallel layouts: moving the plans equals indexing one logical tensor [layer, token, head, byte]."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import Order, Part, RankPair, Ranks, Region, rank_heads, rank_pairs, regions
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.tables import BlockTables, scatter
from kvxfer.errors import UsageError

SIZES = [1, 2, 3, 4, 6, 8, 12]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Part], int, int]:
    """Parts of one to three layers with one block size and heads of their own, and tensor-parallel sizes that fit."""
    sizes = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    fitting = [n for n in (1, 2, 4, 6, 8, 24) if all(n % tp == 0 or tp % n == 0 for tp in sizes)]
    tokens = draw(st.integers(1, 4))
    parts = []
    for layer in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            heads = draw(st.sampled_from(fitting))
            names = draw(st.sampled_from([["kv"], ["k", "v"]]))
            parts += [Part(layer, name, heads, draw(st.integers(1, 5)), tokens) for name in names]
        else:
            parts.append(Part(layer, "latent", 1, draw(st.integers(1, 9)), tokens, replicated=True))
    return parts, *sizes


def place(
    region: Region, table: np.ndarray, logical: dict[Part, np.ndarray], pool_blocks: int, order: Order
) -> np.ndarray:
    """The region's memory when it holds the request: -1 where nothing of it lies. logical are [token, head, byte]."""
    memory = np.full((pool_blocks, region.block_bytes), -1, np.int64)
    for entry in region.entries:
        part = entry.part
        heads = slice(entry.first_head, entry.first_head + entry.heads)
        for position, block in enumerate(table):
            content = logical[part][position * part.tokens : (position + 1) * part.tokens, heads]
            flat = (content if order == "nhd" else content.transpose(1, 0, 2)).reshape(-1)
            memory[block, entry.offset : entry.offset + entry.bytes] = flat
    return memory.reshape(-1)


def logical_tensors(parts: list[Part], blocks: int) -> dict[Part, np.ndarray]:
    """One tensor [token, head, byte] per part; every byte of all of them is another number."""
    tensors, start = {}, 0
    for part in parts:
        shape = (blocks * part.tokens, part.heads, part.cell)
        size = int(np.prod(shape))
        tensors[part] = np.arange(start, start + size).reshape(shape)
        start += size
    return tensors


def move(pairs: list[RankPair], source: list[np.ndarray], target: list[np.ndarray], tables: BlockTables) -> int:
    """Copy every descriptor; returns how many there were. A byte written twice is an error."""
    written = [np.zeros(len(memory), np.int64) for memory in target]
    count = 0
    for pair in pairs:
        plan = transfer_plan(pair.slices, [tables.prefill[0]], [tables.decode[0]])
        count += plan.descriptors
        for i in range(plan.descriptors):
            length = int(plan.lengths[i])
            p, d = int(plan.prefill_offsets[i]), int(plan.decode_offsets[i])
            target[plan.decode_regions[i]][d : d + length] = source[plan.prefill_regions[i]][p : p + length]
            written[plan.decode_regions[i]][d : d + length] += 1
    assert all(times.max(initial=0) <= 1 for times in written)
    return count


def assert_cut_alike(pairs: list[RankPair], tables: BlockTables) -> None:
    """Bytes that several rank pairs move are cut into the same pieces: each piece begins with a word of its own."""
    pieces: dict[int, set[tuple[int, int]]] = {}
    for pair in pairs:
        plan = transfer_plan(pair.slices, [tables.prefill[0]], [tables.decode[0]])
        columns = plan.prefill_regions, plan.prefill_offsets, plan.prefill_offsets + plan.lengths
        for region, start, end in zip(*(column.tolist() for column in columns), strict=True):
            pieces.setdefault(region, set()).add((start, end))
    for cut in pieces.values():
        ordered = sorted(cut)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))


@given(
    models(),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["nhd", "hnd"]),
    st.integers(1, 6),
    st.floats(0, 1),
    st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_moving_the_plans_equals_indexing_the_logical_tensor(
    model: tuple[list[Part], int, int],
    stages: tuple[int, int],
    together: tuple[bool, bool],
    order: Order,
    blocks: int,
    fragmentation: float,
    seed: int,
) -> None:
    parts, tp_prefill, tp_decode = model
    layers = 1 + max(part.layer for part in parts)
    pp_prefill, pp_decode = (min(stage, layers) for stage in stages)
    tables = scatter(blocks, 1, 1, fragmentation, seed)
    logical = logical_tensors(parts, blocks)
    prefill = regions(parts, Ranks(tp_prefill, pp_prefill, together[0]))
    decode = regions(parts, Ranks(tp_decode, pp_decode, together[1]))
    source = [place(region, tables.prefill[0], logical, tables.pool_blocks, order) for region in prefill]
    expected = [place(region, tables.decode[0], logical, tables.pool_blocks, order) for region in decode]
    target = [np.full(len(memory), -1, np.int64) for memory in expected]
    move(rank_pairs(prefill, decode, order), source, target, tables)
    for got, wanted in zip(target, expected, strict=True):
        assert np.array_equal(got, wanted)
    assert_cut_alike(rank_pairs(prefill, decode, order), tables)


@pytest.mark.parametrize(
    ("tp_prefill", "tp_decode", "layout", "descriptors", "pairs"),
    [
        (1, 1, "nhd", 40_960, 1),
        (8, 8, "nhd", 8 * 40_960, 8),
        (4, 8, "hnd", 8 * 40_960, 8),  # half of a block's heads, contiguous
        (4, 8, "nhd", 8 * 40_960 * 16, 8),  # one token's heads: block_size times more
        (8, 4, "nhd", 8 * 40_960 * 16, 8),
        (16, 8, "nhd", 8 * 40_960, 8),  # duplicated heads at prefill are skipped
        (8, 16, "nhd", 16 * 40_960, 16),  # and sent twice to a decode side that replicates them
    ],
)
def test_descriptors_of_70b_between_tensor_parallel_sizes(
    tp_prefill: int, tp_decode: int, layout: Order, descriptors: int, pairs: int
) -> None:
    parts = [Part(layer, "kv", 8, 512, 16) for layer in range(80)]
    tables = scatter(512, 1, 1, 1.0, 0)
    found = rank_pairs(regions(parts, Ranks(tp_prefill)), regions(parts, Ranks(tp_decode)), layout)
    plans = [transfer_plan(pair.slices, [tables.prefill[0]], [tables.decode[0]]) for pair in found]
    assert (sum(plan.descriptors for plan in plans), len(found)) == (descriptors, pairs)
    replicas = max(1, tp_decode // 8)
    assert sum(plan.bytes for plan in plans) == replicas * 8192 * 327_680
    assert all(len(plan.segment_starts) == 80 for plan in plans)


def test_a_latent_is_sent_whole_to_every_decode_rank() -> None:
    parts = [Part(layer, "latent", 1, 1152, 16, replicated=True) for layer in range(61)]
    found = rank_pairs(regions(parts, Ranks(8)), regions(parts, Ranks(8)), "nhd")
    assert [(pair.prefill_rank, pair.decode_rank) for pair in found] == [(rank, rank) for rank in range(8)]
    assert all(pair.bytes([1]) == 61 * 16 * 1152 for pair in found)
    spread = rank_pairs(regions(parts, Ranks(2)), regions(parts, Ranks(4)), "nhd")
    assert [(pair.prefill_rank, pair.decode_rank) for pair in spread] == [(0, 0), (0, 2), (1, 1), (1, 3)]


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (8, 12), (6, 4)])
def test_heads_and_ranks_that_do_not_divide_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(UsageError, match=f"{tp} does not fit {heads}"):
        rank_heads(Part(0, "kv", heads, 2, 16), tp, 0)
