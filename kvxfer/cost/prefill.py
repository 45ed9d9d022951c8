"""The work of a prefill in FLOP, and the time it is assumed to take."""

from __future__ import annotations

from kvxfer.model.shape import ModelShape


def linear_flop(params: float, tokens: int) -> float:
    """FLOP of the matrix products with the weights: one multiplication and one addition per parameter and token."""
    return 2.0 * params * tokens


def attention_flop(shape: ModelShape, tokens: int) -> float:
    """FLOP of causal attention over the prompt: L · heads · (d_k + d_v) · N², so 2 · L · heads · d · N² if both are d.

    QK^T costs 2 · d_k and PV 2 · d_v per head and pair of tokens, and the mask leaves half of the pairs.
    """
    return float(shape.layers * shape.heads * (shape.head_dim_k + shape.head_dim_v)) * tokens**2


def prefill_ms(flop: float, gpus: int, eff_tflops: float) -> float:
    """Milliseconds on `gpus` GPUs that each sustain `eff_tflops` · 10¹² FLOP/s."""
    return flop / (gpus * eff_tflops * 1e12) * 1e3
