"""How caches lie over ranks: moving the plans equals indexing one logical tensor [layer, token, head, byte]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import Order, Part, Ranks, pipeline_stages, rank_pairs, regions
from kvxfer.cache.plan import TransferPlan, transfer_plan
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.tables import scatter
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, FP8_E4M3, FP8_PER_TOKEN_HEAD
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.layers import (
    AttentionAndState,
    FullAttention,
    GivenBytes,
    Latent,
    LayerKind,
    NoCache,
    SlidingWindow,
    gated_delta_state,
)
from kvxfer.model.presets import load_model
from kvxfer.model.shape import ModelShape, blocks_of

few = st.integers(1, 3)


@dataclass(frozen=True)
class Case:
    """A cache, the ranks of both sides, and a request of which decode holds the first blocks."""

    spec: CacheSpec
    prefill: Ranks
    decode: Ranks
    tokens: int
    held_blocks: int
    fragmentation: float
    seed: int


@st.composite
def layer_kinds(draw: st.DrawFn, sizes: tuple[int, int], latents: bool) -> LayerKind:
    """A layer of any kind with heads that both tensor-parallel sizes can share out."""
    dividing = lcm(*sizes) * draw(st.integers(1, 2))
    shared = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if all(n % tp == 0 or tp % n == 0 for tp in sizes)]))
    attention = FullAttention(shared, draw(few), draw(few))
    windows = SlidingWindow(shared, draw(few), draw(few), window=draw(st.integers(1, 9)))
    states = draw(
        st.sampled_from(
            [
                Mamba2(dividing, draw(few), shared, draw(few), draw(st.integers(2, 4))).layer(2, 4),
                gated_delta_state(
                    k_heads=lcm(*sizes), k_dim=2, v_heads=dividing, v_dim=3, kernel=4, conv_bytes=2, ssm_bytes=2
                ),
            ]
        )
    )
    kinds = [
        attention,
        windows,
        states,
        AttentionAndState(attention, states),
        NoCache(),
        GivenBytes(dividing * 2, dividing),
    ]
    return draw(st.sampled_from([*kinds, Latent(3, 2, 4, 4), Latent(3, 2, 4, 4, 128)] if latents else kinds))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from([1, 2, 3, 4, 6, 12])), draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    dtype = draw(st.sampled_from([BF16, FP8_E4M3, FP8_PER_TOKEN_HEAD]))
    kinds = draw(st.lists(layer_kinds(sizes, dtype is not FP8_PER_TOKEN_HEAD), min_size=1, max_size=5))
    if all(isinstance(kind, NoCache) for kind in kinds):
        kinds.append(FullAttention(12, 1, 1))
    drafting = draw(st.integers(0, len(kinds) - 1))
    shape = ModelShape("any", "any", len(kinds), 8, 8, 8, 8, 8, layer_kinds=tuple(kinds), mtp_layers=drafting)
    order: Order = draw(st.sampled_from(["nhd", "hnd"]))
    spec = CacheSpec(shape, dtype, draw(st.integers(1, 4)), draw(st.sampled_from([1, 2])), order)
    stages = [draw(st.integers(1, len(kinds) - drafting)) for _ in sizes]
    tokens = draw(st.integers(1, 20))
    return Case(
        spec,
        Ranks(sizes[0], stages[0], draw(st.booleans())),
        Ranks(sizes[1], stages[1], draw(st.booleans())),
        tokens,
        draw(st.integers(0, blocks_of(tokens, spec.block_size) - 1)),
        draw(st.floats(0, 1)),
        draw(st.integers(0, 1000)),
    )


def logical_tensors(spec: CacheSpec, blocks: Sequence[int]) -> dict[Part, np.ndarray]:
    """One tensor [token, head, byte] per part, of the blocks that its layer keeps; every byte is another number."""
    tensors, start = {}, 0
    for part in spec.parts:
        shape = (blocks[part.group] * part.tokens, part.heads, part.cell)
        size = int(np.prod(shape))
        tensors[part] = np.arange(start, start + size).reshape(shape)
        start += size
    return tensors


def layers_of_stages(layers: int, drafting: int, stages: int) -> list[list[int]]:
    """One layer after another, as vLLM deals them out; those that draft go to the last stage."""
    counts = [(layers - drafting) // stages] * stages
    for extra in range((layers - drafting) % stages):
        counts[-2 - extra] += 1
    counts[-1] += drafting
    every = iter(range(layers))
    return [[next(every) for _ in range(count)] for count in counts]


def memories(
    case: Case, ranks: Ranks, tables: Sequence[np.ndarray], pools: Sequence[int], logical: dict[Part, np.ndarray]
) -> list[np.ndarray]:
    """The regions of a side that holds the blocks in the tables, -1 elsewhere; told without the code under test."""
    spec, found = case.spec, []
    for layers in layers_of_stages(spec.shape.layers, spec.shape.mtp_layers, ranks.pp):
        parts = [part for part in spec.parts if part.layer in layers]
        together = [[part] for part in parts]
        if ranks.together:
            together = [[part for part in parts if part.group == g] for g in dict.fromkeys(p.group for p in parts)]
        for rank in range(ranks.tp):
            for entries in together:
                table, pool = tables[entries[0].group], pools[entries[0].group]
                blocks = [
                    memory_of_a_block(entries, ranks.tp, rank, position, logical, spec.order)
                    for position in range(len(table))
                ]
                memory = np.full((pool, len(blocks[0])), -1, np.int64)
                memory[table] = blocks
                found.append(memory.reshape(-1))
    return found


def memory_of_a_block(
    parts: Sequence[Part], tp: int, rank: int, position: int, logical: dict[Part, np.ndarray], order: Order
) -> np.ndarray:
    """Block `position` of the request on a rank: its heads of each part.

    Those that have as many heads follow each other: part after part in NHD; in HND the same head of all of them, then
    the next. The parts of a state follow each other as they are.
    """
    pieces = []
    for part in parts:
        alike = [one for one in parts if (one.heads, one.replicated) == (part.heads, part.replicated)]
        if part.of_state:
            alike = [part]
        elif part is not alike[0]:
            continue
        first = 0 if part.replicated else rank * part.heads // tp
        count = part.heads if part.replicated else max(1, part.heads // tp)
        contents = [logical[one][position * one.tokens : (position + 1) * one.tokens] for one in alike]
        if order == "nhd":
            pieces += [content[:, first : first + count].reshape(-1) for content in contents]
        else:
            pieces += [content[:, head].reshape(-1) for head in range(first, first + count) for content in contents]
    return np.concatenate(pieces)


def move(plans: Sequence[TransferPlan], source: list[np.ndarray], target: list[np.ndarray]) -> None:
    """Copy every descriptor. A byte that is written twice is an error."""
    written = [np.zeros(len(memory), np.int64) for memory in target]
    for plan in plans:
        for i in range(plan.descriptors):
            length = int(plan.lengths[i])
            p, d = int(plan.prefill_offsets[i]), int(plan.decode_offsets[i])
            target[plan.decode_regions[i]][d : d + length] = source[plan.prefill_regions[i]][p : p + length]
            written[plan.decode_regions[i]][d : d + length] += 1
    assert all(times.max(initial=0) <= 1 for times in written)


def assert_cut_alike(plans: Sequence[TransferPlan]) -> None:
    """Bytes that several rank pairs move are cut into the same pieces: each piece begins with a word of its own."""
    pieces: dict[int, set[tuple[int, int]]] = {}
    for plan in plans:
        columns = plan.prefill_regions, plan.prefill_offsets, plan.prefill_offsets + plan.lengths
        for region, start, end in zip(*(column.tolist() for column in columns), strict=True):
            pieces.setdefault(region, set()).add((start, end))
    for cut in pieces.values():
        ordered = sorted(cut)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_moving_the_plans_equals_indexing_the_logical_tensor(case: Case) -> None:
    spec = case.spec
    kept, moved = spec.blocks(case.tokens), spec.blocks(case.tokens, case.held_blocks)
    every = range(blocks_of(case.tokens, spec.block_size))
    assert moved == [sum(block >= case.held_blocks for block in every[-blocks:]) for blocks in kept]
    groups = [scatter(blocks, 1, 1, case.fragmentation, case.seed + number) for number, blocks in enumerate(kept)]
    logical = logical_tensors(spec, kept)
    prefill, decode = ([getattr(group, side)[0] for group in groups] for side in ("prefill", "decode"))
    pools = [group.pool_blocks for group in groups]
    source = memories(case, case.prefill, prefill, pools, logical)
    expected = memories(case, case.decode, decode, pools, logical)

    ours, theirs = spec.regions(case.prefill), spec.regions(case.decode)
    assert [region.block_bytes * pools[region.group] for region in ours] == [len(memory) for memory in source]
    # Decode has what its prefix cache holds: of each group's blocks the first ones, which do not move.
    target = [np.full(len(memory), -1, np.int64) for memory in expected]
    for region, memory, wanted in zip(theirs, target, expected, strict=True):
        held = decode[region.group][: kept[region.group] - moved[region.group]]
        memory.reshape(pools[region.group], -1)[held] = wanted.reshape(pools[region.group], -1)[held]
    tables = [
        [table[len(table) - count :] for table, count in zip(side, moved, strict=True)] for side in (prefill, decode)
    ]
    plans = [transfer_plan(pair.slices, *tables) for pair in rank_pairs(ours, theirs, spec.order)]
    before = sum(int((memory >= 0).sum()) for memory in target)
    move(plans, source, target)
    for got, wanted in zip(target, expected, strict=True):
        assert np.array_equal(got, wanted)
    assert sum(plan.bytes for plan in plans) == sum(int((memory >= 0).sum()) for memory in target) - before
    assert_cut_alike(plans)


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
    spec = CacheSpec(load_model("70b"), BF16, order=layout)
    tables = scatter(512, 1, 1, 1.0, 0)
    found = rank_pairs(spec.regions(Ranks(tp_prefill)), spec.regions(Ranks(tp_decode)), layout)
    plans = [transfer_plan(pair.slices, [tables.prefill[0]], [tables.decode[0]]) for pair in found]
    assert (sum(plan.descriptors for plan in plans), len(found)) == (descriptors, pairs)
    replicas = max(1, tp_decode // 8)
    assert sum(plan.bytes for plan in plans) == replicas * 8192 * 327_680
    assert all(len(plan.segment_starts) == 80 for plan in plans)


@pytest.mark.parametrize(
    ("tp_prefill", "tp_decode", "stages", "pieces"),
    [
        (4, 4, (1, 1), 4),  # whole blocks
        (4, 8, (1, 1), 8),  # half of a block's heads, of all layers
        (8, 4, (1, 1), 8),
        (8, 16, (1, 1), 16),
        (4, 8, (1, 2), 16),  # on the stage of decode that has these layers a whole block, at prefill half of a head
        (4, 8, (2, 1), 16),
        (8, 4, (1, 2), 16),
        (4, 4, (1, 2), 2 * 4 * 2),  # two heads, of each half the layers
    ],
)
@pytest.mark.parametrize("regions_per_layer", [1, 2])
def test_heads_of_all_layers_of_a_block_are_one_piece(
    tp_prefill: int, tp_decode: int, stages: tuple[int, int], pieces: int, regions_per_layer: int
) -> None:
    """vLLM's blocks that hold all layers of 70B, K and V in one or apart: HND is [head, layer, token, cell]."""
    spec = CacheSpec(load_model("70b"), BF16, 16, regions_per_layer, "hnd")
    ours = spec.regions(Ranks(tp_prefill, stages[0], together=True))
    theirs = spec.regions(Ranks(tp_decode, stages[1], together=True))
    table = scatter(512, 1, 1, 1.0, 0)
    plans = [
        transfer_plan(pair.slices, [table.prefill[0]], [table.decode[0]]) for pair in rank_pairs(ours, theirs, "hnd")
    ]
    assert sum(plan.descriptors for plan in plans) == 512 * pieces
    assert sum(plan.bytes for plan in plans) == max(1, tp_decode // 8) * 8192 * 327_680


def test_tokens_of_all_layers_of_a_block_are_no_piece() -> None:
    """NHD is [layer, token, head, cell]: of some heads every token of every layer is a piece of its own."""
    spec = CacheSpec(load_model("70b"), BF16)
    sides = [spec.regions(Ranks(tp, together=True)) for tp in (4, 8)]
    assert [sum(one.count for one in pair.slices) for pair in rank_pairs(*sides, "nhd")] == [80 * 16] * 8


def test_a_latent_is_sent_whole_to_every_decode_rank() -> None:
    spec = CacheSpec(load_model("deepseek-v3"), BF16)
    found = rank_pairs(spec.regions(Ranks(8)), spec.regions(Ranks(8)), "nhd")
    assert [(pair.prefill_rank, pair.decode_rank) for pair in found] == [(rank, rank) for rank in range(8)]
    assert all(pair.bytes([1]) == 61 * 16 * 1152 for pair in found)
    spread = rank_pairs(spec.regions(Ranks(2)), spec.regions(Ranks(4)), "nhd")
    assert [(pair.prefill_rank, pair.decode_rank) for pair in spread] == [(0, 0), (0, 2), (1, 1), (1, 3)]


# --- states ----------------------------------------------------------------------------------------------------------


def state_pieces(kind: LayerKind, prefill: int, decode: int) -> dict[tuple[int, int], list[int]]:
    """Lengths of the pieces of one layer's state, by rank pair."""
    shape = ModelShape("tiny", "mamba_hybrid", 1, 64, 8, 8, 8, 8, layer_kinds=(kind,))
    spec = CacheSpec(shape, BF16)
    pairs = rank_pairs(spec.regions(Ranks(prefill)), spec.regions(Ranks(decode)), "nhd")
    none = np.zeros(1, np.uint32)
    return {
        (pair.prefill_rank, pair.decode_rank): transfer_plan(pair.slices, [none], [none]).lengths.tolist()
        for pair in pairs
    }


def test_the_state_of_a_gated_delta_net_is_cut_by_its_k_and_v_heads() -> None:
    """Qwen3-Next: conv state of q, k (16 heads of 128) and v (32), and 32 matrices of 128 × 128; four pieces a pair."""
    state = load_model("qwen3-next-80b-a3b").layer_kinds[0]
    q, v, recurrent = 16 * 128 * 3 * 2, 32 * 128 * 3 * 2, 32 * 128 * 128 * 2
    assert state_pieces(state, 1, 1) == {(0, 0): [q, q, v, recurrent]}
    quarter = [q // 4, q // 4, v // 4, recurrent // 4]
    assert state_pieces(state, 2, 4) == {(rank // 2, rank): quarter for rank in range(4)}
    assert state_pieces(state, 4, 2) == {(rank, rank // 2): quarter for rank in range(4)}


def test_groups_of_mamba2_are_replicated_on_more_ranks_than_groups() -> None:
    """Two groups over four ranks: each rank has the B and C of the group of its heads, the wire carries them twice."""
    state = Mamba2(heads=8, head_dim=16, groups=2, state=32, kernel=4).layer(2, 4)
    x, group, recurrent = 8 * 16 * 3 * 2, 32 * 3 * 2, 8 * 16 * 32 * 4
    assert state_pieces(state, 1, 1) == {(0, 0): [x, 2 * group, 2 * group, recurrent]}
    assert state_pieces(state, 1, 4) == {(0, rank): [x // 4, group, group, recurrent // 4] for rank in range(4)}
    # Back from four ranks to two: every head comes from the rank that has it, B and C from one of two.
    pieces = state_pieces(state, 4, 2)
    assert sum(map(sum, pieces.values())) == state.state_bytes
    assert [sum(map(len, (pieces[p, d] for p, d in pieces if d == rank))) for rank in (0, 1)] == [6, 6]


def test_heads_of_a_state_are_never_shared() -> None:
    state = load_model("qwen3-next-80b-a3b").layer_kinds[0]
    shape = ModelShape("tiny", "linear_attention", 1, 64, 8, 8, 8, 8, layer_kinds=(state,))
    with pytest.raises(UsageError, match=r"--tp-decode 32 does not fit the 16 heads of the convolution q state"):
        CacheSpec(shape, BF16).regions(Ranks(32, side="decode"))


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "ranks", "says"),
    [
        (
            "8b",
            Ranks(3),
            "--tp-prefill 3 does not fit the 8 KV heads of layer 0, .* 1, 2, 4, 8, 16, 24, 32, 40, … work",
        ),
        ("8b", Ranks(12, side="decode"), "--tp-decode 12 does not fit the 8 KV heads"),
        ("qwen3-next-80b-a3b", Ranks(3), "--tp-prefill 3 .* for this model 1, 2, 4, 8, 16 work"),
        ("8b", Ranks(1, 33, side="decode"), "--pp-decode 33: more pipeline stages than the model's 32 layers; 1 to 32"),
        ("8b", Ranks(1, 64), "--pp-prefill 64: more"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_those_that_do(model: str, ranks: Ranks, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CacheSpec(load_model(model), BF16).regions(ranks)


@given(st.integers(1, 12), st.integers(1, 64))
def test_what_an_error_says_to_work_works(heads: int, tp: int) -> None:
    parts = [Part(0, "kv", heads, 2, 16)]
    stages = [range(1)]
    try:
        regions(parts, stages, Ranks(tp))
    except UsageError as error:
        told = str(error).split("for this model ")[1].removesuffix(" work").removesuffix(", …").split(", ")
        assert tp not in map(int, told)
        for one in told:
            regions(parts, stages, Ranks(int(one)))
    else:
        assert heads % tp == 0 or tp % heads == 0


# --- pipeline stages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(80, 4, [20] * 4), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (43, 4, [11, 11, 11, 10]), (5, 5, [1] * 5)],
)
def test_layers_left_over_go_to_the_stages_before_the_last(layers: int, stages: int, counts: list[int]) -> None:
    """vLLM's partitions (its documentation and tests name those of 61 and 43 layers)."""
    found = pipeline_stages(layers, Ranks(pp=stages))
    assert [len(stage) for stage in found] == counts
    assert [layer for stage in found for layer in stage] == list(range(layers))


def test_layers_that_keep_nothing_count_as_layers_of_a_stage() -> None:
    """A pruned model: its last layers have no cache, and the first stage still has half of all layers."""
    kinds = (FullAttention(2, 8, 8),) * 2 + (NoCache(),) * 2
    shape = ModelShape("pruned", "pruned", 4, 64, 8, 8, 8, 8, layer_kinds=kinds)
    found = CacheSpec(shape, BF16).regions(Ranks(pp=2))
    assert [(region.rank, region.entries[0].part.layer) for region in found] == [(0, 0), (0, 1)]


def test_layers_of_multi_token_prediction_are_on_the_last_stage() -> None:
    spec = CacheSpec(load_model("deepseek-v3").with_mtp(), BF16)
    ranks = [region.rank for region in spec.regions(Ranks(pp=2))]
    assert (ranks.count(0), ranks.count(1)) == (31, 31)
