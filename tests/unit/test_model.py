"""Dtypes, shapes and presets, held against the published counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, DTYPES, FP8_E4M3, resolve_dtype
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
    assert all(name in str(caught.value) for name in DTYPES)


def test_dtype_that_comes_later_is_said_to() -> None:
    with pytest.raises(UsageError, match="not in this version"):
        resolve_dtype("fp8_per_token_head")


@pytest.mark.parametrize(
    ("name", "dtype", "per_token"),
    [
        ("llama-3.1-8b", "bf16", 131_072),
        ("llama-3.1-8b", "fp8", 65_536),
        ("llama-3.1-70b", "bf16", 327_680),
        ("llama-3.1-70b", "fp8", 163_840),
        ("llama-3.1-405b", "bf16", 516_096),
    ],
)
def test_published_bytes_per_token(name: str, dtype: str, per_token: int) -> None:
    assert load_model(name).kv_bytes_per_token(resolve_dtype(dtype)) == per_token


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


def test_preset_parameters_are_the_published_counts() -> None:
    totals = [load_model(name).params_total for name in preset_names()]
    assert totals == [8_030_261_248, 70_553_706_496, 405_853_388_800]


def test_preset_embedding_is_table_and_head() -> None:
    for name in preset_names():
        model = load_model(name)
        assert model.params_embedding == 2 * 128_256 * model.hidden_size


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
