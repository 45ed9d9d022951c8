"""How many weights a part of a model has, and how many of them work on a token."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.model.mlp import Mlp


class NotCountedError(Exception):
    """The config holds something of which it does not say how many weights it has."""


@dataclass(frozen=True)
class Weights:
    """Counts: all, and those that work on one token, a shared one as often as it is used.

    `mlp` is the MLP or mixture that is among them (one of no columns: there is none), None where it has another form.
    """

    total: int
    active: int
    mlp: Mlp | None = None

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.total + other.total, self.active + other.active, self.mlp or other.mlp)


def always(count: int, mlp: Mlp | None = None) -> Weights:
    """Weights that work once on every token."""
    return Weights(count, count, mlp)


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Weights of a matrix product."""
    return inputs * outputs + (outputs if bias else 0)
