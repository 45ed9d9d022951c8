"""The shape of a model: what the size of its KV cache and the work of its prefill follow from."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.model.dtypes import DType


@dataclass(frozen=True)
class ModelShape:
    """A plain full-attention model (GQA, MHA or MQA): every layer keeps K and V of every token.

    heads are query heads, kv_heads those of K and V, head_dim_* elements per head. Parameters are counts, None when not
    known; params_active are those that work on one token (fewer than params_total in a mixture of experts, else all).
    params_embedding counts the input embedding table plus the output head (once if tied): the tables that do no work
    per prompt token in prefill, since the first is a lookup and the second runs for the last token only.
    notices are sentences a reader of any figure of this model should see.
    """

    name: str
    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    params_total: int | None = None
    params_active: int | None = None
    params_embedding: int | None = None
    notices: tuple[str, ...] = ()

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of one token's K and V over all layers: L · kv_heads · (d_k + d_v) · bytes of an element."""
        return self.layers * self.kv_heads * (self.head_dim_k + self.head_dim_v) * dtype.bytes

    def request_bytes(self, tokens: int, block_size: int, dtype: DType) -> int:
        """Bytes that move for a prompt of `tokens`: whole blocks of `block_size` tokens, the last one padded."""
        return whole_block_tokens(tokens, block_size) * self.kv_bytes_per_token(dtype)


def whole_block_tokens(tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks."""
    return -(-tokens // block_size) * block_size
