"""Counting the parameters of dense models from their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """What a dense architecture adds to a LLaMA block whatever its config says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    optional_biases: bool = False  # obeys attention_bias (q, k, v and o) and mlp_bias


DENSE = {
    "llama": Architecture(optional_biases=True),
    "mistral": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True, optional_biases=True),
}

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Parameters:
    """Counts: all of them, and those of the embedding table plus the output head (see ModelShape)."""

    total: int
    embedding: int


def count_parameters(
    config: Mapping[str, Any],
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positive: Callable[[str], int],
) -> Parameters:
    """Parameters of a model_type in DENSE: embedding, head unless tied, per layer attention, gated MLP and norms.

    The sum of the tensors that the published checkpoints hold: Llama-3.1-8B 8,030,261,248, 70B 70,553,706,496.
    `positive` reads a positive integer field of the config and raises UsageError when it is not one.
    """
    architecture = DENSE[config["model_type"]]
    intermediate = positive("intermediate_size")
    table = positive("vocab_size") * hidden
    embedding = table if config.get("tie_word_embeddings") is True else 2 * table

    q, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * q + 2 * hidden * kv
    mlp = 3 * hidden * intermediate
    norms = 2 * hidden + (2 * head_dim if architecture.qk_norm else 0)
    biases = q + 2 * kv if architecture.qkv_bias else 0
    if architecture.optional_biases:
        biases += q + 2 * kv + hidden if config.get("attention_bias") is True else 0
        biases += 2 * intermediate + hidden if config.get("mlp_bias") is True else 0
    return Parameters(embedding + layers * (attention + mlp + norms + biases) + hidden, embedding)
