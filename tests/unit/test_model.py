"""Dtypes, shapes and presets, held against the published counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_files import CASES

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, DTYPES, FP8_DS_MLA, FP8_E4M3, PACKED, resolve_dtype
from kvxfer.model.presets import load_model, preset_names
from kvxfer.model.shape import ModelShape

sizes = st.integers(1, 300)


def shape(**changes: object) -> ModelShape:
    fields: dict[str, object] = {"name": "tiny", "family": "full_attention", "layers": 2, "hidden_size": 64, "heads": 4}
    fields |= {"kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16}
    return ModelShape(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name", "size", "torch_name"),
    [
        ("bf16", "bf16", 2, "bfloat16"),
        ("FP16", "fp16", 2, "float16"),
        ("fp8", "fp8_e4m3", 1, "float8_e4m3fn"),
        ("fp8_e4m3", "fp8_e4m3", 1, "float8_e4m3fn"),
        ("fp8_e5m2", "fp8_e5m2", 1, "float8_e5m2"),
    ],
)
def test_dtype(text: str, name: str, size: int, torch_name: str) -> None:
    dtype = resolve_dtype(text)
    assert (dtype.name, dtype.bytes, dtype.torch_name) == (name, size, torch_name)


def test_unknown_dtype_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(UsageError, match=r"'bf61' \(did you mean bf16\?\)") as caught:
        resolve_dtype("bf61")
    assert all(name in str(caught.value) for name in [*DTYPES, *PACKED])


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("fp8_per_token_head", 32 * 8 * (128 + 4 + 128 + 4)), ("fp8_e5m2", 65_536)],
)
def test_scales_lie_beside_k_and_beside_v(name: str, per_token: int) -> None:
    assert load_model("8b").kv_bytes_per_token(resolve_dtype(name)) == per_token


@pytest.mark.parametrize(("name", "per_layer"), [("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_packed_latents(name: str, per_layer: int) -> None:
    dtype = resolve_dtype(name)
    assert load_model("deepseek-v3.2").kv_bytes_per_token(dtype) == 61 * (per_layer + 132)
    assert load_model("glm-5").kv_bytes_per_token(dtype) == 78 * (per_layer + 132)
    for other in ("8b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"):
        assert not load_model(other).supports(dtype)
        with pytest.raises(UsageError, match=name):
            load_model(other).kv_bytes_per_token(dtype)


def test_latents_have_no_scales_per_head() -> None:
    with pytest.raises(UsageError, match="fp8_per_token_head"):
        load_model("deepseek-v3").kv_bytes_per_token(resolve_dtype("fp8_per_token_head"))


def test_a_plain_fp8_cache_of_a_model_with_an_indexer_is_remarked_on() -> None:
    (notice,) = load_model("deepseek-v3.2").dtype_notices([BF16, FP8_E4M3, FP8_DS_MLA])
    assert "fp8_e4m3" in notice
    assert "fp8_ds_mla" in notice
    assert load_model("deepseek-v3").dtype_notices([FP8_E4M3]) == []


PUBLISHED = {  # layers, hidden, heads, bf16 bytes per token, fixed bytes per request in MB, total and active parameters
    "llama-3.1-8b": (32, 4096, 32, 131_072, 0, 8.03e9, None),
    "llama-3.1-70b": (80, 8192, 64, 327_680, 0, 70.55e9, None),
    "llama-3.1-405b": (126, 16384, 128, 516_096, 0, 405.85e9, None),
    "qwen3-8b": (36, 4096, 32, 147_456, 0, 8.2e9, None),
    "qwen3-32b": (64, 5120, 64, 262_144, 0, 32.8e9, None),
    "qwen3-30b-a3b": (48, 2048, 32, 98_304, 0, 30.5e9, 3.3e9),
    "qwen3-235b-a22b": (94, 4096, 64, 192_512, 0, 235e9, 22e9),
    "mixtral-8x7b": (32, 4096, 32, 131_072, 0, 46.7e9, 12.9e9),
    "deepseek-v3": (61, 7168, 128, 70_272, 0, 671e9, 37e9),
    "deepseek-v3.2": (61, 7168, 128, 78_324, 0, 671e9, 37e9),
    "kimi-k2": (61, 7168, 64, 70_272, 0, 1.04e12, 32e9),
    "glm-5": (78, 6144, 64, 100_152, 0, None, None),
    "gpt-oss-120b": (36, 2880, 64, 36_864, 5.3, 117e9, 5.1e9),
    "gpt-oss-20b": (24, 2880, 64, 24_576, None, 21e9, 3.6e9),
    "gemma-3-27b": (62, 5376, 32, 81_920, 443, 27e9, None),
    "llama-4-scout": (48, 5120, 40, 196_608, 0, 109e9, 17e9),
    "qwen3.5-397b-a17b": (60, 4096, 32, 30_720, 192, 397e9, 17e9),
    "qwen3-next-80b-a3b": (48, 2048, 16, 24_576, 39.5, 80e9, 3e9),
}
NAIVE = {"gpt-oss-120b": 73_728, "gpt-oss-20b": 49_152, "gemma-3-27b": 507_904, "qwen3.5-397b-a17b": 122_880}

TOTALS_FARTHER_OFF = {"kimi-k2": 0.014, "llama-4-scout": 0.012}
"""The paper's 1.04T is more than the tensors of K2's config sum to; Scout's 109B include the vision tower."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_geometry(name: str) -> None:
    layers, hidden, heads, per_token, fixed, _, _ = PUBLISHED[name]
    model = load_model(name)
    assert (model.layers, model.hidden_size, model.heads) == (layers, hidden, heads)
    assert model.kv_bytes_per_token(BF16) == per_token
    if fixed is not None:
        assert model.fixed_bytes_per_request(16, BF16) / 1e6 == pytest.approx(fixed, rel=0.005)
    if name in NAIVE:
        assert model.naive_bytes_per_token(BF16) == NAIVE[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    """Cards count active parameters with both tables, with one or with none; ours are with both."""
    *_, total, active = PUBLISHED[name]
    model = load_model(name)
    assert model.params_total is not None
    assert model.params_active is not None
    assert model.params_embedding is not None
    if total is not None:
        assert model.params_total == pytest.approx(total, rel=TOTALS_FARTHER_OFF.get(name, 0.01))
    if active is not None:
        without = model.params_active - model.params_embedding
        assert without * 0.92 <= active <= model.params_active * 1.03
    assert model.params_active <= model.params_total


def test_the_plain_formula_is_57_times_too_much_for_deepseek_v3() -> None:
    model = load_model("deepseek-v3")
    naive = model.naive_bytes_per_token(BF16)
    assert naive is not None
    assert round(naive / model.kv_bytes_per_token(BF16)) == 57


def cases(part: str) -> list[dict[str, Any]]:
    if not CASES.exists():
        pytest.skip("the cases are not beside this checkout")
    found: list[dict[str, Any]] = json.loads(CASES.read_text())[part]
    return found


def test_bytes_per_token_of_the_cases() -> None:
    for case in cases("bytes_per_token"):
        assert load_model(case["model"]).kv_bytes_per_token(resolve_dtype(case["dtype"])) == case["value"], case


def test_tensor_parallel_ranks_of_the_cases() -> None:
    for case in cases("tensor_parallel"):
        model = load_model(case["model"])
        per_rank = model.rank_bytes_per_token(BF16, case["tp"])
        assert per_rank == case["bytes_per_token_per_rank"], case
        if "kv_heads_per_rank" in case:
            assert per_rank == model.layers * case["kv_heads_per_rank"] * 2 * model.head_dim_k * 2, case


def test_a_rank_of_qwen3_32b_as_reported_from_production() -> None:
    """0.79 GB on each of 8 ranks at 24k tokens."""
    assert load_model("qwen3-32b").rank_bytes_per_token(BF16, 8) * 24_000 == pytest.approx(0.79e9, rel=0.01)
    with pytest.raises(UsageError, match="3 tensor-parallel"):
        load_model("qwen3-32b").rank_bytes_per_token(BF16, 3)


@pytest.mark.parametrize(
    ("model", "tokens", "regions", "expected"),
    [
        ("70b", 118 * 16, 2, 18_880),  # vLLM #35264
        ("qwen3-0.6b", 16, 2, 56),  # vLLM #33339
        ("qwen3-0.6b", 63 * 16, 2, 3_528),  # the same: of 1,024 tokens the last block had not been counted
        ("8b", 8192, 1, 16_384),
        ("8b", 8192, 2, 32_768),
        ("70b", 8192, 1, 40_960),
        ("70b", 8192, 2, 81_920),
        ("deepseek-v3", 8192, 2, 61 * 512),  # one latent, no K and V to lie apart
        ("gpt-oss-120b", 8192, 1, 18 * 512 + 18 * 9),
        ("qwen3-next-80b-a3b", 8192, 1, 12 * 512 + 36 * 4),  # q, k and v of the convolution, and the recurrent state
    ],
)
def test_descriptors_at_full_fragmentation(model: str, tokens: int, regions: int, expected: int) -> None:
    assert load_model(model).descriptors(tokens, 16, regions) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8b", "llama-3.1-8b"),
        ("70B", "llama-3.1-70b"),
        ("405b", "llama-3.1-405b"),
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("llama-3.3-70b", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-405B-Instruct", "llama-3.1-405b"),
    ],
)
def test_preset_names_whatever_the_case(text: str, name: str) -> None:
    assert load_model(text).name == name


def test_preset_parameters_of_llama_are_the_published_counts() -> None:
    totals = [load_model(name).params_total for name in ("8b", "70b", "405b")]
    assert totals == [8_030_261_248, 70_553_706_496, 405_853_388_800]


VOCABULARY = {"llama-3": 128_256, "qwen3-next": 151_936, "qwen3.5": 248_320, "qwen3-": 151_936, "mixtral": 32_000}
VOCABULARY |= {"deepseek": 129_280, "kimi": 163_840, "glm": 154_880, "gpt-oss": 201_088, "llama-4": 202_048}


def test_preset_embedding_is_table_and_head() -> None:
    for name in preset_names():
        if name in ("qwen3-0.6b", "gemma-3-27b"):  # these have one table for both
            continue
        model = load_model(name)
        vocabulary = next(size for start, size in VOCABULARY.items() if name.startswith(start))
        assert model.params_embedding == 2 * vocabulary * model.hidden_size


def test_every_alias_is_of_one_preset() -> None:
    names = [name for preset in preset_names() for name in (preset, load_model(preset).name)]
    assert len(set(names)) == len(preset_names())
    assert load_model("deepseek-r1").name == "deepseek-v3"


def test_unknown_model_suggests_the_nearest_and_lists_presets() -> None:
    with pytest.raises(UsageError, match=r"did you mean llama-3\.1-70b\?") as caught:
        load_model("lama-3.1-70b")
    assert all(name in str(caught.value) for name in preset_names())


@pytest.mark.parametrize("text", ["", " ", "\0", "x" * 100_000, "a\nb"])
def test_odd_model_names_are_one_short_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["./none/config.json", "/none/config.json", "none.json", "./none"])
def test_missing_file_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="no file"):
        load_model(text)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json in"):
        load_model(str(tmp_path))


def test_existing_config_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "8b"
    folder.mkdir()
    assert load_model("8b").layers == 32  # a folder without a config.json is no model
    text = '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, '
    (folder / "config.json").write_text(text + '"vocab_size": 8, "intermediate_size": 8}')
    assert load_model("8b").layers == 3


@given(tokens=st.integers(1, 10**6), block_size=sizes, layers=sizes, kv_heads=sizes, k=sizes, v=sizes)
def test_whole_blocks_move(tokens: int, block_size: int, layers: int, kv_heads: int, k: int, v: int) -> None:
    model = shape(layers=layers, heads=kv_heads, kv_heads=kv_heads, head_dim_k=k, head_dim_v=v)
    block_bytes = layers * kv_heads * block_size * (k + v) * 2
    moved = model.request_bytes(tokens, block_size, BF16)
    assert moved % block_bytes == 0
    assert moved - block_bytes < tokens * model.kv_bytes_per_token(BF16) <= moved
    assert moved == 2 * model.request_bytes(tokens, block_size, FP8_E4M3)
