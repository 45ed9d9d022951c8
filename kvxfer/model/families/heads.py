"""Query heads, KV heads and their sizes, as most configs name them."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.model.fields import Fields
from kvxfer.model.layers import FullAttention


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, and elements per head."""

    query: int
    kv: int
    head_dim: int

    def full(self, head_dim_v: int | None = None) -> FullAttention:
        return FullAttention(self.kv, self.head_dim, head_dim_v or self.head_dim)


def read_heads(fields: Fields) -> Heads:
    """num_attention_heads, num_key_value_heads (absent: as many) and head_dim (absent: hidden_size / heads)."""
    query, kv = read_head_counts(fields)
    return Heads(query, kv, fields.optional("head_dim") or default_head_dim(fields, query))


def read_head_counts(fields: Fields) -> tuple[int, int]:
    """Query heads and KV heads, the latter absent: as many."""
    query = fields.positive("num_attention_heads")
    kv = fields.positive("num_key_value_heads", query)
    if query % kv:
        fields.fail("num_key_value_heads", f"does not divide num_attention_heads ({query})")
    return query, kv


def default_head_dim(fields: Fields, heads: int) -> int:
    """The head size of a config that does not name it."""
    hidden = fields.positive("hidden_size")
    if hidden % heads:
        fields.fail("num_attention_heads", f"does not divide hidden_size ({hidden}), and there is no head_dim")
    return hidden // heads
