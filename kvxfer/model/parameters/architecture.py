"""What a model_type adds to plain attention, an MLP and two norms per layer, whatever else its config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.model.fields import Fields
from kvxfer.model.layers import LayerKind
from kvxfer.model.parameters.weights import Weights

Mlps = Callable[[Fields, int, int], list[Weights]]
"""From the fields, hidden size and number of layers: each layer's MLP or mixture of experts, router included."""

Layers = Callable[[Fields, "Architecture", Sequence[LayerKind], int], list[Weights]]
"""From the fields, the architecture, what each layer keeps and the hidden size: each layer, norms included."""


@dataclass(frozen=True)
class Biases:
    """Whether q, k, v and, unless `output` is off, o have biases: as the field says; absent (or None): the default."""

    field: str | None = None
    default: bool = False
    output: bool = True

    def apply(self, fields: Fields) -> bool:
        return fields.flag(self.field, self.default) if self.field else self.default


@dataclass(frozen=True)
class Architecture:
    """`tied`: whether one table is both embedding and head when tie_word_embeddings is absent (transformers).

    `activation` is the field that names the MLPs', and what it means when absent.
    """

    mlps: Mlps | None = None
    state: Callable[[Fields, int], int] | None = None  # weights of a layer with a state, from the hidden size
    layers: Layers | None = None  # of a type whose layers are not like those of others
    biases: Biases = Biases()
    qk_norm: bool = False  # one weight per element of a head
    wide_qk_norm: bool = False  # one weight per element of all heads
    output_gate: bool = False  # q_proj makes a gate as wide as q
    sinks: tuple[bool, bool] = (False, False)  # one weight per query head, in full and in window layers
    norms: int = 2
    norm_biases: bool = False
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")

    def norm(self, hidden: int) -> int:
        """Weights of one norm."""
        return 2 * hidden if self.norm_biases else hidden
