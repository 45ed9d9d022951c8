"""One layer: what mixes its tokens, and what follows it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvxfer.measure.forward.attention import OfLatents, PerHead
from kvxfer.measure.forward.making import Making, normed
from kvxfer.measure.forward.mlp import Feed
from kvxfer.measure.forward.recurrent import Recurrent
from kvxfer.model.widths import Widths


class Layer:
    """A layer of random weights, and room for what it keeps of a prompt of so many tokens."""

    def __init__(self, making: Making, widths: Widths, tokens: int) -> None:
        self.mixer = _mixer(making, widths, tokens)
        has_mlp = widths.mlp.columns or widths.mlp.experts
        self.feed = Feed(making, widths.hidden, widths.mlp, widths.own_experts) if has_mlp else None

    def forward(self, hidden: Tensor, first: int) -> Tensor:
        """The layer of tokens [length, hidden] from `first` on, which see those before them too."""
        if self.mixer is not None:
            hidden = hidden + self.mixer(normed(hidden), first)
        return hidden if self.feed is None else hidden + self.feed(normed(hidden))


def _mixer(making: Making, widths: Widths, tokens: int) -> Callable[[Tensor, int], Tensor] | None:
    attention, recurrence = widths.attention, widths.recurrence
    if attention is not None:
        return (OfLatents if attention.rank else PerHead)(making, widths.hidden, attention, tokens)
    return Recurrent(making, widths.hidden, recurrence) if recurrence is not None else None
