"""What follows attention in a layer, as wide as a forward pass computes it."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2")
"""Those that are computed, as transformers calls them."""


@dataclass(frozen=True)
class Mlp:
    """An MLP of `columns` that every token passes (dense, or the shared experts), and routed experts beside it.

    Of `experts` of `expert_columns` each, a token passes `per_token`; they work on a latent of so many elements that is
    made of the layer's input (0: on the input itself). Either part may be absent: 0. A gated MLP has three matrices, of
    which the first makes what multiplies the second's; one without a gate has two.
    """

    columns: int = 0
    experts: int = 0
    per_token: int = 0
    expert_columns: int = 0
    latent: int = 0
    gated: bool = True
    activation: str = "silu"

    @property
    def label(self) -> str:
        routed = f"{self.experts} experts of {self.expert_columns:,}, {self.per_token} per token" * bool(self.experts)
        on_a_latent = f" on a latent of {self.latent:,}" * bool(self.experts and self.latent)
        shared = f"MLP of {self.columns:,}" * bool(self.columns)
        parts = " beside an ".join(part for part in (routed + on_a_latent, shared) if part)
        return parts if self.gated or not parts else f"{parts}, {self.activation} without a gate"

    @property
    def matrices(self) -> int:
        """Of the MLP, and of each expert."""
        return 3 if self.gated else 2

    def params(self, hidden: int, own_experts: int) -> int:
        """Elements of the weight matrices where so many of the experts are."""
        routed = self.matrices * own_experts * (self.latent or hidden) * self.expert_columns
        return self.matrices * hidden * self.columns + hidden * (self.experts + 2 * self.latent) + routed


NO_MLP = Mlp()
