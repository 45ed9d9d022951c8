"""Llama-4: most layers attend within chunks of the prompt. vLLM keeps every token in all of them by default."""

from __future__ import annotations

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import read_heads
from kvxfer.model.fields import Fields
from kvxfer.model.layers import ChunkedAttention

NOPE_INTERVAL = 4
"""Every fourth layer of Llama-4 has no rotary positions and attends to the whole prompt (transformers' default)."""

FULL, CHUNKED = "full_attention", "chunked_attention"


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    heads = read_heads(fields)
    full = heads.full()
    chunk = fields.positive("attention_chunk_size")
    chunked = ChunkedAttention(full.kv_heads, full.head_dim_k, full.head_dim_v, chunk=chunk)
    kinds = tuple(chunked if is_chunked else full for is_chunked in _chunked_layers(fields, layers))
    return Reading(kinds, full.head_dim_k, full.head_dim_v)


def _chunked_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers attend within chunks."""
    if fields.has("layer_types"):
        kinds = fields.per_layer("layer_types", layers)
        if any(kind not in (FULL, CHUNKED) for kind in kinds):
            fields.fail("layer_types", f"names layers other than {FULL} and {CHUNKED}")
        return [kind == CHUNKED for kind in kinds]
    if fields.has("no_rope_layers"):  # 1 where there are rotary positions
        rotary = fields.per_layer("no_rope_layers", layers)
        if any(entry not in (0, 1) for entry in rotary):
            fields.fail("no_rope_layers", "has entries other than 0 and 1")
        return [entry == 1 for entry in rotary]
    interval = fields.positive("no_rope_layer_interval", NOPE_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(layers)]


FAMILY = Family(
    name="chunked_attention",
    keys=frozenset({"attention_chunk_size", "layer_types"}),
    model_types=frozenset({"llama4_text"}),
    applies=lambda fields: fields.has("attention_chunk_size"),
    read=_read,
)
