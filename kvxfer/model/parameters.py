"""Counting the parameters of a model from its config.json: the sum of the tensors that a checkpoint holds.

Llama-3.1-8B has 8,030,261,248, 70B 70,553,706,496. Of multimodal models the language model alone is counted, and layers
of multi-token prediction are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.model.experts import mlps
from kvxfer.model.fields import Fields, MissingFieldError
from kvxfer.model.layers import FullAttention, Latent, LayerKind, NoCache, State


@dataclass(frozen=True)
class Parameters:
    """Counts: all, those that work on one token, and those of the embedding table plus the output head (in both)."""

    total: int
    active: int
    embedding: int


@dataclass(frozen=True)
class Architecture:
    """What a model_type adds to plain attention and to two norms per layer, whatever its config says."""

    qkv_bias: bool = False
    qk_norm: bool = False  # one weight per element of a head
    wide_qk_norm: bool = False  # one weight per element of all heads
    optional_biases: bool = False  # obeys attention_bias (q, k, v and o)
    output_gate: bool = False  # q_proj makes a gate as wide as q
    sinks: bool = False  # one weight per query head
    norms: int = 2
    tied: bool = False  # whether one table is both embedding and head when tie_word_embeddings is absent


ARCHITECTURES = {
    "llama": Architecture(optional_biases=True),
    "mistral": Architecture(),
    "mixtral": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), Architecture(qk_norm=True, optional_biases=True)
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        Architecture(qk_norm=True, optional_biases=True, output_gate=True),
    ),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), Architecture()),
    "gpt_oss": Architecture(optional_biases=True, sinks=True),
    "minimax_m2": Architecture(wide_qk_norm=True),
    "llama4_text": Architecture(optional_biases=True),
    "gemma3_text": Architecture(qk_norm=True, norms=4, tied=True),
    "nemotron_h": Architecture(norms=1),
}
"""The types whose parameters are counted. experts.py says what their MLPs are."""


def count_parameters(fields: Fields, kinds: Sequence[LayerKind]) -> Parameters | None:
    """Embedding, head unless tied, per layer attention or state, MLP and norms, and the last norm.

    None when the model_type is not among those counted, or a field that it takes is absent. Raises UsageError when one
    is wrong.
    """
    try:
        return _count(fields, kinds)
    except MissingFieldError:
        return None


def _count(fields: Fields, kinds: Sequence[LayerKind]) -> Parameters | None:
    architecture = ARCHITECTURES.get(fields.model_type)
    hidden = fields.positive("hidden_size")
    feed_forward = mlps(fields, hidden, len(kinds))
    if architecture is None or feed_forward is None:
        return None
    table = fields.positive("vocab_size") * hidden
    tied = fields.config.get("tie_word_embeddings", architecture.tied) is True
    embedding = table if tied else 2 * table
    mixing = sum(_mixing(fields, architecture, kind, hidden) for kind in kinds)
    beside = embedding + hidden + len(kinds) * architecture.norms * hidden + mixing
    total, active = (sum(getattr(mlp, which) for mlp in feed_forward) for which in ("total", "active"))
    return Parameters(beside + total, beside + active, embedding)


def _mixing(fields: Fields, architecture: Architecture, kind: LayerKind, hidden: int) -> int:
    """Parameters of the part of a layer that mixes tokens."""
    if isinstance(kind, NoCache):
        return 0
    if isinstance(kind, Latent):
        return _latent(fields, kind, hidden)
    if isinstance(kind, State):
        return _mamba2(fields, hidden) if fields.model_type == "nemotron_h" else _gated_delta(fields, hidden)
    assert isinstance(kind, FullAttention)
    return _attention(fields, architecture, kind, hidden)


def _attention(fields: Fields, architecture: Architecture, kind: FullAttention, hidden: int) -> int:
    heads = kind.query_heads or fields.positive("num_attention_heads")
    query, key = heads * kind.head_dim_k, kind.kv_heads * kind.head_dim_k
    value, out = kind.kv_heads * kind.head_dim_v, heads * kind.head_dim_v
    count = hidden * (query * (2 if architecture.output_gate else 1) + key + value + out)
    count += 2 * kind.head_dim_k if architecture.qk_norm else 0
    count += query + key if architecture.wide_qk_norm else 0
    count += heads if architecture.sinks else 0
    count += query + key + value if architecture.qkv_bias else 0
    if architecture.optional_biases and fields.config.get("attention_bias") is True:
        count += query + key + value + hidden
    return count


def _latent(fields: Fields, kind: Latent, hidden: int) -> int:
    """Down to the latents and up again, each with its norm, and the output; an indexer's query, key, norm, weights."""
    heads = fields.positive("num_attention_heads")
    query_rank = fields.count("q_lora_rank")
    query = heads * kind.qk_head_dim
    count = hidden * query_rank + query_rank + query_rank * query if query_rank else hidden * query
    count += hidden * (kind.rank + kind.rope) + kind.rank
    count += kind.rank * heads * (kind.qk_head_dim - kind.rope + kind.v_head_dim) + heads * kind.v_head_dim * hidden
    if kind.index_head_dim:
        count += (query_rank or hidden) * kind.index_heads * kind.index_head_dim
        count += hidden * (kind.index_head_dim + kind.index_heads) + 2 * kind.index_head_dim
    return count


def _gated_delta(fields: Fields, hidden: int) -> int:
    """q, k, v and gate in, two weights per head, the convolution, decay and its bias, a norm, and the output."""
    heads, value_dim = fields.positive("linear_num_value_heads"), fields.positive("linear_value_head_dim")
    keys = fields.positive("linear_num_key_heads") * fields.positive("linear_key_head_dim")
    values = heads * value_dim
    convolution = (2 * keys + values) * fields.positive("linear_conv_kernel_dim")
    return hidden * (2 * keys + 2 * values + 2 * heads) + convolution + 2 * heads + value_dim + values * hidden


def _mamba2(fields: Fields, hidden: int) -> int:
    """Gate, x, B, C and dt in, the convolution with its bias, three weights per head, a norm, and the output."""
    heads = fields.positive("mamba_num_heads")
    inner = heads * fields.positive("mamba_head_dim")
    channels = inner + 2 * fields.positive("n_groups") * fields.positive("ssm_state_size")
    convolution = channels * (fields.positive("conv_kernel") + (1 if fields.config.get("use_conv_bias") is True else 0))
    return hidden * (inner + channels + heads) + convolution + 3 * heads + inner + inner * hidden
