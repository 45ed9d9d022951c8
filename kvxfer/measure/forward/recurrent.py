"""Layers with a recurrent state, Mamba-2 and gated delta nets, in spans of tokens: plain torch operations, not fused.

Within a span each token meets those before it as in attention, by products of the whole span; from span to span the
state is carried. That is how engines compute a prompt too, in kernels of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, silu, softplus

from kvxfer.measure.forward.making import Making, normed
from kvxfer.measure.forward.room import SPANS
from kvxfer.model.recurrence import MAMBA2, Recurrence


class Recurrent:
    """What mixes the tokens of a layer with a state, which it keeps with the convolution's last inputs."""

    def __init__(self, making: Making, hidden: int, widths: Recurrence) -> None:
        self._w = w = widths
        self._into = making.matrix(hidden, w.made)
        self._taps = making.matrix(w.kernel, w.channels)
        self._output = making.matrix(w.values, hidden)
        options = making.options | {"dtype": torch.float32}
        self._forgetting = torch.linspace(0.1, 1, w.heads, **options)
        self._inputs = making.zeros(w.kernel - 1, w.channels)
        self._state = torch.zeros(w.key_heads, w.heads // w.key_heads, w.key_dim, w.head_dim, **options)

    def __call__(self, inputs: Tensor, first: int) -> Tensor:
        """Of tokens [length, hidden] from `first` on, those before which have passed already; as many rows."""
        w = self._w
        if not first:
            self._inputs.zero_()
            self._state.zero_()
        channels, gate, scalars = torch.split(inputs @ self._into, [w.channels, w.values, w.scalars], 1)
        query, key, value = torch.split(silu(self._convolved(channels)), [w.keys, w.keys, w.values], 1)
        query, key = (part.view(-1, w.key_heads, w.key_dim) for part in (query, key))
        value, gate = (part.view(-1, w.heads, w.head_dim) for part in (value, gate))
        if w.rule == MAMBA2:
            step = softplus(scalars.float())
            taken = self._passed(query, key, value * step[..., None].to(value.dtype), -step * self._forgetting)
            made = normed(((taken + value) * silu(gate)).reshape(-1, w.key_heads, w.values // w.key_heads))
        else:
            take, forget = scalars.float().chunk(2, 1)
            query, key = normalize(query, dim=-1) * w.key_dim**-0.5, normalize(key, dim=-1)
            forgotten = -softplus(forget) * self._forgetting
            made = normed(self._passed(query, key, value, forgotten, torch.sigmoid(take))) * silu(gate)
        return made.reshape(-1, w.values) @ self._output

    def _convolved(self, channels: Tensor) -> Tensor:
        """Each channel, over `kernel` tokens."""
        inputs = torch.cat([self._inputs, channels])
        self._inputs = inputs[len(channels) :].clone()
        found = inputs[: len(channels)] * self._taps[0]
        for tap in range(1, self._w.kernel):
            found = found + inputs[tap : tap + len(channels)] * self._taps[tap]
        return found

    def _passed(
        self, query: Tensor, key: Tensor, value: Tensor, forgotten: Tensor, take: Tensor | None = None
    ) -> Tensor:
        """What the queries read, [length, heads, head_dim]; the state is then that after the last token.

        query, key [length, key_heads, key_dim]; value [length, heads, head_dim]; forgotten, the logarithm of what is
        left of a state, and in a gated delta net `take`, the share of a value that is taken in, [length, heads].
        """
        length, span = len(value), min(len(value), SPANS[self._w.rule])
        query, key = (self._in_spans(part[:, :, None], span) for part in (query, key))
        value = self._in_spans(self._by_key_heads(value), span)
        since = self._in_spans(self._by_key_heads(forgotten[..., None]), span).cumsum(-2)
        later = torch.ones(span, span, dtype=torch.bool, device=value.device).triu(1)
        between = (since - since.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
        corrected = None
        if take is not None:
            taken = self._in_spans(self._by_key_heads(take[..., None]), span)
            value, corrected = _solved(key, value, since, between, taken)
        left, reach = (since[..., -1:, :] - since).exp().to(value.dtype), since[..., -1:, :].exp()
        across = []
        values = []
        for one in range(len(value)):
            state = self._state.to(value.dtype)
            new = value[one] if corrected is None else value[one] - corrected[one] @ state
            across.append(query[one] @ state)
            values.append(new)
            self._state = self._state * reach[one] + (key[one].transpose(-1, -2) @ (new * left[one])).float()
        within = (query @ key.transpose(-1, -2) * between.to(value.dtype)) @ torch.stack(values)
        found = within + torch.stack(across) * since.exp().to(value.dtype)
        return found.permute(0, 3, 1, 2, 4).reshape(-1, self._w.heads, self._w.head_dim)[:length]

    def _by_key_heads(self, part: Tensor) -> Tensor:
        return part.reshape(len(part), self._w.key_heads, -1, part.shape[-1])

    def _in_spans(self, part: Tensor, span: int) -> Tensor:
        """[length, key_heads, heads of each, elements], filled up with zeros, as [spans, …, span, elements]."""
        filled = pad(part, (0, 0, 0, 0, 0, 0, 0, -len(part) % span))
        return filled.reshape(-1, span, *part.shape[1:]).permute(0, 2, 3, 1, 4)


def _solved(key: Tensor, value: Tensor, since: Tensor, between: Tensor, take: Tensor) -> tuple[Tensor, Tensor]:
    """What each token of a span writes, given that those before it in the span write too.

    The first is what it writes where the state before the span is empty; the second times that state is what it writes
    less otherwise. Both solve one triangular system for each head and span, in float32.
    """
    key = key.float()
    meets = (key @ key.transpose(-1, -2) * between * take).tril(-1)
    written = torch.cat([value.float() * take, key * take * since.exp()], -1)
    solved = torch.linalg.solve_triangular(meets, written, upper=False, unitriangular=True).to(value.dtype)
    return solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
