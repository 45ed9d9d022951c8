"""Reading config.json: what is plain is sized right, everything else is refused by the name of a field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.model.config import SUSPICIOUS, UNDERSTOOD, read_config, shape_from_config
from kvxfer.model.dtypes import BF16
from kvxfer.model.shape import ModelShape

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "model-configs"

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

READ = {  # bf16 bytes per token, parameters
    "Qwen--Qwen3-235B-A22B": (192_512, None),
    "Qwen--Qwen3-30B-A3B": (98_304, None),
    "Qwen--Qwen3-32B": (262_144, 32_762_123_264),
    "Qwen--Qwen3-8B": (147_456, 8_190_735_360),
    "meta-llama--Meta-Llama-3.1-405B": (516_096, 405_853_388_800),
    "meta-llama--Meta-Llama-3.1-70B": (327_680, 70_553_706_496),
    "meta-llama--Meta-Llama-3.1-8B": (131_072, 8_030_261_248),
    "mistralai--Mixtral-8x7B-v0.1": (131_072, None),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (327_680, 70_553_706_496),
}
REFUSED = {
    "MiniMaxAI--MiniMax-M2.5": "use_mtp",
    "Qwen--Qwen3-VL-8B-Instruct": "text_config",
    "Qwen--Qwen3.5-397B-A17B": "text_config",
    "deepseek-ai--DeepSeek-V3": "kv_lora_rank",
    "deepseek-ai--DeepSeek-V3.2": "kv_lora_rank",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "text_config",
    "moonshotai--Kimi-K2-Instruct": "kv_lora_rank",
    "nvidia--Nemotron-H-56B-Base-8K": "hybrid_override_pattern",
    "openai--gpt-oss-120b": "layer_types",
    "openai--gpt-oss-20b": "layer_types",
    "zai-org--GLM-5": "index_head_dim",
}


def shape(**changes: Any) -> ModelShape:
    return shape_from_config(PLAIN | changes, "tiny", "config.json")


def published(name: str) -> ModelShape:
    path = PUBLISHED / f"{name}.json"
    if not path.exists():
        pytest.skip("the published configs are not beside this checkout")
    return read_config(path)


def test_every_published_config_has_an_expectation() -> None:
    if not PUBLISHED.exists():
        pytest.skip("the published configs are not beside this checkout")
    assert {path.stem for path in PUBLISHED.glob("*.json")} == READ.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", READ)
def test_published_config_is_read_right(name: str) -> None:
    model = published(name)
    assert (model.kv_bytes_per_token(BF16), model.params_total) == READ[name]


@pytest.mark.parametrize("name", REFUSED)
def test_published_config_is_refused_by_a_field(name: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[name]):
        published(name)


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


def test_parameters_by_hand() -> None:
    """Embedding and head 2·100·64; a layer: q, o 64·64, k, v 64·16, MLP 3·64·128, norms 2·64; the last norm 64."""
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128 + 2 * 64
    assert shape().params_total == 2 * 100 * 64 + 4 * layer + 64
    assert shape().params_embedding == 2 * 100 * 64
    assert shape(tie_word_embeddings=True).params_embedding == 100 * 64
    assert shape(tie_word_embeddings=True).params_total == 100 * 64 + 4 * layer + 64
    assert shape(model_type="qwen2").params_total == shape().params_total + 4 * (64 + 2 * 16)
    assert shape(model_type="qwen3").params_total == shape().params_total + 4 * 2 * 8
    assert shape(attention_bias=True).params_total == shape().params_total + 4 * (64 + 2 * 16 + 64)
    assert shape(mlp_bias=True).params_total == shape().params_total + 4 * (2 * 128 + 64)


def test_mixture_of_experts_is_sized_but_not_counted() -> None:
    model = shape(model_type="mixtral", num_local_experts=8)
    assert model.kv_bytes_per_token(BF16) == shape().kv_bytes_per_token(BF16)
    assert model.params_total is None
    assert "--params-active" in model.notices[0]


def test_unknown_model_type_is_said() -> None:
    model = shape(model_type="novel")
    assert model.params_total is None
    assert "'novel' is not known" in model.notices[0]


suspicious_names = st.builds(
    lambda before, part, after: f"{before}{part}{after}",
    st.sampled_from(["", "num_", "use_", "My"]),
    st.sampled_from(SUSPICIOUS).flatmap(lambda part: st.sampled_from([part, part.upper()])),
    st.sampled_from(["", "_size", "s"]),
).filter(lambda name: name not in UNDERSTOOD and name not in PLAIN and name != "layer_types")


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
        (b" " * ((16 << 20) + 1), "larger than 16 MiB"),
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
    try:
        assert shape(**changes).kv_bytes_per_token(BF16) > 0
    except UsageError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
