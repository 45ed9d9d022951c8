"""Gated delta nets (Qwen3-Next, Qwen3.5): some layers of full attention, the others of linear attention with a state.

The state of a linear layer, per request: (2 · k_heads · k_dim + v_heads · v_dim) · (kernel - 1) elements of the model's
dtype for the convolution, and v_heads · v_dim · k_dim elements of mamba_ssm_dtype (absent: the model's dtype).
"""

from __future__ import annotations

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import read_heads
from kvxfer.model.fields import Fields
from kvxfer.model.layers import State, gated_delta_state

FULL, LINEAR = "full_attention", "linear_attention"


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    full, state = read_heads(fields).full(), _state(fields)
    kinds = tuple(full if is_full else state for is_full in _full_layers(fields, layers))
    return Reading(kinds, full.head_dim_k, full.head_dim_v, mtp=full)


def _state(fields: Fields) -> State:
    model = fields.model_bytes()
    return gated_delta_state(
        k_heads=fields.positive("linear_num_key_heads"),
        k_dim=fields.positive("linear_key_head_dim"),
        v_heads=fields.positive("linear_num_value_heads"),
        v_dim=fields.positive("linear_value_head_dim"),
        kernel=fields.positive("linear_conv_kernel_dim"),
        conv_bytes=model,
        ssm_bytes=fields.element_bytes("mamba_ssm_dtype", model),
    )


def _full_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have full attention, by layer_types, by full_attention_interval, or by both alike."""
    by_interval = by_types = None
    if fields.has("full_attention_interval"):
        interval = fields.positive("full_attention_interval")
        by_interval = [(layer + 1) % interval == 0 for layer in range(layers)]
    if fields.has("layer_types"):
        kinds = fields.per_layer("layer_types", layers)
        if any(kind not in (FULL, LINEAR) for kind in kinds):
            fields.fail("layer_types", f"names layers other than {FULL} and {LINEAR}")
        by_types = [kind == FULL for kind in kinds]
    if by_interval and by_types and by_interval != by_types:
        fields.fail("layer_types", "puts full attention in other layers than full_attention_interval")
    found = by_types or by_interval
    if found is None:
        fields.fail("full_attention_interval", "is needed, or layer_types, to know which layers have full attention")
    return found


FAMILY = Family(
    name="linear_attention",
    keys=frozenset(
        {
            *("full_attention_interval", "layer_types", "mamba_ssm_dtype", "linear_conv_kernel_dim"),
            *("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"),
        }
    ),
    model_types=frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}),
    applies=lambda fields: fields.has("linear_num_value_heads"),
    read=_read,
)
