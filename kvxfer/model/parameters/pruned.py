"""The layers of pruned models: what block_configs says of each layer's attention and MLP.

What is a no-op is not there, and neither is its norm; what is replaced by a linear layer is a square matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.model.fields import Fields, is_inert
from kvxfer.model.layers import FullAttention, LayerKind
from kvxfer.model.parameters.architecture import Architecture
from kvxfer.model.parameters.attention import attention
from kvxfer.model.parameters.mlps import gated, gated_mlps_perhaps_with_biases
from kvxfer.model.parameters.weights import NotCountedError, Weights, always, linear

MULTIPLE = 256
"""ffn_mult makes an intermediate size that is rounded up to a multiple of this."""

UNDERSTOOD = ("no_op", "replace_with_linear", "ffn_mult", "intermediate_size", "hidden_act", "gated")
"""Fields of a block's MLP. Any other that is not switched off may change what it holds."""


def layers(fields: Fields, architecture: Architecture, kinds: Sequence[LayerKind], hidden: int) -> list[Weights]:
    if fields.has("block_configs"):
        blocks = fields.per_layer("block_configs", len(kinds))
        return [
            always(_attention(fields, architecture, kind, block["attention"], hidden) + _mlp(fields, block, hidden))
            for kind, block in zip(kinds, blocks, strict=True)
        ]
    mlps = gated_mlps_perhaps_with_biases(fields, hidden, len(kinds))
    return [
        always(_attention(fields, architecture, kind, {}, hidden) + hidden) + mlp
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]


def _attention(
    fields: Fields, architecture: Architecture, kind: LayerKind, described: Mapping[str, Any], hidden: int
) -> int:
    """Attention or what is in its place, with its norm."""
    if isinstance(kind, FullAttention):
        return attention(fields, architecture, kind, hidden) + hidden
    if described.get("no_op") is True:
        return 0
    if described.get("replace_with_linear") is True:
        return linear(hidden, hidden) + hidden
    raise NotCountedError


def _mlp(fields: Fields, block: Mapping[str, Any], hidden: int) -> int:
    """The MLP or what is in its place, with its norm."""
    described = block.get("ffn")
    if not isinstance(described, Mapping):
        raise NotCountedError
    if described.get("no_op") is True:
        return 0
    if described.get("replace_with_linear") is True:
        return linear(hidden, hidden) + hidden
    unknown = any(name not in UNDERSTOOD and not is_inert(value) for name, value in described.items())
    if unknown or described.get("gated") is False:
        raise NotCountedError
    mlp = Fields(described, fields.source, "block_configs[].ffn.")
    return gated(hidden, _intermediate(mlp, hidden), fields.flag("mlp_bias", False)) + hidden


def _intermediate(mlp: Fields, hidden: int) -> int:
    multiplier = mlp.config.get("ffn_mult")
    if multiplier is None:
        return mlp.positive("intermediate_size")
    if type(multiplier) not in (int, float) or not 0 < multiplier < math.inf:
        mlp.fail("ffn_mult", "is not a number above 0")
    return -(-int(2 * multiplier * hidden / 3) // MULTIPLE) * MULTIPLE
