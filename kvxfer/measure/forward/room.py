"""The memory that a layer and one pass through it take, and how many tokens its parts work on at once."""

from __future__ import annotations

from kvxfer.model.recurrence import GATED_DELTA, MAMBA2, Recurrence
from kvxfer.model.widths import Attention, Widths

SPANS = {MAMBA2: 128, GATED_DELTA: 64}
"""Tokens of a span: within one, a recurrence is computed as products of all its tokens with one another."""

CHOOSING = 64
"""Tokens whose choice is made, and followed, at once: each has scores of all tokens and latents of the chosen ones."""


def elements(widths: Widths, tokens: int, on_gpu: bool) -> int:
    """The most that is held at once, in elements of the layer's number format."""
    mlp = widths.mlp
    wide = 4 * widths.hidden + 3 * max(mlp.columns, mlp.expert_columns) + mlp.experts + 2 * mlp.latent
    count = widths.params + tokens * wide
    if widths.attention:
        count += _attention(widths.attention, tokens, on_gpu)
    return count + _recurrence(widths.recurrence, tokens, on_gpu) if widths.recurrence else count


def _attention(w: Attention, tokens: int, on_gpu: bool) -> int:
    """A GPU's attention keeps a mask, and no scores."""
    heads = w.heads * (w.head_dim_k * (2 if w.output_gate else 1) + w.head_dim_v)
    count = tokens * 3 * heads + (1 if on_gpu else w.heads) * tokens * tokens
    if not w.index_heads:
        return count
    made = w.index_head_dim * (1 + w.index_heads) + w.index_heads
    scored = (2 * w.index_heads + 2) * tokens
    followed = min(tokens, w.index_topk) * (2 * w.heads + w.rank + w.rope)
    return count + tokens * made + min(tokens, CHOOSING) * (scored + followed)


def _recurrence(w: Recurrence, tokens: int, on_gpu: bool) -> int:
    """Decays, states and what is solved for are in float32, which is two elements of a GPU's format."""
    float32, span = 2 if on_gpu else 1, min(tokens, SPANS[w.rule])
    a_head = 4 * float32 * span + 5 * w.head_dim
    if w.rule == GATED_DELTA:
        a_head += float32 * (2 * span + 4 * (w.head_dim + w.key_dim))
    return 3 * float32 * w.state_elements + tokens * (3 * w.made + w.heads * a_head)
