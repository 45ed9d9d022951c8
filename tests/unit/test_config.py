"""Reading config.json: what is plain is sized right, everything else is refused by the name of a field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_rule import RULE
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import CONFIGS

from kvxfer.errors import UsageError
from kvxfer.model.config import read_config, shape_from_config
from kvxfer.model.dtypes import BF16
from kvxfer.model.families import FAMILIES
from kvxfer.model.presets import load_model
from kvxfer.model.rules import COMMON, SUSPICIOUS
from kvxfer.model.shape import ModelShape

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}

INERT: list[Any] = [None, False, 0, 0.0, "", [], {}]

PUBLISHED = {  # family, bf16 bytes per token, fixed bytes per request in blocks of 16, parameters
    "MiniMaxAI--MiniMax-M2.5": ("full_attention", 253_952, 0, 228_689_764_864),
    "Qwen--Qwen3-235B-A22B": ("full_attention", 192_512, 0, 235_093_634_560),
    "Qwen--Qwen3-30B-A3B": ("full_attention", 98_304, 0, 30_532_122_624),
    "Qwen--Qwen3-32B": ("full_attention", 262_144, 0, 32_762_123_264),
    "Qwen--Qwen3-8B": ("full_attention", 147_456, 0, 8_190_735_360),
    "Qwen--Qwen3-VL-8B-Instruct": ("full_attention", 147_456, 0, 8_190_735_360),
    "Qwen--Qwen3.5-397B-A17B": ("linear_attention", 30_720, 192_061_440, 396_346_350_336),
    "deepseek-ai--DeepSeek-V3": ("mla", 70_272, 0, 671_026_419_200),
    "deepseek-ai--DeepSeek-V3.2": ("mla_indexer", 78_324, 0, 671_877_944_064),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": ("chunked_attention", 196_608, 0, 107_769_861_120),
    "meta-llama--Meta-Llama-3.1-405B": ("full_attention", 516_096, 0, 405_853_388_800),
    "meta-llama--Meta-Llama-3.1-70B": ("full_attention", 327_680, 0, 70_553_706_496),
    "meta-llama--Meta-Llama-3.1-8B": ("full_attention", 131_072, 0, 8_030_261_248),
    "mistralai--Mixtral-8x7B-v0.1": ("full_attention", 131_072, 0, 46_702_792_704),
    "moonshotai--Kimi-K2-Instruct": ("mla", 70_272, 0, 1_026_408_232_448),
    "nvidia--Llama-3.1-70B-Instruct-FP8": ("full_attention", 327_680, 0, 70_553_706_496),
    "nvidia--Nemotron-H-56B-Base-8K": ("mamba_hybrid", 40_960, 912_605_184, 56_324_350_464),
    "openai--gpt-oss-120b": ("sliding_window", 36_864, 5_308_416, 116_829_156_672),
    "openai--gpt-oss-20b": ("sliding_window", 24_576, 3_538_944, 20_914_757_184),
    "zai-org--GLM-5": ("mla_indexer", 100_152, 0, 743_911_218_432),
}

PRESET_OF = {
    "Qwen--Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen--Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen--Qwen3-32B": "qwen3-32b",
    "Qwen--Qwen3-8B": "qwen3-8b",
    "Qwen--Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "deepseek-ai--DeepSeek-V3": "deepseek-v3",
    "deepseek-ai--DeepSeek-V3.2": "deepseek-v3.2",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "meta-llama--Meta-Llama-3.1-405B": "llama-3.1-405b",
    "meta-llama--Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama--Meta-Llama-3.1-8B": "llama-3.1-8b",
    "mistralai--Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "moonshotai--Kimi-K2-Instruct": "kimi-k2",
    "openai--gpt-oss-120b": "gpt-oss-120b",
    "openai--gpt-oss-20b": "gpt-oss-20b",
    "zai-org--GLM-5": "glm-5",
}


def shape(**changes: Any) -> ModelShape:
    return shape_from_config(PLAIN | changes, "tiny", "config.json")


def published(name: str) -> dict[str, Any]:
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        pytest.skip("the published configs are not beside this checkout")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def test_every_published_config_has_an_expectation() -> None:
    if not CONFIGS.exists():
        pytest.skip("the published configs are not beside this checkout")
    assert {path.stem for path in CONFIGS.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_right(name: str) -> None:
    model = shape_from_config(published(name), name, "config.json")
    bytes_ = model.kv_bytes_per_token(BF16), model.fixed_bytes_per_request(16, BF16)
    assert (model.family, *bytes_, model.params_total) == PUBLISHED[name]
    assert not any("not known here" in notice for notice in model.notices)


@pytest.mark.parametrize("name", PRESET_OF)
def test_presets_are_what_the_published_configs_say(name: str) -> None:
    read = shape_from_config(published(name), name, "config.json")
    preset = load_model(PRESET_OF[name])
    if read.layer_kinds[0].token_bytes(BF16) and read.family.startswith("mla"):
        read = replace(read, naive_head_dim=preset.naive_head_dim)  # of which configs say different things
    assert replace(read, name="", notices=(), naive_head_dim=read.naive_head_dim or read.head_dim_k) == replace(
        preset, name="", notices=()
    )


@pytest.mark.parametrize("part", RULE)
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_key_refuses_every_published_config(name: str, part: str) -> None:
    config = published(name)
    holder = config.get("text_config", config)
    for key, value in ((f"new_{part}_thing", 1), (f"{part}x", [0]), (f"use_{part}_too", True)):
        holder[key] = value
        with pytest.raises(UsageError, match=key):
            shape_from_config(config, name, "config.json")
        holder[key] = None
        shape_from_config(config, name, "config.json")
        del holder[key]


@pytest.mark.parametrize("part", RULE)
def test_an_unknown_key_beside_a_text_tower_refuses_it_too(part: str) -> None:
    config = {"text_config": PLAIN, "vision_config": {"depth": 3}, "image_token_id": 7}
    assert shape_from_config(config, "tiny", "config.json").kv_bytes_per_token(BF16) == 4 * 2 * 16 * 2
    with pytest.raises(UsageError, match=f"new_{part}"):
        shape_from_config(config | {f"new_{part}": 1}, "tiny", "config.json")


def test_plain() -> None:
    model = shape()
    assert (model.layers, model.heads, model.kv_heads, model.head_dim_k, model.head_dim_v) == (4, 8, 2, 8, 8)
    assert model.notices == ()


def test_absent_fields() -> None:
    config = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    model = shape_from_config(config, "tiny", "config.json")
    assert model.kv_heads == 8
    assert "num_key_value_heads is absent" in model.notices[0]
    assert shape(head_dim=None).head_dim_k == 8
    assert shape(head_dim=128).head_dim_k == 128


def test_unknown_model_type_is_said() -> None:
    model = shape(model_type="novel")
    assert model.params_total is None
    assert "'novel' is not known" in model.notices[0]


KNOWN = COMMON.union(*(family.keys for family in FAMILIES))

suspicious_names = st.builds(
    lambda before, part, after: f"{before}{part}{after}",
    st.sampled_from(["", "num_", "use_", "My"]),
    st.sampled_from(SUSPICIOUS).flatmap(lambda part: st.sampled_from([part, part.upper()])),
    st.sampled_from(["", "_size", "s"]),
).filter(lambda name: name not in KNOWN and name not in PLAIN)


@given(
    name=suspicious_names,
    value=st.one_of(
        st.integers(1), st.just(True), st.just(float("nan")), st.text(min_size=1), st.just([0]), st.just({"a": 1})
    ),
)
def test_any_suspicious_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        shape(**{name: value})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@given(name=suspicious_names, value=st.sampled_from(INERT))
def test_a_suspicious_field_that_is_off_is_no_obstacle(name: str, value: Any) -> None:
    assert shape(**{name: value}) == shape()


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"sliding_window": 4096, "use_sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": 0},
        {"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]},
        {"layer_types": "full_attention"},
        {"layer_types": ["full_attention"] * 3},
        {"is_encoder_decoder": True},
        {"multi_query": True},
        {"block_configs": [{"attention": {"no_op": True}}]},
    ],
)
def test_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="|".join(changes)):
        shape(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 4},
        {"layer_types": ["full_attention"] * 4},
        {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 64, "n_shared_experts": 1},
        {"rope_scaling": {"type": "yarn", "beta": float("nan")}, "time_step_limit": [0.0, float("inf")]},
    ],
)
def test_understood(changes: dict[str, Any]) -> None:
    assert shape(**changes) == shape()


def test_encoder_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="architectures"):
        shape(model_type="bert", architectures=["BertForMaskedLM"])


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in PLAIN.items() if key != field}
    with pytest.raises(UsageError, match=f"has no {field}"):
        shape_from_config(config, "tiny", "config.json")


fields = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]


@pytest.mark.parametrize("field", fields)
@pytest.mark.parametrize(
    "value", [True, -1, 0, 1.0, 2.5, float("nan"), float("inf"), "8", [8], {"a": 8}, 10**4000, 1 << 30]
)
def test_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        shape(**{field: value})
    assert len(str(caught.value)) < 400


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match="num_key_value_heads"):
        shape(num_key_value_heads=3)
    with pytest.raises(UsageError, match="hidden_size"):
        shape(hidden_size=65)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON.*line 1, column 1"),
        (b'{\n "a": }', "not JSON.*line 2, column 7"),
        (b"[1]", "JSON object is expected"),
        (b"null", "JSON object is expected"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "too many digits"),
        (b" " * ((16 << 20) + 1), "more than 16 MiB"),
    ],
    ids=["empty", "comma", "list", "null", "binary", "deep", "digits", "large"],
)
def test_unreadable_file(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_config(tmp_path / "config.json")


def test_the_name_is_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text("\ufeff" + json.dumps(PLAIN), encoding="utf-8")
    assert read_config(folder / "config.json").name == "My-Model"
    (tmp_path / "other.json").write_text(json.dumps(PLAIN))
    assert read_config(tmp_path / "other.json").name == "other"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.dictionaries(
        st.sampled_from([*PLAIN, "layer_types", "sliding_window", "num_experts", "head_dim", "x"]), json_values
    )
)
def test_any_values_give_a_shape_or_one_error(changes: dict[str, Any]) -> None:
    one_shape_or_one_error(PLAIN | changes)


plausible = (
    st.integers(0, 16)
    | st.lists(st.integers(0, 2), min_size=4, max_size=4)
    | st.lists(st.sampled_from(["full_attention", "sliding_attention", "mamba", "hybrid"]), min_size=4, max_size=4)
    | st.sampled_from([True, False, None, "M-*M", "LLLG", "float32", [32, None]])
)
MODEL_TYPES = sorted(frozenset().union(*(family.model_types for family in FAMILIES)))


@given(
    model_type=st.sampled_from(MODEL_TYPES),
    changes=st.dictionaries(st.sampled_from(sorted(KNOWN)), plausible | json_values, max_size=12),
)
@settings(max_examples=500)
def test_any_values_of_any_family_give_a_shape_or_one_error(model_type: str, changes: dict[str, Any]) -> None:
    one_shape_or_one_error(PLAIN | {"model_type": model_type} | changes)


def one_shape_or_one_error(config: dict[str, Any]) -> None:
    try:
        model = shape_from_config(config, "tiny", "config.json")
        assert len(model.layer_kinds) == model.layers
        assert model.request_bytes(100, 16, BF16) >= model.request_bytes(1, 16, BF16) >= 0
    except UsageError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("attn_config", {"sliding_window_size": 128}, "attn_config.sliding_window_size"),
        ("attention", {"inner": {"kv_lora_rank": 16}}, "attention.inner.kv_lora_rank"),
        ("layer_config", [{}, {"window": 8}], "layer_config.window"),
        ("layer_config", [[{"window": 8}]], "layer_config.window"),
        ("layer_config", [[], [{"x": [[{"window": 8}]]}]], "layer_config.x.window"),
        ("attn_cfg", {"num_key_value_heads": 16, "head_dim": 999}, "attn_cfg.num_key_value_heads"),
        ("overrides", [{"layer": 1, "num_hidden_layers": 9}], "overrides.num_hidden_layers"),
        ("decoder", {"hidden_size": 128}, "decoder.hidden_size"),
        ("draft", {"num_nextn_predict_layers": 1}, "draft.num_nextn_predict_layers"),
    ],
)
def test_fields_of_objects_inside_are_refused_by_name_too(field: str, value: Any, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        shape_from_config(PLAIN | {field: value}, "inside", "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"weight_block_size": [128, 128], "kv_cache_scheme": {"num_bits": 8}}),
        ("rope_scaling", {"type": "yarn", "rope_chunk": 3}),
        ("auto_map", {"index": "x"}),
        ("vision_config", {"hidden_size": 1280, "window_size": 112, "fullatt_block_indexes": [7]}),
        ("moe_config", {"n_shared_experts": 1, "experts": 8}),
        ("attn_cfg", {"head_dim": None, "window": 0, "dropout": 0.1}),
        ("deep", [[[[{"a": {"b": []}}]]]]),
    ],
)
def test_objects_that_say_nothing_of_the_cache_are_passed_over(field: str, value: Any) -> None:
    assert shape(**{field: value}) == shape()


def test_an_object_that_is_nested_deeply_is_searched_to_its_end() -> None:
    inside: Any = {"window": 4}
    for _ in range(5000):
        inside = [inside]
    with pytest.raises(UsageError, match=r"layers\.window"):
        shape(layers=inside)


@pytest.mark.parametrize(
    "field", ["boi_token_index", "image_token_index", "audio_token_index", "vision_start_token_id"]
)
def test_the_number_of_a_token_says_nothing_of_the_cache(field: str) -> None:
    assert shape(**{field: 255_999}) == shape()
    tower = {"text_config": PLAIN, "vision_config": {"depth": 3}, field: 7}
    assert shape_from_config(tower, "tiny", "config.json") == shape()
    with pytest.raises(UsageError, match=field):
        shape(**{field: {"layers": [1]}})
