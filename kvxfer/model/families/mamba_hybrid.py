"""Granite-4 and Bamba: Mamba-2 layers with layers of full attention between them."""

from __future__ import annotations

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import read_heads
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.fields import Fields

NAMES = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
"""Whether a layer of that name has attention; the longer names are those of newer configs."""


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    full = read_heads(fields).full()
    model = fields.model_bytes()
    state = read_mamba(fields).layer(model, fields.element_bytes("mamba_ssm_cache_dtype", model))
    kinds = tuple(full if is_full else state for is_full in _attention_layers(fields, layers))
    return Reading(kinds, full.head_dim_k, full.head_dim_v)


def read_mamba(fields: Fields) -> Mamba2:
    heads = fields.positive("mamba_n_heads")
    inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
    head_dim = inner // heads if fields.config.get("mamba_d_head") == "auto" else fields.positive("mamba_d_head")
    if heads * head_dim != inner:
        fields.fail("mamba_n_heads", f"times mamba_d_head is not mamba_expand · hidden_size ({inner})")
    groups, state = fields.positive("mamba_n_groups"), fields.positive("mamba_d_state")
    return Mamba2(heads, head_dim, groups, state, fields.positive("mamba_d_conv"))


def _attention_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have attention, by the names of all layers or by the numbers of those."""
    for field in ("layer_types", "layers_block_type"):
        if fields.has(field):
            names = fields.per_layer(field, layers)
            if not all(isinstance(name, str) and name in NAMES for name in names):
                fields.fail(field, f"names layers other than {', '.join(NAMES)}")
            return [NAMES[name] for name in names]
    numbers = fields.config.get("attn_layer_indices")
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < layers for number in numbers):
        fields.fail("attn_layer_indices", "is no list of layers, and layer_types is absent")
    return [layer in numbers for layer in range(layers)]


FAMILY = Family(
    name="mamba_hybrid",
    keys=frozenset(
        {
            *("layer_types", "layers_block_type", "attn_layer_indices", "mamba_ssm_cache_dtype"),
            *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
            *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"),
        }
    ),
    model_types=frozenset({"granitemoehybrid", "bamba"}),
    applies=lambda fields: fields.model_type in ("granitemoehybrid", "bamba"),
    read=_read,
)
