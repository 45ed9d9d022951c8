"""Transfer plans: every byte of a request moves exactly once, to the right place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import CASES

from kvxfer import bench
from kvxfer.cache.plan import TransferPlan, transfer_plan
from kvxfer.cache.spec import CacheSpec, region_addresses
from kvxfer.cache.tables import scatter
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, resolve_dtype
from kvxfer.model.layers import FullAttention
from kvxfer.model.presets import load_model
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


@given(SPECS, st.integers(1, 60), st.integers(1, 2), st.floats(0, 1), st.integers(0, 1000), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_byte_moves_once_to_the_right_place(
    spec: CacheSpec, tokens: int, slots: int, fragmentation: float, seed: int, push: bool
) -> None:
    blocks = spec.blocks(tokens)
    tables = scatter(blocks, slots, 1, fragmentation, seed)
    for request in range(slots):
        prefill, decode = tables.prefill[request], tables.decode[request]
        local, remote = (prefill, decode) if push else (decode, prefill)
        plan = transfer_plan(local, remote, spec.block_bytes, spec.regions_per_layer)
        for region, size in enumerate(spec.block_bytes):
            source = np.arange(size * tables.pool_blocks, dtype=np.int64)
            arrived, times = moved(plan, region, source, push)
            # The reference: block i of the request, straight from its place to its place.
            for i in range(blocks):
                expected = source[prefill[i] * size : (prefill[i] + 1) * size]
                assert np.array_equal(arrived[decode[i] * size : (decode[i] + 1) * size], expected)
            assert times.sum() == blocks * size
            assert times.max() == 1
        assert plan.bytes == spec.request_bytes(tokens)


def moved(plan: TransferPlan, region: int, source: np.ndarray, push: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the decode pool's region holds after the plan, and how often each byte of it was written."""
    arrived = np.full(len(source), -1, np.int64)
    times = np.zeros(len(source), np.int64)
    for i in np.flatnonzero(plan.regions == region):
        local, remote, length = (int(part[i]) for part in (plan.local_offsets, plan.remote_offsets, plan.lengths))
        start, target = (local, remote) if push else (remote, local)
        arrived[target : target + length] = source[start : start + length]
        times[target : target + length] += 1
    return arrived, times


@given(SPECS, st.integers(1, 60), st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_segments_are_the_layers(spec: CacheSpec, tokens: int, fragmentation: float, seed: int) -> None:
    tables = scatter(spec.blocks(tokens), 1, 1, fragmentation, seed)
    plan = transfer_plan(tables.prefill[0], tables.decode[0], spec.block_bytes, spec.regions_per_layer)
    assert len(plan.segment_starts) == spec.shape.layers
    ends = [*plan.segment_starts[1:].tolist(), plan.descriptors]
    for layer, (start, end) in enumerate(zip(plan.segment_starts.tolist(), ends, strict=True)):
        assert set((plan.regions[start:end] // spec.regions_per_layer).tolist()) == {layer}


@pytest.mark.skipif(not CASES.is_file(), reason="the shared cases are not here")
def test_descriptor_counts_of_the_published_cases() -> None:
    cases = json.loads(CASES.read_text())["descriptors_fully_fragmented"]
    for case in cases:
        regions = 1 if case["regions"] == "vllm>=0.26" else 2
        spec = CacheSpec(load_model(case["model"]), resolve_dtype("bf16"), 16, regions)
        blocks = case.get("blocks") or spec.blocks(case["tokens"])
        tables = scatter(blocks, 1, 1, 1.0, 0)
        plan = transfer_plan(tables.prefill[0], tables.decode[0], spec.block_bytes, regions)
        assert plan.descriptors == case["value"], case
        assert spec.shape.descriptors(16 * blocks, 16, regions) == case["value"], case


@pytest.mark.parametrize(
    ("tokens", "fragmentation", "regions", "expected"),
    [(8192, 1.0, 1, 40_960), (8192, 1.0, 2, 81_920), (8192, 0.0, 1, 80), (8192, 0.5, 1, 80 * 257), (1, 1.0, 1, 80)],
)
def test_descriptors_of_70b(tokens: int, fragmentation: float, regions: int, expected: int) -> None:
    spec = CacheSpec(load_model("70b"), resolve_dtype("bf16"), 16, regions)
    tables = scatter(spec.blocks(tokens), 1, 1, fragmentation, 0)
    plan = transfer_plan(tables.prefill[0], tables.decode[0], spec.block_bytes, regions)
    assert plan.descriptors == expected


def test_a_block_of_llama_is_64_kib() -> None:
    assert set(CacheSpec(load_model("70b"), resolve_dtype("bf16")).block_bytes) == {65_536}
    assert set(CacheSpec(load_model("8b"), resolve_dtype("fp8"), 16, 2).block_bytes) == {16_384}


def test_regions_lie_one_after_another() -> None:
    assert region_addresses(1000, [10, 20, 30], 4) == [1000, 1040, 1120]


@pytest.mark.parametrize(("block_size", "regions"), [(0, 1), (-1, 1), (16, 0), (16, 3)])
def test_impossible_specs_are_refused(block_size: int, regions: int) -> None:
    with pytest.raises(UsageError):
        CacheSpec(load_model("8b"), resolve_dtype("bf16"), block_size, regions)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("deepseek-v3", "mla"),
        ("deepseek-v3.2", "mla indexer"),
        ("gpt-oss-20b", "sliding window"),
        ("llama-4-scout", "chunked attention"),
        ("qwen3-next-80b-a3b", "linear attention"),
    ],
)
def test_what_bench_does_not_move_yet_is_refused_by_name(model: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"{model} is not plain full attention \({says}\).*kvxfer model know"):
        CacheSpec(load_model(model), resolve_dtype("bf16"))


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_dtypes_with_scales_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"{dtype}.*bench does not move it yet"):
        CacheSpec(load_model("8b"), resolve_dtype(dtype))


@pytest.mark.parametrize("argv", [["--model", "deepseek-v3"], ["--dtype", "fp8_per_token_head"]])
def test_bench_refuses_them_before_it_starts(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    assert "bench does not move it yet" in capsys.readouterr().err


def test_plain_models_with_mtp_move() -> None:
    tiny = ModelShape("tiny", "full_attention", 2, 64, 4, 2, 8, 8, mtp_kinds=(FullAttention(2, 8, 8),))
    assert len(CacheSpec(tiny.with_mtp(), resolve_dtype("bf16")).block_bytes) == 3


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError):
        CacheSpec(load_model("8b"), resolve_dtype("bf16")).blocks(0)
