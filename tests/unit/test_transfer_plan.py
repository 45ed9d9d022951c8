"""Transfer plans: every byte of a request moves exactly once, to the right place."""

from __future__ import annotations

import json
import sys
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import CASES

from kvxfer import bench
from kvxfer.cache.layout import Ranks, rank_pairs
from kvxfer.cache.plan import TransferPlan, transfer_plan
from kvxfer.cache.spec import CacheSpec, region_addresses
from kvxfer.cache.tables import BlockTables, scatter
from kvxfer.cache.wire import pieces
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, PACKED, resolve_dtype
from kvxfer.model.layers import FullAttention
from kvxfer.model.presets import load_model, preset_names
from kvxfer.model.shape import ModelShape


def shape(layers: int, kv_heads: int, k: int, v: int) -> ModelShape:
    return ModelShape("tiny", "full_attention", layers, 64, kv_heads, kv_heads, k, v)


SPECS = st.builds(
    lambda layers, heads, k, v, dtype, block, regions: CacheSpec(shape(layers, heads, k, v), dtype, block, regions),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(list(DTYPES.values())),
    st.integers(1, 5),
    st.sampled_from([1, 2]),
)


def whole_plan(spec: CacheSpec, tables: list[BlockTables], request: int = 0) -> TransferPlan:
    """The plan of a request between two sides of one rank each."""
    side = spec.regions(Ranks())
    (pair,) = rank_pairs(side, side, spec.order)
    prefill, decode = ([getattr(group, name)[request] for group in tables] for name in ("prefill", "decode"))
    return transfer_plan(pair.slices, prefill, decode)


def scattered(
    spec: CacheSpec, tokens: int, fragmentation: float = 1.0, seed: int = 0, slots: int = 1
) -> list[BlockTables]:
    return [scatter(blocks, slots, 1, fragmentation, seed + group) for group, blocks in enumerate(spec.blocks(tokens))]


@given(SPECS, st.integers(1, 60), st.integers(1, 2), st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_every_byte_moves_once_to_the_right_place(
    spec: CacheSpec, tokens: int, slots: int, fragmentation: float, seed: int
) -> None:
    tables = scattered(spec, tokens, fragmentation, seed, slots)
    (blocks,) = spec.blocks(tokens)
    for request in range(slots):
        prefill, decode = tables[0].prefill[request], tables[0].decode[request]
        plan = whole_plan(spec, tables, request)
        side = spec.regions(Ranks())
        assert plan.descriptors == pieces(rank_pairs(side, side, spec.order))([blocks], fragmentation)
        for region, size in enumerate(spec.block_bytes):
            source = np.arange(size * tables[0].pool_blocks, dtype=np.int64)
            arrived, times = moved(plan, region, source)
            # The reference: block i of the request, straight from its place to its place.
            for i in range(blocks):
                expected = source[prefill[i] * size : (prefill[i] + 1) * size]
                assert np.array_equal(arrived[decode[i] * size : (decode[i] + 1) * size], expected)
            assert times.sum() == blocks * size
            assert times.max() == 1
        assert plan.bytes == spec.request_bytes(tokens)


def moved(plan: TransferPlan, region: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the decode pool's region holds after the plan, and how often each byte of it was written."""
    arrived = np.full(len(source), -1, np.int64)
    times = np.zeros(len(source), np.int64)
    for i in np.flatnonzero(plan.decode_regions == region):
        assert plan.prefill_regions[i] == region
        start, target, length = (int(a[i]) for a in (plan.prefill_offsets, plan.decode_offsets, plan.lengths))
        arrived[target : target + length] = source[start : start + length]
        times[target : target + length] += 1
    return arrived, times


@given(SPECS, st.integers(1, 60), st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_segments_are_the_layers(spec: CacheSpec, tokens: int, fragmentation: float, seed: int) -> None:
    plan = whole_plan(spec, scattered(spec, tokens, fragmentation, seed))
    assert len(plan.segment_starts) == spec.shape.layers
    ends = [*plan.segment_starts[1:].tolist(), plan.descriptors]
    for layer, (start, end) in enumerate(zip(plan.segment_starts.tolist(), ends, strict=True)):
        assert set((plan.decode_regions[start:end] // spec.regions_per_layer).tolist()) == {layer}


@pytest.mark.skipif(not CASES.is_file(), reason="the shared cases are not here")
def test_descriptor_counts_of_the_published_cases() -> None:
    cases = json.loads(CASES.read_text())["descriptors_fully_fragmented"]
    for case in cases:
        per_layer = 1 if case["regions"] == "vllm>=0.26" else 2
        spec = CacheSpec(load_model(case["model"]), resolve_dtype("bf16"), 16, per_layer)
        tokens = case.get("tokens") or 16 * case["blocks"]
        assert whole_plan(spec, scattered(spec, tokens)).descriptors == case["value"], case
        assert spec.shape.descriptors(tokens, 16, per_layer) == case["value"], case


def pieces_of_a_rank(spec: CacheSpec, blocks: int, ranks: Ranks) -> set[tuple[int, int, int]]:
    """(descriptors, bytes, the longest) that each pair of ranks moves between equal sides, no two blocks adjacent."""
    side = spec.regions(ranks)
    table = scatter(blocks, 1, 1, 1.0, 0)
    plans = [
        transfer_plan(pair.slices, [table.prefill[0]], [table.decode[0]]) for pair in rank_pairs(side, side, spec.order)
    ]
    assert len(plans) == ranks.count
    return {(plan.descriptors, plan.bytes, int(plan.lengths.max())) for plan in plans}


def test_40064_descriptors_of_8_kib_are_a_rank_of_64_layers_under_tp_4() -> None:
    """vLLM #34054: 313 MiB in 40,064 descriptors; the model is not named.

    2^7 · 313 of them: with K and V apart 64 layers and 313 blocks, as of a prompt of 5,000 tokens, and 8 KiB are 16
    tokens of two bf16 heads of 128. That is a quarter of Qwen3-32B (64 layers, 8 KV heads).
    """
    spec = CacheSpec(load_model("qwen3-32b"), resolve_dtype("bf16"), 16, 2, "hnd")
    assert spec.blocks(5000) == [313]
    assert pieces_of_a_rank(spec, 313, Ranks(4)) == {(40_064, 313 << 20, 8192)}


@pytest.mark.parametrize(("layout", "expected"), [(Ranks(together=True), 118), (Ranks(), 18_880)])
def test_118_blocks_of_70b_are_as_many_descriptors_or_18880(layout: Ranks, expected: int) -> None:
    """vLLM #35264: one descriptor per block when it holds all layers, and 2 · 80 · 118 when each has its K and V."""
    spec = CacheSpec(load_model("llama-3.3-70b"), resolve_dtype("bf16"), 16, 2, "hnd")
    ((descriptors, size, _),) = pieces_of_a_rank(spec, 118, layout)
    assert (descriptors, size) == (expected, 118 * 16 * 327_680)


def test_63_of_64_blocks_of_qwen3_06b_are_3528_descriptors() -> None:
    """vLLM #33339: 16 tokens were 56 descriptors and 1,024 were 3,528: the last block had not been counted."""
    spec = CacheSpec(load_model("qwen3-0.6b"), resolve_dtype("bf16"), 16, 2)
    assert [pieces_of_a_rank(spec, blocks, Ranks()) for blocks in (1, 63)] == [
        {(56, 56 << 15, 1 << 15)},
        {(3528, 3528 << 15, 1 << 15)},
    ]


def test_32768_descriptors_of_16_kib_are_half_a_gib() -> None:
    """vLLM #53825 ("~32k of 16 KB", the model not named): so moves a rank of 8B under TP 2 with 8,192 tokens."""
    spec = CacheSpec(load_model("8b"), resolve_dtype("bf16"), 16, 2, "hnd")
    assert pieces_of_a_rank(spec, 512, Ranks(2)) == {(32_768, 1 << 29, 16_384)}


def test_4900_mb_of_glm_5_are_some_120000_descriptors() -> None:
    """vLLM #55434: ~4.9 GB in 91k to 120k descriptors: blocks of 64 tokens of a latent and of an indexer's keys."""
    spec = CacheSpec(load_model("glm-5"), resolve_dtype("bf16"), 64)
    blocks = round(4.9e9 / (64 * 100_152))
    ((descriptors, size, _),) = pieces_of_a_rank(spec, blocks, Ranks())
    assert size == pytest.approx(4.9e9, rel=0.01)
    assert descriptors == 2 * 78 * blocks
    assert 91_000 <= descriptors <= 120_000


@pytest.mark.parametrize(
    ("tokens", "fragmentation", "per_layer", "expected"),
    [(8192, 1.0, 1, 40_960), (8192, 1.0, 2, 81_920), (8192, 0.0, 1, 80), (8192, 0.5, 1, 80 * 257), (1, 1.0, 1, 80)],
)
def test_descriptors_of_70b(tokens: int, fragmentation: float, per_layer: int, expected: int) -> None:
    spec = CacheSpec(load_model("70b"), resolve_dtype("bf16"), 16, per_layer)
    assert whole_plan(spec, scattered(spec, tokens, fragmentation)).descriptors == expected


@pytest.mark.parametrize("model", preset_names())
@pytest.mark.parametrize("per_layer", [1, 2])
def test_every_preset_moves_the_bytes_and_pieces_that_its_model_says(model: str, per_layer: int) -> None:
    shape_of = load_model(model)
    for dtype in [*DTYPES.values(), *PACKED.values()]:
        if not shape_of.supports(dtype):
            continue
        spec = CacheSpec(shape_of, dtype, 16, per_layer)
        for tokens in (1, 100, 3000):
            plan = whole_plan(spec, scattered(spec, tokens))
            expected = shape_of.request_bytes(tokens, 16, dtype)
            assert plan.bytes == spec.request_bytes(tokens) == expected, (dtype.name, tokens)
            assert plan.descriptors == shape_of.descriptors(tokens, 16, per_layer), (dtype.name, tokens)


def test_a_block_of_llama_is_64_kib() -> None:
    assert set(CacheSpec(load_model("70b"), resolve_dtype("bf16")).block_bytes) == {65_536}
    assert set(CacheSpec(load_model("8b"), resolve_dtype("fp8"), 16, 2).block_bytes) == {16_384}


def test_layers_that_lie_together_are_one_piece_per_block() -> None:
    spec = CacheSpec(load_model("70b"), resolve_dtype("bf16"))
    side = spec.regions(Ranks(tp=2, together=True))
    pairs = rank_pairs(side, side, "nhd")
    assert [len(pair.slices) for pair in pairs] == [1, 1]
    assert all(pair.slices[0].whole for pair in pairs)
    assert sum(pair.bytes([512]) for pair in pairs) == spec.request_bytes(8192)


def test_pipeline_stages_split_the_layers() -> None:
    spec = CacheSpec(load_model("70b"), resolve_dtype("bf16"))
    pairs = rank_pairs(spec.regions(Ranks(pp=2)), spec.regions(Ranks(pp=4)), "nhd")
    assert [(pair.prefill_rank, pair.decode_rank) for pair in pairs] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert {pair.bytes([512]) for pair in pairs} == {spec.request_bytes(8192) // 4}


def test_regions_lie_one_after_another() -> None:
    assert region_addresses(1000, [40, 80, 120]) == [1000, 1040, 1120]


@pytest.mark.parametrize(("block_size", "per_layer"), [(0, 1), (-1, 1), (16, 0), (16, 3)])
def test_impossible_specs_are_refused(block_size: int, per_layer: int) -> None:
    with pytest.raises(UsageError):
        CacheSpec(load_model("8b"), resolve_dtype("bf16"), block_size, per_layer)


@pytest.mark.parametrize(("model", "dtype"), [("8b", "fp8_ds_mla"), ("deepseek-v3", "fp8_per_token_head")])
def test_dtypes_that_a_cache_cannot_have_are_refused_before_anything_starts(
    model: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--model", model, "--dtype", dtype]) == 2
    assert dtype in capsys.readouterr().err


def test_plain_models_with_mtp_move() -> None:
    tiny = ModelShape("tiny", "full_attention", 2, 64, 4, 2, 8, 8, mtp_kinds=(FullAttention(2, 8, 8),))
    assert len(CacheSpec(tiny.with_mtp(), resolve_dtype("bf16")).block_bytes) == 3


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError):
        CacheSpec(load_model("8b"), resolve_dtype("bf16")).blocks(0)


def test_descriptors_are_made_without_a_loop_over_them() -> None:
    """Ten times the blocks run as many lines of Python."""

    def lines(tokens: int) -> int:
        spec = CacheSpec(load_model("8b"), resolve_dtype("bf16"))
        tables = scattered(spec, tokens)
        side, other = (spec.regions(Ranks(tp)) for tp in (2, 4))
        pairs = rank_pairs(side, other, "nhd")
        prefill, decode = ([getattr(group, name)[0] for group in tables] for name in ("prefill", "decode"))
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal count
            count += event == "line"
            return trace if frame.f_code.co_filename == transfer_plan.__code__.co_filename else None

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            plans = [transfer_plan(pair.slices, prefill, decode) for pair in pairs]
        finally:
            sys.settrace(before)
        assert sum(plan.descriptors for plan in plans) == 32 * 4 * tokens
        return count

    assert lines(3200) == lines(320) > 0
