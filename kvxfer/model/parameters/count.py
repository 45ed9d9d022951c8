"""Counting the parameters of a model from its config.json: the sum of the tensors that a checkpoint holds.

Llama-3.1-8B has 8,030,261,248, 70B 70,553,706,496. The biases with which DeepSeek's and others' routers balance their
experts are among them (transformers keeps them as buffers), rotary tables are not. Of multimodal models the language
model alone is counted, and layers of multi-token prediction are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvxfer.model.fields import Fields, MissingFieldError
from kvxfer.model.layers import FullAttention, Latent, LayerKind, NoCache, State
from kvxfer.model.mlp import NO_MLP, Mlp
from kvxfer.model.parameters.architecture import Architecture
from kvxfer.model.parameters.attention import attention, latent_attention
from kvxfer.model.parameters.model_types import ARCHITECTURES
from kvxfer.model.parameters.weights import NotCountedError, Weights, always


@dataclass(frozen=True)
class Parameters:
    """Counts: all, those that work on one token, and those of the embedding table plus the output head (in both).

    In a mixture of experts fewer work on a token than there are. Where layers share a block (Zamba2) it is in the total
    once and active once for each of them, so more may work than there are: 2 · active is the work of a token, in FLOP.
    mlps are those of the layers in order; none where one of them has another form, or where layers share some.
    output_gate: whether attention's queries make a gate of its output beside them.
    """

    total: int
    active: int
    embedding: int
    mlps: tuple[Mlp, ...] = ()
    output_gate: bool = False


def count_parameters(fields: Fields, kinds: Sequence[LayerKind]) -> Parameters | None:
    """Embedding, head unless tied, per layer attention or state, MLP and norms, and the last norm.

    None when the model_type is not among those counted, or its config does not determine the count. Raises UsageError
    when a field is wrong.
    """
    architecture = ARCHITECTURES.get(fields.model_type)
    if architecture is None:
        return None
    try:
        return _count(fields, architecture, kinds)
    except (MissingFieldError, NotCountedError):
        return None


def _count(fields: Fields, architecture: Architecture, kinds: Sequence[LayerKind]) -> Parameters:
    hidden = fields.positive("hidden_size")
    table = fields.positive("vocab_size") * hidden
    embedding = table if fields.flag("tie_word_embeddings", architecture.tied) else 2 * table
    layers = (architecture.layers or _layers)(fields, architecture, kinds, hidden)
    all_of_it = sum(layers, start=always(embedding + architecture.norm(hidden)))
    activation = _activation(fields, *architecture.activation)
    mlps = tuple(_with(activation, layer.mlp) for layer in layers if layer.mlp is not None)
    known = mlps if len(mlps) == len(layers) else ()
    return Parameters(all_of_it.total, all_of_it.active, embedding, known, architecture.output_gate)


def _with(activation: str, mlp: Mlp) -> Mlp:
    return mlp if mlp == NO_MLP else replace(mlp, activation=activation)


def _activation(fields: Fields, field: str, default: str) -> str:
    """What stands between the matrices of the MLPs, as the config names it."""
    named = fields.config.get(field)
    return default if named is None else str(named)


def _layers(fields: Fields, architecture: Architecture, kinds: Sequence[LayerKind], hidden: int) -> list[Weights]:
    """Layers of a mixer of tokens, an MLP, and norms."""
    if architecture.mlps is None:
        raise NotCountedError
    mlps = architecture.mlps(fields, hidden, len(kinds))
    norms = architecture.norms * architecture.norm(hidden)
    mixers = {kind: _mixer(fields, architecture, kind, hidden) for kind in set(kinds)}
    return [always(mixers[kind] + norms) + mlp for kind, mlp in zip(kinds, mlps, strict=True)]


def _mixer(fields: Fields, architecture: Architecture, kind: LayerKind, hidden: int) -> int:
    """Weights of the part of a layer that mixes tokens."""
    if isinstance(kind, NoCache):
        return 0
    if isinstance(kind, Latent):
        return latent_attention(fields, kind, hidden)
    if isinstance(kind, State) and architecture.state:
        return architecture.state(fields, hidden)
    if isinstance(kind, FullAttention):
        return attention(fields, architecture, kind, hidden)
    raise NotCountedError
