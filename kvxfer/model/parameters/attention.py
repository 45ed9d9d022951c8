"""The weights of attention: K and V per head, or MLA."""

from __future__ import annotations

from kvxfer.model.fields import Fields
from kvxfer.model.layers import FullAttention, Latent, SlidingWindow
from kvxfer.model.parameters.architecture import Architecture
from kvxfer.model.parameters.weights import linear


def attention(fields: Fields, architecture: Architecture, kind: FullAttention, hidden: int) -> int:
    """q, k, v and o with their biases, norms, gate and sinks."""
    heads = kind.query_heads or fields.positive("num_attention_heads")
    query, key = heads * kind.head_dim_k, kind.kv_heads * kind.head_dim_k
    value, out = kind.kv_heads * kind.head_dim_v, heads * kind.head_dim_v
    biased = architecture.biases.apply(fields)
    made = query * (2 if architecture.output_gate else 1) + key + value
    count = linear(hidden, made, biased) + linear(out, hidden, biased and architecture.biases.output)
    count += 2 * kind.head_dim_k if architecture.qk_norm else 0
    count += query + key if architecture.wide_qk_norm else 0
    return count + (heads if architecture.sinks[isinstance(kind, SlidingWindow)] else 0)


def latent_attention(fields: Fields, kind: Latent, hidden: int) -> int:
    """Down to the latents and up again, each with its norm, and the output; perhaps an indexer.

    attention_bias is of what leads down and of the output (transformers).
    """
    heads, biased = fields.positive("num_attention_heads"), fields.flag("attention_bias", False)
    query_rank = fields.count("q_lora_rank")
    query = heads * kind.qk_head_dim
    if query_rank:
        count = linear(hidden, query_rank, biased) + query_rank + linear(query_rank, query)
    else:
        count = linear(hidden, query)
    count += linear(hidden, kind.rank + kind.rope, biased) + kind.rank
    count += linear(kind.rank, heads * (kind.qk_head_dim - kind.rope + kind.v_head_dim))
    count += linear(heads * kind.v_head_dim, hidden, biased)
    return count + (_indexer(kind, hidden, query_rank or hidden) if kind.index_head_dim else 0)


def _indexer(kind: Latent, hidden: int, query_inputs: int) -> int:
    """Queries, one key with a norm that has a bias, and a weight per head."""
    count = linear(query_inputs, kind.index_heads * kind.index_head_dim)
    return count + linear(hidden, kind.index_head_dim + kind.index_heads) + 2 * kind.index_head_dim
