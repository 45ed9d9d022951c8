"""The weights of MLPs, and the models in which every layer has the same one."""

from __future__ import annotations

from kvxfer.model.fields import Fields
from kvxfer.model.mlp import Mlp
from kvxfer.model.parameters.weights import NotCountedError, Weights, always, linear

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that speak of a mixture of experts."""


def gated(hidden: int, intermediate: int, bias: bool = False) -> int:
    """Gate, up and down."""
    return linear(hidden, 2 * intermediate, bias) + linear(intermediate, hidden, bias)


def plain(hidden: int, intermediate: int, bias: bool = False) -> int:
    """Up and down."""
    return linear(hidden, intermediate, bias) + linear(intermediate, hidden, bias)


def gated_mlp(hidden: int, intermediate: int, bias: bool = False) -> Weights:
    """A gated MLP that every token passes, of so many columns."""
    return always(gated(hidden, intermediate, bias), Mlp(intermediate))


def plain_mlp(hidden: int, intermediate: int, bias: bool = False) -> Weights:
    """An MLP without a gate."""
    return always(plain(hidden, intermediate, bias), Mlp(intermediate, gated=False))


def gated_mlps(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    return _same(fields, gated_mlp(hidden, fields.positive("intermediate_size")), layers)


def gated_mlps_perhaps_with_biases(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """Of the types that obey mlp_bias."""
    bias = fields.flag("mlp_bias", False)
    return _same(fields, gated_mlp(hidden, fields.positive("intermediate_size"), bias), layers)


def starcoder_mlps(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    bias = fields.flag("use_bias", True)
    return _same(fields, plain_mlp(hidden, fields.positive("intermediate_size"), bias), layers)


def _same(fields: Fields, mlp: Weights, layers: int) -> list[Weights]:
    if any(fields.has(name) for name in EXPERTS):
        raise NotCountedError
    return [mlp] * layers
