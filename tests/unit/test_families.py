"""The readers of the families: the cache that a config determines, and what it leaves open refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_rule import RULE

from kvxfer.errors import UsageError
from kvxfer.model.config import shape_from_config
from kvxfer.model.dtypes import BF16
from kvxfer.model.families import FAMILIES, family_of
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.fields import Fields
from kvxfer.model.layers import (
    AttentionAndState,
    ChunkedAttention,
    FullAttention,
    Latent,
    LayerKind,
    NoCache,
    SlidingWindow,
    State,
    gated_delta_state,
)
from kvxfer.model.presets import load_model
from kvxfer.model.rules import COMMON, SUSPICIOUS
from kvxfer.model.shape import ModelShape

BASE: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FULL = FullAttention(2, 8, 8)
WINDOW = SlidingWindow(2, 8, 8, window=32)

MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
INDEXER = MLA | {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*E",
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "attention_head_dim": 8,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "shared_intermediate_size": 128,
}
ZAMBA = {
    "model_type": "zamba2",
    "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
    "head_dim": None,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_key_value_heads": 8,
    "num_mem_blocks": 1,
    "use_shared_attention_adapter": True,
}
MAMBA = Mamba2(heads=8, head_dim=16, groups=2, state=16, kernel=4)


def gated_delta(conv_bytes: int, ssm_bytes: int) -> State:
    return gated_delta_state(
        k_heads=GATED_DELTA["linear_num_key_heads"],
        k_dim=GATED_DELTA["linear_key_head_dim"],
        v_heads=GATED_DELTA["linear_num_value_heads"],
        v_dim=GATED_DELTA["linear_value_head_dim"],
        kernel=4,
        conv_bytes=conv_bytes,
        ssm_bytes=ssm_bytes,
    )


def read(**changes: Any) -> ModelShape:
    return shape_from_config(BASE | changes, "tiny", "config.json")


def kinds(**changes: Any) -> tuple[LayerKind, ...]:
    return read(**changes).layer_kinds


def refused(field: str, **changes: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read(**changes)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


# --- MLA -------------------------------------------------------------------------------------------------------------


def test_mla_ignores_the_heads() -> None:
    assert kinds(**MLA) == (Latent(16, 4, 12, 8),) * 4
    assert read(**MLA).family == "mla"
    assert read(**MLA, head_dim=999).kv_bytes_per_token(BF16) == 4 * 20 * 2
    assert kinds(**MLA | {"q_lora_rank": None}) == kinds(**MLA)


def test_an_indexer_keeps_132_bytes_more_per_layer() -> None:
    assert read(**INDEXER).kv_bytes_per_token(BF16) == read(**MLA).kv_bytes_per_token(BF16) + 4 * 132
    assert read(**INDEXER).family == "mla_indexer"


def test_mla_that_is_not_determined() -> None:
    refused("index_head_dim", **INDEXER | {"index_head_dim": 100})
    refused("index_topk", **MLA, index_topk=64)
    refused("qk_head_dim", **MLA, qk_head_dim=99)
    refused("sliding_window", **MLA, sliding_window=128)
    refused("qk_rope_head_dim", **MLA | {"qk_rope_head_dim": None})
    refused("kv_lora_rank", **MLA, model_type="minicpm3")


# --- windows ---------------------------------------------------------------------------------------------------------

LISTED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}


def test_windows_by_the_list_of_layers() -> None:
    assert kinds(**LISTED) == (WINDOW, FULL) * 2


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_windows_by_a_pattern(field: str) -> None:
    assert kinds(sliding_window=32, **{field: 2}) == (WINDOW, FULL) * 2
    assert kinds(sliding_window=32, **{field: 3}) == (WINDOW, WINDOW, FULL, WINDOW)
    assert kinds(sliding_window=32, **{field: "LLLG"}) == (WINDOW, WINDOW, WINDOW, FULL)


def test_windows_by_what_the_type_does() -> None:
    assert kinds(sliding_window=32, model_type="mistral") == (WINDOW,) * 4
    assert kinds(sliding_window=32, model_type="gemma2") == (WINDOW, FULL) * 2
    assert kinds(sliding_window=32, model_type="gemma3_text", num_hidden_layers=7) == (*(WINDOW,) * 5, FULL, WINDOW)


def test_windows_by_a_list_of_sizes() -> None:
    assert kinds(sliding_window=[32, None]) == (WINDOW, FULL) * 2


def test_windows_from_some_layer_on() -> None:
    wanted = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 3}
    assert kinds(**wanted, use_sliding_window=True) == (FULL, FULL, FULL, WINDOW)
    assert kinds(**wanted | {"max_window_layers": 0}, use_sliding_window=True) == (WINDOW,) * 4
    refused("max_window_layers", **wanted | {"max_window_layers": -1}, use_sliding_window=True)
    refused("max_window_layers", **wanted | {"max_window_layers": False}, use_sliding_window=True)
    assert kinds(**wanted, use_sliding_window=False) == (FULL,) * 4
    assert read(**wanted, use_sliding_window=False).is_plain


def test_a_window_that_is_switched_off_is_off_in_a_list_too() -> None:
    assert kinds(**LISTED, use_sliding_window=False) == (FULL,) * 4


def test_window_layers_with_heads_of_their_own() -> None:
    mimo = {
        "sliding_window": 32,
        "sliding_window_size": 32,
        "attention_chunk_size": 32,
        "v_head_dim": 6,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 12,
        "swa_v_head_dim": 10,
        "swa_num_attention_heads": 16,
        "add_swa_attention_sink_bias": True,
    }
    full, window = FullAttention(2, 8, 6), SlidingWindow(4, 12, 10, query_heads=16, window=32)
    assert kinds(**mimo) == (full, window, window, full)


def test_full_layers_with_heads_of_their_own() -> None:
    wide = {**LISTED, "global_head_dim": 16, "num_global_key_value_heads": 1}
    assert kinds(**wide) == (WINDOW, FullAttention(1, 16, 16)) * 2


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("sliding_window", {"sliding_window": 32}),
        ("sliding_window", {"sliding_window": 32, "use_sliding_window": True}),
        ("sliding_window", {"layer_types": LISTED["layer_types"]}),
        ("sliding_window", {**LISTED, "sliding_window": [32, 64]}),
        ("sliding_window_pattern", {**LISTED, "sliding_window_pattern": 4}),
        ("sliding_window_pattern", {"sliding_window": 32, "sliding_window_pattern": "LLG"}),
        ("sliding_window_pattern", {"sliding_window": 32, "sliding_window_pattern": "LX"}),
        ("hybrid_layer_pattern", {"sliding_window": 32, "hybrid_layer_pattern": [0, 1, 2, 0]}),
        ("layer_types", {**LISTED, "layer_types": ["sliding_attention", "linear_attention"] * 2}),
        ("layer_types", {**LISTED, "layer_types": ["sliding_attention"] * 3}),
        ("attention_chunk_size", {**LISTED, "attention_chunk_size": 64}),
        ("sliding_window_size", {**LISTED, "sliding_window_size": 64}),
        ("num_kv_shared_layers", {**LISTED, "num_kv_shared_layers": 2}),
        ("attention_k_eq_v", {**LISTED, "attention_k_eq_v": True}),
    ],
)
def test_windows_that_are_not_determined(field: str, changes: dict[str, Any]) -> None:
    refused(field, **changes)


# --- chunks ----------------------------------------------------------------------------------------------------------

CHUNKED = ChunkedAttention(2, 8, 8, chunk=64)


def test_chunked_layers_keep_what_full_ones_do() -> None:
    assert kinds(attention_chunk_size=64) == (CHUNKED, CHUNKED, CHUNKED, FULL)
    assert kinds(attention_chunk_size=64, no_rope_layers=[1, 0, 0, 1]) == (CHUNKED, FULL, FULL, CHUNKED)
    types = ["chunked_attention", "full_attention"] * 2
    assert kinds(attention_chunk_size=64, layer_types=types) == (CHUNKED, FULL) * 2
    assert read(attention_chunk_size=64).kv_bytes_per_token(BF16) == read().kv_bytes_per_token(BF16)
    refused("layer_types", attention_chunk_size=64, layer_types=["linear_attention"] * 4)


# --- linear attention and Mamba --------------------------------------------------------------------------------------


def test_gated_delta_by_hand() -> None:
    """Keys 8, values 32: convolution (2·8 + 32)·3 elements, state 32·4."""
    state = gated_delta(2, 2)
    assert state.state_bytes == (2 * 8 + 32) * 3 * 2 + 32 * 4 * 2
    assert kinds(**GATED_DELTA) == (state, state, state, FULL)
    in_fp32 = kinds(**GATED_DELTA, mamba_ssm_dtype="float32", dtype="bfloat16")
    assert in_fp32 == (gated_delta(2, 4),) * 3 + (FULL,)
    assert kinds(**GATED_DELTA, torch_dtype="float32")[0] == gated_delta(4, 4)


def test_gated_delta_by_the_list_of_layers() -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    listed = GATED_DELTA | {"full_attention_interval": None, "layer_types": types}
    assert [isinstance(kind, State) for kind in kinds(**listed)] == [False, True, True, False]
    refused("layer_types", **listed | {"full_attention_interval": 4})
    refused("layer_types", **listed | {"layer_types": ["full_attention", "conv"] * 2})
    refused("full_attention_interval", **GATED_DELTA | {"full_attention_interval": None})
    refused("mamba_ssm_dtype", **GATED_DELTA, mamba_ssm_dtype="int3")


def test_nemotron_h_by_its_letters() -> None:
    state = MAMBA.layer(2, 4)
    assert kinds(**NEMOTRON) == (state, NoCache(), FULL, NoCache())
    assert kinds(**NEMOTRON, mamba_ssm_cache_dtype="float16")[0] == MAMBA.layer(2, 2)
    assert "float32" in read(**NEMOTRON).notices[0]
    named = NEMOTRON | {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    assert kinds(**named) == kinds(**NEMOTRON)
    renamed = named | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
    assert kinds(**renamed) == kinds(**NEMOTRON)


def test_nemotron_h_that_is_not_determined() -> None:
    refused("hybrid_override_pattern", **NEMOTRON | {"hybrid_override_pattern": "M-*"})
    refused("hybrid_override_pattern", **NEMOTRON | {"hybrid_override_pattern": "M-*X"})
    refused("hybrid_override_pattern", **NEMOTRON | {"hybrid_override_pattern": None})
    refused("layers_block_type", **NEMOTRON, layers_block_type=["mamba"] * 4)
    refused("sliding_window", **NEMOTRON, sliding_window=32)


def test_granite() -> None:
    state = MAMBA.layer(2, 2)
    assert state.state_bytes == (128 + 2 * 2 * 16) * 3 * 2 + 8 * 16 * 16 * 2
    assert kinds(**GRANITE) == (state, state, FULL, state)
    renamed = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert kinds(**GRANITE | {"layer_types": renamed}) == kinds(**GRANITE)
    bamba = GRANITE | {"model_type": "bamba", "layer_types": None, "attn_layer_indices": [2], "mamba_d_head": "auto"}
    assert kinds(**bamba) == kinds(**GRANITE)
    refused("attn_layer_indices", **bamba | {"attn_layer_indices": [9]})
    refused("layer_types", **GRANITE | {"layer_types": ["conv"] * 4})
    refused("mamba_n_heads", **GRANITE | {"mamba_d_head": 8})


def test_zamba2_has_attention_beside_the_state() -> None:
    state = MAMBA.layer(2, 2)
    assert kinds(**ZAMBA) == (state, AttentionAndState(FullAttention(8, 16, 16), state), state, state)
    renamed = ["linear_attention", "hybrid", "linear_attention", "linear_attention"]
    assert kinds(**ZAMBA | {"layers_block_type": renamed}) == kinds(**ZAMBA)
    assert read(**ZAMBA).kv_bytes_per_token(BF16) == 8 * 32 * 2
    assert read(**ZAMBA).fixed_bytes_per_request(16, BF16) == 4 * state.state_bytes
    refused("attention_head_dim", **ZAMBA, attention_head_dim=8)
    refused("layers_block_type", **ZAMBA | {"layers_block_type": ["attention"] * 4})


# --- layers of their own ---------------------------------------------------------------------------------------------


def block(**attention: Any) -> dict[str, Any]:
    return {"attention": {"no_op": False, "n_heads_in_group": 4, "window_length": None, **attention}, "ffn": {}}


def test_pruned_layers() -> None:
    blocks = [block(), block(n_heads_in_group=8), block(no_op=True), block(replace_with_linear=True)]
    expected = (FULL, FullAttention(1, 8, 8), NoCache(), NoCache())
    assert kinds(block_configs=blocks, num_key_value_heads=None) == expected
    assert kinds(num_key_value_heads_per_layer=[2, 1, 0, 0]) == expected


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block_configs[3].attention.window_length", {"block_configs": [block()] * 3 + [block(window_length=8)]}),
        ("block_configs[0].attention.sparsify", {"block_configs": [block(sparsify=[1])] * 4}),
        ("block_configs[0].attention.n_heads_in_group", {"block_configs": [block(n_heads_in_group=3)] * 4}),
        ("block_configs", {"block_configs": [{}] * 4}),
        ("block_configs", {"block_configs": [block()]}),
        ("num_key_value_heads_per_layer", {"num_key_value_heads_per_layer": [3, 1, 1, 1]}),
    ],
)
def test_pruned_layers_that_are_not_determined(field: str, changes: dict[str, Any]) -> None:
    refused(field, **changes)


def test_values_may_have_heads_of_their_own_size() -> None:
    assert kinds(v_head_dim=4) == (FullAttention(2, 8, 4),) * 4
    assert read(v_head_dim=4).is_plain


# --- more towers, more layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tower", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_a_multimodal_config(tower: str) -> None:
    config = {
        "architectures": ["SomeForConditionalGeneration"],
        "model_type": "vl",
        "torch_dtype": "float32",
        "vision_config": {"num_hidden_layers": 99},
        "vision_start_token_id": 5,
        "audio_config": {"x": 1},
        tower: BASE | GATED_DELTA,
    }
    shape = shape_from_config(config, "tiny", "config.json")
    assert shape.layer_kinds[0] == gated_delta(4, 4)  # of the dtype that stands outside
    with pytest.raises(UsageError, match=rf"{tower}\.new_window"):
        shape_from_config(config | {tower: BASE | {"new_window": 3}}, "tiny", "config.json")
    with pytest.raises(UsageError, match="cross_attention"):
        shape_from_config(config | {"cross_attention": 3}, "tiny", "config.json")


@pytest.mark.parametrize(
    ("changes", "kind", "count"),
    [
        ({"num_nextn_predict_layers": 1, **MLA}, Latent(16, 4, 12, 8), 1),
        ({"num_nextn_predict_layers": 2}, FULL, 2),
        ({"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}, FULL, 3),
        ({"mtp_num_hidden_layers": 1, **GATED_DELTA}, FULL, 1),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", **NEMOTRON}, FULL, 1),
    ],
)
def test_layers_of_multi_token_prediction(changes: dict[str, Any], kind: LayerKind, count: int) -> None:
    shape = read(**changes)
    assert shape.layers == len(shape.layer_kinds) == 4
    assert shape.mtp_kinds == (kind,) * count
    assert shape.with_mtp().layer_kinds[4:] == (kind,) * count
    assert any("left out; --with-mtp" in notice for notice in shape.notices)
    assert not any("left out" in notice for notice in shape.with_mtp().notices)
    assert len(shape.with_mtp().notices) == len(shape.notices) - 1


def test_multi_token_prediction_that_is_not_determined_is_refused_when_asked_for() -> None:
    for changes in ({**LISTED, "num_nextn_predict_layers": 1}, {**NEMOTRON, "num_nextn_predict_layers": 1}):
        shape = read(**changes)
        assert any("does not tell what they keep" in notice for notice in shape.notices)
        assert not any("--with-mtp" in notice for notice in shape.notices)
        with pytest.raises(UsageError, match="multi-token-prediction"):
            shape.with_mtp()


# --- the rule --------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, dict[str, Any]] = {
    "full": {},
    "mla": MLA,
    "indexer": INDEXER,
    "window": LISTED,
    "chunked": {"attention_chunk_size": 64},
    "gated_delta": GATED_DELTA,
    "nemotron_h": NEMOTRON,
    "granite": GRANITE,
    "zamba2": ZAMBA,
    "bamba": GRANITE | {"model_type": "bamba", "layer_types": None, "attn_layer_indices": [2]},
    "pruned": {"block_configs": [block()] * 4},
    "pruned_by_heads": {"num_key_value_heads_per_layer": [2, 1, 0, 0]},
    "gemma2": {"model_type": "gemma2", "sliding_window": 32},
    "mimo": {"model_type": "mimo_v2_flash", "sliding_window": 32, "hybrid_layer_pattern": [0, 1, 1, 0]},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}},
}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "full"])
def test_no_family_passes_over_a_key_that_only_others_understand(name: str) -> None:
    ours = family_of(Fields(BASE | EXAMPLES[name], "config.json"))
    for key in sorted(frozenset().union(*(family.keys for family in FAMILIES)) - ours.keys - COMMON):
        changes = EXAMPLES[name] | {key: 3}
        if any(part in key for part in SUSPICIOUS):
            refused("", **changes)
        else:
            assert kinds(**changes) == kinds(**EXAMPLES[name]), key


@pytest.mark.parametrize("part", RULE)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unknown_key_refuses_every_family(name: str, part: str) -> None:
    shape = read(**EXAMPLES[name])
    for key, value in ((f"new_{part}_thing", 1), (f"{part}x", [0]), (f"use_{part}_too", True)):
        refused(key, **EXAMPLES[name] | {key: value})
        refused(f"inside.{key}", **EXAMPLES[name] | {"inside": [{key: value}]})
        assert read(**EXAMPLES[name] | {key: None}) == shape


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("layer_group_size", {"model_type": "bailing_moe_linear", "layer_group_size": 5, "linear_silu": False}),
        ("model_type", {"model_type": "bailing_moe_linear"}),
        ("model_type", {**MLA, "model_type": "bailing_hybrid"}),
        ("model_type", {**LISTED, "model_type": "new_mamba"}),
        ("architectures", {"architectures": ["SomeRecurrentForCausalLM"], "model_type": "some"}),
        ("total_ut_steps", {"model_type": "ouro", "total_ut_steps": 4, "layer_types": ["full_attention"] * 4}),
        ("mixer_types", {"mixer_types": ["lightning", "full", "full", "full"]}),
        ("layers_types", {"layers_types": ["full"] * 4}),
        ("full_attn_idxs", {"full_attn_idxs": [3]}),
        ("use_mla", {"model_type": "deepseek_v2", "use_mla": False}),
        ("use_mla", {**MLA, "use_mla": False}),
    ],
)
def test_models_that_look_like_others_are_refused(field: str, config: dict[str, Any]) -> None:
    """Ring-linear has a state in four layers of five, Ouro K and V for each of its steps, and both look plain."""
    refused(field, **config)


def test_a_new_name_of_states_is_no_obstacle_where_the_states_are_read() -> None:
    assert kinds(**GATED_DELTA, model_type="new_linear") == kinds(**GATED_DELTA)
    assert kinds(**GRANITE)  # granitemoehybrid is known


def test_there_is_an_example_of_every_family() -> None:
    assert {family_of(Fields(BASE | example, "config.json")) for example in EXAMPLES.values()} == set(FAMILIES)


def test_an_unknown_type_of_a_known_kind_is_remarked_on() -> None:
    assert "not known here; it is sized as mla" in read(**MLA).notices[0]
    assert "not known here" not in " ".join(read(**MLA, model_type="deepseek_v3").notices)


def test_a_file_of_a_pruned_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | EXAMPLES["pruned"]))
    assert load_model(str(path)).family == "pruned"
