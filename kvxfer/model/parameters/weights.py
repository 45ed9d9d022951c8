"""How many weights a part of a model has, and how many of them work on a token."""

from __future__ import annotations

from dataclasses import dataclass


class NotCountedError(Exception):
    """The config holds something of which it does not say how many weights it has."""


@dataclass(frozen=True)
class Weights:
    """Counts: all, and those that work on one token, a shared one as often as it is used."""

    total: int
    active: int

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.total + other.total, self.active + other.active)


def always(count: int) -> Weights:
    """Weights that work once on every token."""
    return Weights(count, count)


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Weights of a matrix product."""
    return inputs * outputs + (outputs if bias else 0)
