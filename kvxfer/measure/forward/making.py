"""What the parts of a layer are made of: random weights, and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Making:
    """Random weights on one device in one number format; `elements` counts those of its matrices."""

    def __init__(self, options: dict[str, Any], generator: torch.Generator) -> None:
        self.options = options
        self.elements = 0
        self._generator = generator

    def matrix(self, rows: int, columns: int) -> Tensor:
        """One that makes of a row of `rows` elements another of `columns`, of about the same size."""
        self.elements += rows * columns
        return torch.randn(rows, columns, generator=self._generator, **self.options).div_(rows**0.5)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, **self.options)


def normed(hidden: Tensor) -> Tensor:
    """Root-mean-square norm; torch has one of its own only from 2.4 on."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
