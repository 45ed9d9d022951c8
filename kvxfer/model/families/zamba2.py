"""Zamba2: every layer has a Mamba-2 state; the hybrid ones have attention beside it.

The attention's weights are shared between the hybrid layers, its cache is not. Its heads are of twice the hidden size:
2 · hidden_size / num_attention_heads elements.
"""

from __future__ import annotations

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import read_head_counts
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.fields import Fields
from kvxfer.model.layers import AttentionAndState, FullAttention, LayerKind, State

MAMBA, HYBRID = ("mamba", "linear_attention"), "hybrid"
"""Names of layers; Mamba-2 has another in newer configs."""


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    model = fields.model_bytes()
    state = read_mamba(fields).layer(model, model)
    attention = _attention(fields)
    kinds = tuple(_kind(name, attention, state) for name in _names(fields, layers))
    return Reading(kinds, attention.head_dim_k, attention.head_dim_v)


def _attention(fields: Fields) -> FullAttention:
    query, kv = read_head_counts(fields)
    wide = 2 * fields.positive("hidden_size")
    if fields.positive("attention_hidden_size", wide) != wide:
        fields.fail("attention_hidden_size", f"is not 2 · hidden_size ({wide})")
    head_dim = fields.positive("attention_head_dim", wide // query)
    if head_dim * query != wide:
        fields.fail("attention_head_dim", f"times num_attention_heads is not 2 · hidden_size ({wide})")
    return FullAttention(kv, head_dim, head_dim)


def read_mamba(fields: Fields) -> Mamba2:
    heads = fields.positive("n_mamba_heads")
    inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
    head_dim = fields.positive("mamba_headdim", inner // heads)
    if heads * head_dim != inner:
        fields.fail("n_mamba_heads", f"times mamba_headdim is not mamba_expand · hidden_size ({inner})")
    groups, state = fields.positive("mamba_ngroups"), fields.positive("mamba_d_state")
    return Mamba2(heads, head_dim, groups, state, fields.positive("mamba_d_conv"))


def _names(fields: Fields, layers: int) -> list[str]:
    names = fields.per_layer("layers_block_type", layers)
    if any(name not in (*MAMBA, HYBRID) for name in names):
        fields.fail("layers_block_type", f"names layers other than {MAMBA[0]} and {HYBRID}")
    return list(names)


def _kind(name: str, attention: FullAttention, state: State) -> LayerKind:
    return AttentionAndState(attention, state) if name == HYBRID else state


FAMILY = Family(
    name="mamba_hybrid",
    keys=frozenset(
        {
            *("layers_block_type", "hybrid_layer_ids", "attention_head_dim", "kv_channels", "chunk_size"),
            *("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
            # of weights: adapters of the shared blocks, and how many such blocks there are
            *("num_mem_blocks", "adapter_rank", "use_shared_attention_adapter", "use_shared_mlp_adapter"),
            *("use_conv_bias", "use_mem_rope", "use_mem_eff_path", "use_shared_block_lora", "lora_rank"),
            "add_bias_linear",
        }
    ),
    model_types=frozenset({"zamba2"}),
    applies=lambda fields: fields.model_type == "zamba2",
    read=_read,
)
