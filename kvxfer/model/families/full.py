"""Full attention (GQA, MHA, MQA): every layer keeps K and V of every token, L · kv · (d_k + d_v) elements.

A window that is switched off (`use_sliding_window: false`) does not count. K and V may have heads of different size.
"""

from __future__ import annotations

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import read_heads
from kvxfer.model.fields import Fields

SWITCHED_OFF = ("sliding_window", "max_window_layers")
"""Meaningless while use_sliding_window is false."""


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    heads = read_heads(fields)
    _check_layer_types(fields, layers)
    kind = heads.full(fields.optional("v_head_dim"))
    if fields.config.get("use_sliding_window") is not False:
        for field in SWITCHED_OFF:
            if fields.has(field):
                fields.fail(field, "is no window that use_sliding_window: false switches off, nor one of known layers")
    return Reading((kind,) * layers, kind.head_dim_k, kind.head_dim_v, mtp=kind)


def _check_layer_types(fields: Fields, layers: int) -> None:
    if not fields.has("layer_types"):
        return
    if any(kind != "full_attention" for kind in fields.per_layer("layer_types", layers)):
        fields.fail("layer_types", "names other layers than full_attention, which nothing else here describes")


FAMILY = Family(
    name="full_attention",
    keys=frozenset({*SWITCHED_OFF, "layer_types", "v_head_dim", "vision_config"}),
    model_types=frozenset(
        {
            *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
            *("qwen3_vl_text", "qwen3_vl_moe_text", "minimax_m2", "phi3", "starcoder2", "exaone4"),
            *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
            *("granite", "granitemoe", "granitemoeshared"),
        }
    ),
    applies=lambda fields: True,
    read=_read,
)
