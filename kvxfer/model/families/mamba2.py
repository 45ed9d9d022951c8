"""The state of a Mamba-2 layer, which several families of hybrids have."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.model.layers import State, StatePart
from kvxfer.model.recurrence import MAMBA2, Recurrence


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
        """kernel - 1 inputs of x, B and C, and a matrix [head_dim, state] for each head.

        With more tensor-parallel ranks than groups each rank has the B and C of the one group that its heads need, and
        so have others. vLLM does that for a single group, and wants groups that the ranks divide otherwise.
        """
        inputs = self.kernel - 1
        return State(
            (
                StatePart("convolution x", self.heads, self.head_dim * inputs, model_bytes),
                StatePart("convolution B", self.groups, self.state * inputs, model_bytes, shared=True),
                StatePart("convolution C", self.groups, self.state * inputs, model_bytes, shared=True),
            ),
            StatePart("recurrent", self.heads, self.head_dim * self.state, ssm_bytes),
            Recurrence(MAMBA2, self.groups, self.state, self.heads, self.head_dim, self.kernel),
        )
