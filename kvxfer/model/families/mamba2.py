"""The state of a Mamba-2 layer, which several families of hybrids have."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.model.layers import State


@dataclass(frozen=True)
class Mamba2:
    """heads of head_dim elements, groups that share B and C of `state` elements, and the convolution's kernel."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def layer(self, model_bytes: int, ssm_bytes: int) -> State:
        """The last kernel - 1 inputs of the convolution, and head_dim · state elements for each head (vLLM)."""
        return State(self.conv_dim * (self.kernel - 1), model_bytes, self.inner * self.state, ssm_bytes)
