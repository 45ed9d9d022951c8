"""What a layer with a recurrent state computes of a token: Mamba-2, or a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass

MAMBA2, GATED_DELTA = "Mamba-2", "gated delta net"
RULES = (MAMBA2, GATED_DELTA)


@dataclass(frozen=True)
class Recurrence:
    """A state of [key_dim, head_dim] for each of `heads`, written and read by keys and queries of `key_heads`.

    Mamba-2 calls keys B, queries C, values x, and key_heads groups. Keys, queries and values pass a causal convolution
    of `kernel` tokens. The rule says how a state is written: it decays and takes a value in, from which a gated delta
    net first takes what the state holds under its key.
    """

    rule: str
    key_heads: int
    key_dim: int
    heads: int
    head_dim: int
    kernel: int

    @property
    def label(self) -> str:
        keys = "groups" if self.rule == MAMBA2 else "key heads"
        return f"{self.rule}, {self.heads} heads of {self.head_dim}, {self.key_heads} {keys} of {self.key_dim}"

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.keys + self.values

    @property
    def scalars(self) -> int:
        """Numbers made of a token for its heads: what each forgets, and in a gated delta net how much it takes in."""
        return self.heads * (1 if self.rule == MAMBA2 else 2)

    @property
    def made(self) -> int:
        """Elements that are made of a token at once: the channels, a gate as wide as the values, and the scalars."""
        return self.channels + self.values + self.scalars

    @property
    def products(self) -> int:
        """How often a token's vector meets the state: to write and to read it, in a delta net to correct it too."""
        return 2 if self.rule == MAMBA2 else 3

    @property
    def state_elements(self) -> int:
        return self.values * self.key_dim

    @property
    def flop_per_token(self) -> int:
        """Of the states, beside the weights: a multiplication and an addition per element and product."""
        return 2 * self.products * self.state_elements

    def params(self, hidden: int) -> int:
        """Elements of its weight matrices."""
        return hidden * (self.made + self.values) + self.kernel * self.channels
