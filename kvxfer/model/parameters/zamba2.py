"""Zamba2's layers: Mamba-2 in each, and before some of it one of a few transformer blocks that they share.

A block attends to the layer's input beside the embeddings, so it is twice as wide as the model where it begins. What
the layers that use it have of their own is small: adapters (pairs of narrow matrices beside its own), and a matrix
between block and Mamba-2.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.model.families.zamba2 import read_mamba
from kvxfer.model.fields import Fields
from kvxfer.model.layers import AttentionAndState, FullAttention, LayerKind
from kvxfer.model.parameters.architecture import Architecture
from kvxfer.model.parameters.mlps import gated
from kvxfer.model.parameters.states import mamba2
from kvxfer.model.parameters.weights import Weights, always, linear

ADAPTER_RANK = 128
"""Of a config that does not name it (transformers)."""


def layers(fields: Fields, architecture: Architecture, kinds: Sequence[LayerKind], hidden: int) -> list[Weights]:
    """Each layer. A shared block is in the total once, and active in every layer that uses it."""
    mamba = always(mamba2(read_mamba(fields), hidden, True, _biases(fields)) + architecture.norm(hidden))
    own = always(_adapters(fields, hidden) + linear(hidden, hidden))
    blocks, used, counted = fields.positive("num_mem_blocks", 1), 0, []
    for kind in kinds:
        layer = mamba
        if isinstance(kind, AttentionAndState):
            block = _block(fields, kind.attention, hidden)
            layer += own + Weights(block if used < blocks else 0, block)
            used += 1
        counted.append(layer)
    return counted


def _block(fields: Fields, attention: FullAttention, hidden: int) -> int:
    """Attention from twice the hidden size to the hidden size, an MLP, and their norms."""
    query = fields.positive("num_attention_heads") * attention.head_dim_k
    key_value = attention.kv_heads * (attention.head_dim_k + attention.head_dim_v)
    count = linear(2 * hidden, query + key_value) + linear(query, hidden)
    return count + gated(hidden, _intermediate(fields, hidden), _biases(fields)) + 2 * hidden + hidden


def _adapters(fields: Fields, hidden: int) -> int:
    """Of the MLP's gate and up, and perhaps of q, k and v."""
    rank = fields.positive("adapter_rank", ADAPTER_RANK)
    count = rank * (hidden + 2 * _intermediate(fields, hidden))
    return count + (3 * rank * 4 * hidden if fields.flag("use_shared_attention_adapter", False) else 0)


def _intermediate(fields: Fields, hidden: int) -> int:
    return fields.positive("intermediate_size", 4 * hidden)


def _biases(fields: Fields) -> bool:
    return fields.flag("add_bias_linear", False)
