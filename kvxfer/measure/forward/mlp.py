"""What follows attention: an MLP that every token passes, with or without a gate, and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvxfer.measure.forward.making import Making
from kvxfer.model.mlp import Mlp

_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu2": lambda made: functional.relu(made).square(),
}


class Feed:
    """The MLP and the experts that are here. Experts are computed one after another, where engines group them."""

    def __init__(self, making: Making, hidden: int, mlp: Mlp, own_experts: int) -> None:
        self._mlp = mlp
        self._activation = ACTIVATIONS[mlp.activation]
        self._dense = self._matrices(making, hidden, mlp.columns) if mlp.columns else None
        if mlp.experts:
            inner = mlp.latent or hidden
            self._router = making.matrix(hidden, mlp.experts)
            self._latent = (making.matrix(hidden, inner), making.matrix(inner, hidden)) if mlp.latent else None
            self._experts = [self._matrices(making, inner, mlp.expert_columns) for _ in range(own_experts)]

    def __call__(self, inputs: Tensor) -> Tensor:
        """What is added to tokens of these inputs, [length, hidden]."""
        if not self._mlp.experts:
            return self._passed(inputs, self._dense) if self._dense else torch.zeros_like(inputs)
        routed = self._routed(inputs)
        return routed + self._passed(inputs, self._dense) if self._dense else routed

    def _matrices(self, making: Making, hidden: int, columns: int) -> tuple[Tensor, ...]:
        """Down from the columns, up to them, and the gate's where there is one."""
        into = [making.matrix(hidden, columns) for _ in range(self._mlp.matrices - 1)]
        return making.matrix(columns, hidden), *into

    def _passed(self, inputs: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
        down, up, *gate = matrices
        if not gate:
            return self._activation(inputs @ up) @ down
        return (self._activation(inputs @ gate[0]) * (inputs @ up)) @ down

    def _routed(self, inputs: Tensor) -> Tensor:
        """What the experts here add: each computes the tokens of which it is among the per_token that score highest."""
        scores, chosen = (inputs @ self._router).topk(self._mlp.per_token, 1)
        shares = scores.softmax(1)
        given = inputs @ self._latent[0] if self._latent else inputs
        found = torch.zeros_like(given)
        for number, matrices in enumerate(self._experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                found.index_add_(0, rows, self._passed(given[rows], matrices) * shares[rows, places, None])
        return found @ self._latent[1] if self._latent else found
