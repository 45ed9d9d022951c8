"""What a config.json leaves out: transformers writes the fields that differ from the model_type's defaults, or all.

So an absent field of these types has transformers' default (a null is a null), and a reader must be told. Only what the
sizes follow from is listed, and only where transformers 4.57.1 and 5.24.0 agree.
"""

from __future__ import annotations

from typing import Any

from kvxfer.model.fields import Fields


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None, **more: int) -> dict[str, int]:
    kv = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **kv, **more}


WIDE_HEADS = {"head_dim": 256}
QWEN3 = {"num_key_value_heads": 32, "head_dim": 128}
GEMMA2 = _sizes(26, 2304, 8, 4, head_dim=256, sliding_window=4096)
GEMMA3 = {**GEMMA2, "vocab_size": 262_208}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": WIDE_HEADS,
    "gemma2": GEMMA2,
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    "cohere2": _sizes(40, 8192, 64, None, sliding_window=4096),
    "gpt_oss": _sizes(36, 2880, 64, 8, head_dim=64, sliding_window=128),
    "olmo3": _sizes(32, 4096, 32, None, sliding_window=4096),
    "exaone4": _sizes(32, 4096, 32, 32, sliding_window=4096),
    "mistral": _sizes(32, 4096, 32, 8, sliding_window=4096),
    "llama4_text": _sizes(48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192),
    "deepseek_v2": LATENT,
    "deepseek_v3": _sizes(61, 7168, 128, 128, **LATENT),
    "qwen3_next": _sizes(
        *(48, 2048, 16, 2),
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), WIDE_HEADS),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), QWEN3),
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 8},
    "starcoder2": {"num_key_value_heads": 2},
    "bamba": {"num_key_value_heads": 8},
}

SAID_OTHERWISE = {"full_attention_interval": "layer_types"}
"""Fields that have no default beside another that says the same."""


def with_defaults(fields: Fields) -> tuple[Fields, list[str]]:
    """The fields with the defaults of those that are absent, and a sentence that names these."""
    left_out: dict[str, Any] = {
        field: value
        for field, value in DEFAULTS.get(fields.model_type, {}).items()
        if field not in fields.config and not (field in SAID_OTHERWISE and fields.has(SAID_OTHERWISE[field]))
    }
    if not left_out:
        return fields, []
    told = ", ".join(f"{field} {value:,}" for field, value in left_out.items())
    notice = f"absent from its config.json, and taken as transformers takes them for {fields.model_type}: {told}"
    return Fields({**fields.config, **left_out}, fields.source, fields.prefix), [notice]
