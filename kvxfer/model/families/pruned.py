"""Pruned models (Llama-Nemotron, DeciLM): layers of their own numbers of KV heads, and layers without attention.

block_configs describes each layer: n_heads_in_group query heads share a KV head, a no-op or a linear layer in place of
attention keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import default_head_dim
from kvxfer.model.fields import Fields, is_inert
from kvxfer.model.layers import FullAttention, LayerKind, NoCache
from kvxfer.model.rules import unknown_field

UNDERSTOOD = ("no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads")
"""Fields of a block's attention. Any other that is not switched off may change the cache."""


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    query = fields.positive("num_attention_heads")
    head_dim = fields.optional("head_dim") or default_head_dim(fields, query)
    kinds = tuple(_kind(kv_heads, head_dim) for kv_heads in _kv_heads(fields, layers, query))
    return Reading(kinds, head_dim, head_dim)


def _kind(kv_heads: int, head_dim: int) -> LayerKind:
    return FullAttention(kv_heads, head_dim, head_dim) if kv_heads else NoCache()


def _kv_heads(fields: Fields, layers: int, query: int) -> list[int]:
    """KV heads of each layer, 0 where there is no attention."""
    if fields.has("block_configs"):
        blocks = fields.per_layer("block_configs", layers)
        return [_heads_of_block(fields, layer, block, query) for layer, block in enumerate(blocks)]
    if not fields.has("num_key_value_heads_per_layer"):
        raise fields.missing("block_configs")
    counts = fields.per_layer("num_key_value_heads_per_layer", layers)
    if not all(type(count) is int and count >= 0 and (not count or query % count == 0) for count in counts):
        fields.fail("num_key_value_heads_per_layer", f"has entries that do not divide num_attention_heads ({query})")
    return list(counts)


def _heads_of_block(fields: Fields, layer: int, block: object, query: int) -> int:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        fields.fail("block_configs", f"does not describe the attention of layer {layer}")
    if attention.get("no_op") is True or attention.get("replace_with_linear") is True:
        return 0
    prefix = f"block_configs[{layer}].attention."
    unknown = [name for name, value in attention.items() if name not in UNDERSTOOD and not is_inert(value)]
    if unknown:
        raise unknown_field(attention, unknown, FAMILY.name, fields.source, prefix)
    return _shared_heads(Fields(attention, fields.source, prefix), query)


def _shared_heads(attention: Fields, query: int) -> int:
    name = "n_heads_in_group" if attention.has("n_heads_in_group") else "num_key_value_heads"
    count = attention.positive(name)
    if query % count:
        attention.fail(name, f"does not divide num_attention_heads ({query})")
    return query // count if name == "n_heads_in_group" else count


def _applies(fields: Fields) -> bool:
    return fields.has("block_configs") or fields.has("num_key_value_heads_per_layer")


FAMILY = Family(
    name="pruned",
    keys=frozenset({"block_configs", "num_key_value_heads_per_layer"}),
    model_types=frozenset({"nemotron-nas", "deci"}),
    applies=_applies,
    read=_read,
)
