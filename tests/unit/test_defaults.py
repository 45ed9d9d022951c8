"""Fields that a config.json leaves out: the type's defaults where they are certain, else refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.model.config import shape_from_config
from kvxfer.model.dtypes import BF16
from kvxfer.model.families import FAMILIES, family_of
from kvxfer.model.fields import Fields
from kvxfer.model.layers import ChunkedAttention, FullAttention, Latent, LayerKind, SlidingWindow, gated_delta_state
from kvxfer.model.presets import load_model
from kvxfer.model.shape import ModelShape

SIZES: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "intermediate_size": 128,
}


def read(**changes: Any) -> ModelShape:
    return shape_from_config(SIZES | changes, "tiny", "config.json")


def repeated(each: LayerKind, last: LayerKind, every: int) -> tuple[LayerKind, ...]:
    return ((each,) * (every - 1) + (last,)) * (12 // every)


def windows(window: int, every: int, head_dim: int = 128) -> tuple[LayerKind, ...]:
    return repeated(SlidingWindow(2, head_dim, head_dim, window=window), FullAttention(2, head_dim, head_dim), every)


DELTA = gated_delta_state(k_heads=16, k_dim=128, v_heads=32, v_dim=128, kernel=4, conv_bytes=2, ssm_bytes=2)

LEFT_OUT: dict[str, tuple[LayerKind, ...]] = {
    "gemma2": windows(4096, 2, 256),
    "gemma3_text": windows(4096, 6, 256),
    "cohere2": windows(4096, 4),
    "gpt_oss": windows(128, 2, 64),
    "olmo3": windows(4096, 4),
    "exaone4": windows(4096, 4),
    "mistral": (SlidingWindow(2, 128, 128, window=4096),) * 12,
    "llama4_text": repeated(ChunkedAttention(2, 128, 128, chunk=8192), FullAttention(2, 128, 128), 4),
    "qwen3_next": repeated(DELTA, FullAttention(2, 256, 256), 4),
    "deepseek_v2": (Latent(512, 64, 192, 128),) * 12,
    "deepseek_v3": (Latent(512, 64, 192, 128),) * 12,
}
"""The layers of types whose config leaves out what makes them other than plain."""


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_what_a_known_type_leaves_out_is_as_transformers_has_it(model_type: str) -> None:
    shape = read(model_type=model_type)
    assert shape.layer_kinds == LEFT_OUT[model_type]
    assert f"taken as transformers takes them for {model_type}: " in shape.notices[0]
    assert not any("not known here" in notice for notice in shape.notices)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("qwen3_5_text", "linear_num_key_heads"),
        ("qwen3_5_moe_text", "linear_num_key_heads"),
        ("nemotron-nas", "block_configs"),
        ("deci", "block_configs"),
        ("kimi_k2", "kv_lora_rank"),
        ("deepseek_v32", "kv_lora_rank"),
        ("glm_moe_dsa", "kv_lora_rank"),
        ("mimo_v2_flash", "layer_types"),
        ("nemotron_h", "hybrid_override_pattern"),
        ("granitemoehybrid", "mamba_n_heads"),
        ("bamba", "mamba_n_heads"),
        ("zamba2", "n_mamba_heads"),
    ],
)
def test_what_has_no_certain_default_is_named(model_type: str, field: str) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        read(model_type=model_type)
    assert "\n" not in str(caught.value)


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_that_is_left_out_is_named(model_type: str) -> None:
    indexer = {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}
    assert read(model_type=model_type, **LATENT, **indexer).family == "mla_indexer"
    for field in indexer:
        with pytest.raises(UsageError, match=f"has no {field}, which its sizes follow from; add the field"):
            read(model_type=model_type, **LATENT, **indexer | {field: None})


def test_null_is_not_left_out() -> None:
    assert read(model_type="mistral", sliding_window=None).is_plain
    assert read(model_type="exaone4", sliding_window=None).is_plain
    for model_type, field in (
        ("gemma2", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("llama4_text", "attention_chunk_size"),
        ("qwen3_next", "linear_num_value_heads"),
        ("deepseek_v3", "kv_lora_rank"),
    ):
        with pytest.raises(UsageError, match=f"has no {field}"):
            read(model_type=model_type, **{field: None})


def test_full_layers_by_their_list_need_no_interval() -> None:
    types = ["full_attention", "linear_attention", "linear_attention"] * 4
    shape = read(model_type="qwen3_next", layer_types=types)
    assert shape.layer_kinds == (FullAttention(2, 256, 256), DELTA, DELTA) * 4
    assert "full_attention_interval" not in shape.notices[0]


def test_a_known_type_is_of_no_family_that_does_not_know_it() -> None:
    for model_type in frozenset().union(*(family.model_types for family in FAMILIES)):
        assert model_type in family_of(Fields({"model_type": model_type}, "config.json")).model_types
    with pytest.raises(UsageError, match="kv_lora_rank"):
        read(model_type="llama", **LATENT)


# --- configs as they are published -----------------------------------------------------------------------------------

GEMMA3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "eos_token_id": [1, 106],
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}


def test_gemma_3_as_it_is_published() -> None:
    shape, preset = shape_from_config(GEMMA3_27B, "gemma-3-27b", "config.json"), load_model("gemma-3-27b")
    assert shape.layer_kinds == preset.layer_kinds
    assert (shape.params_total, shape.params_embedding) == (preset.params_total, preset.params_embedding)


def test_gemma_3_4b_leaves_its_heads_out() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = GEMMA3_27B | {"text_config": text | {"sliding_window": 1024}}
    shape = shape_from_config(config, "gemma-3-4b", "config.json")
    full, window = FullAttention(4, 256, 256), SlidingWindow(4, 256, 256, window=1024)
    assert shape.layer_kinds == ((window,) * 5 + (full,)) * 5 + (window,) * 4
    assert shape.params_total == 3_880_263_168  # 4,300,079,472 less the vision tower and what joins it
    assert "num_attention_heads 8, num_key_value_heads 4, head_dim 256, vocab_size 262,208" in shape.notices[0]


def test_qwen_2_5_vl_has_its_vision_beside_its_text() -> None:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 3584,
        "image_token_id": 151_655,
        "intermediate_size": 18_944,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32_768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "video_token_id": 151_656,
        "vision_config": {"depth": 32, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "num_heads": 16},
        "vision_end_token_id": 151_653,
        "vision_start_token_id": 151_652,
        "vision_token_id": 151_654,
        "vocab_size": 152_064,
    }
    shape = shape_from_config(config, "qwen2.5-vl-7b", "config.json")
    assert shape.kv_bytes_per_token(BF16) == 28 * 4 * 2 * 128 * 2
    assert (shape.params_total, shape.notices) == (7_615_616_512, ())
