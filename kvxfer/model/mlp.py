"""What follows attention in a layer, as wide as a forward pass computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mlp:
    """A gated MLP of `columns` that every token passes (dense, or the shared experts), and routed experts beside it.

    Of `experts` of `expert_columns` each, a token passes `per_token`. Either part may be absent: 0.
    """

    columns: int
    experts: int = 0
    per_token: int = 0
    expert_columns: int = 0

    @property
    def label(self) -> str:
        routed = f"{self.experts} experts of {self.expert_columns:,}, {self.per_token} per token" * bool(self.experts)
        shared = f"MLP of {self.columns:,}" * bool(self.columns)
        return " beside an ".join(part for part in (routed, shared) if part)
