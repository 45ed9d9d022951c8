"""The work of a prefill in FLOP, and the time it is assumed to take."""

from __future__ import annotations

from kvxfer.model.layers import (
    AttentionAndState,
    ChunkedAttention,
    FullAttention,
    Latent,
    LayerKind,
    SlidingWindow,
    State,
)
from kvxfer.model.shape import ModelShape


def linear_flop(params: float, tokens: float) -> float:
    """FLOP of the matrix products with the weights: one multiplication and one addition per parameter and token."""
    return 2.0 * params * tokens


def attention_flop(shape: ModelShape, tokens: float, cached: float = 0.0) -> float:
    """FLOP of causal attention, and of states, over a prompt of `tokens`, of which the first `cached` are not computed.

    QK^T costs 2 · d_k and PV 2 · d_v per head and pair of tokens, and the mask leaves half of the pairs. So a layer of
    full attention costs heads · (d_k + d_v) · N², which is 2 · heads · d · N² if both are d; the computed tokens attend
    to the cached ones too, so N² - cached² in its place. In a window each token attends to at most so many tokens, in a
    chunk to those of its chunk. MLA prefills with heads of qk_head_dim and v_head_dim; an indexer scores every pair,
    and then each token attends to at most index_topk. A state is written and read once for each token, whatever was
    before it, and a gated delta net's read once more to be corrected: 2 FLOP per element each time. Layers of
    multi-token prediction draft tokens, which is no part of it.
    """
    return sum(count * _layer_flop(shape, kind, tokens, cached) for count, kind in shape.prefill_groups())


def attention_formula(shape: ModelShape) -> str:
    """attention_flop in symbols for a prompt of N tokens, none of them cached; empty when it is none."""
    return " + ".join(term for count, kind in shape.prefill_groups() for term in _terms(shape, kind, count))


def prefill_ms(flop: float, gpus: int, eff_tflops: float) -> float:
    """Milliseconds on `gpus` GPUs that each sustain `eff_tflops` · 10¹² FLOP/s."""
    return flop / (gpus * eff_tflops * 1e12) * 1e3


def _layer_flop(shape: ModelShape, kind: LayerKind, tokens: float, cached: float) -> float:
    def attended(within: int | None = None, chunk: int | None = None) -> float:
        return _pairs(tokens, within, chunk) - _pairs(cached, within, chunk)

    if isinstance(kind, AttentionAndState):
        return sum(_layer_flop(shape, part, tokens, cached) for part in (kind.attention, kind.state))
    if isinstance(kind, State):
        return kind.recurrence.flop_per_token * (tokens - cached) if kind.recurrence else 0.0
    if isinstance(kind, Latent):
        attention = 2.0 * shape.heads * (kind.qk_head_dim + kind.v_head_dim) * attended(kind.index_topk or None)
        return attention + 2.0 * kind.index_heads * kind.index_head_dim * attended()
    if not isinstance(kind, FullAttention):
        return 0.0
    per_pair = 2.0 * (kind.query_heads or shape.heads) * (kind.head_dim_k + kind.head_dim_v)
    if isinstance(kind, SlidingWindow):
        return per_pair * attended(within=kind.window)
    return per_pair * attended(chunk=kind.chunk if isinstance(kind, ChunkedAttention) else None)


def _pairs(tokens: float, within: int | None, chunk: int | None) -> float:
    """Pairs of a token and one it attends to: all before it, the last `within`, or those before it in its chunk."""
    if chunk is not None and tokens > chunk:
        whole, rest = divmod(tokens, chunk)
        return (whole * chunk**2 + rest**2) / 2
    if within is not None and tokens > within:
        return within**2 / 2 + (tokens - within) * within
    return tokens**2 / 2


def _terms(shape: ModelShape, kind: LayerKind, layers: int) -> list[str]:
    """What the layers of a kind add to the formula."""
    if isinstance(kind, AttentionAndState):
        return [term for part in (kind.attention, kind.state) for term in _terms(shape, part, layers)]
    if isinstance(kind, State):
        w = kind.recurrence
        return [f"{2 * w.products}·{layers}·{w.heads}·{w.head_dim}·{w.key_dim}·N"] if w else []
    if isinstance(kind, Latent):
        chosen = f" within {kind.index_topk:,} chosen" if kind.index_topk else ""
        indexer = [f"{_product(layers, kind.index_heads, kind.index_head_dim, 0)}·N²"] if kind.index_topk else []
        return [f"{_product(layers, shape.heads, kind.qk_head_dim, kind.v_head_dim)}·N²{chosen}", *indexer]
    if not isinstance(kind, FullAttention):
        return []
    term = f"{_product(layers, kind.query_heads or shape.heads, kind.head_dim_k, kind.head_dim_v)}·N²"
    if isinstance(kind, SlidingWindow):
        return [f"{term} within {kind.window:,}"]
    return [f"{term} in chunks of {kind.chunk:,}" if isinstance(kind, ChunkedAttention) else term]


def _product(layers: int, heads: int, key: int, value: int) -> str:
    if key == value:
        return f"2·{layers}·{heads}·{key}"
    return f"{layers}·{heads}·({key}+{value})" if value else f"{layers}·{heads}·{key}"
