"""Causal attention: to all tokens, in windows, in chunks; to keys and values per head, or made of latents (MLA)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvxfer.measure.forward.indexer import Indexer
from kvxfer.measure.forward.making import Making, normed
from kvxfer.model.widths import Attention

Span = tuple[int, int, int]  # tokens start … stop, and the first one that any of them attends to


class PerHead:
    """Attention to K and V per head. Of windows or chunks only pairs in blocks that the mask touches are computed."""

    def __init__(self, making: Making, hidden: int, widths: Attention, tokens: int) -> None:
        self._w = w = widths
        self._query = making.matrix(hidden, w.heads * w.head_dim_k)
        self._gate = making.matrix(hidden, w.heads * w.head_dim_k) if w.output_gate else None
        self._key = making.matrix(hidden, w.kv_heads * w.head_dim_k)
        self._value = making.matrix(hidden, w.kv_heads * w.head_dim_v)
        self._output = making.matrix(w.heads * w.head_dim_v, hidden)
        self._keys = making.zeros(tokens, w.kv_heads, w.head_dim_k)
        self._values = making.zeros(tokens, w.kv_heads, w.head_dim_v)

    def __call__(self, inputs: Tensor, first: int) -> Tensor:
        """What tokens [length, hidden] from `first` on find among themselves and those before them; as many rows."""
        w = self._w
        end = first + inputs.shape[0]
        query = (inputs @ self._query).view(-1, w.heads, w.head_dim_k)
        self._keys[first:end] = (inputs @ self._key).view(-1, w.kv_heads, w.head_dim_k)
        self._values[first:end] = (inputs @ self._value).view(-1, w.kv_heads, w.head_dim_v)
        shared = w.heads // w.kv_heads
        keys = self._keys[:end].repeat_interleave(shared, 1)
        values = self._values[:end].repeat_interleave(shared, 1)
        spans = [_attended(query, keys, values, first, span, w.window) for span in self._spans(first, end)]
        found = torch.cat(spans)
        if self._gate is not None:
            found = found * torch.sigmoid(inputs @ self._gate)
        return found @ self._output

    def _spans(self, first: int, end: int) -> Iterator[Span]:
        w = self._w
        step = w.window or w.chunk or end
        start = first
        while start < end:
            stop = min(end, (start // step + 1) * step)
            yield start, stop, max(0, start - w.window + 1) if w.window else start // step * step
            start = stop


class OfLatents:
    """MLA: keys and values are made of the latents, earlier chunks' too. An indexer may choose which tokens count.

    While there are no more tokens than it chooses, all are attended to. Later ones attend to the latents that were
    chosen for each, which are gathered: queries are turned to the latents' space, as engines do it for that.
    """

    def __init__(self, making: Making, hidden: int, widths: Attention, tokens: int) -> None:
        self._w = w = widths
        self._to_query_rank = making.matrix(hidden, w.query_rank) if w.query_rank else None
        self._query = making.matrix(w.query_rank or hidden, w.heads * w.head_dim_k)
        self._to_latent = making.matrix(hidden, w.rank + w.rope)
        self._unrotated = w.head_dim_k - w.rope
        self._from_latent = making.matrix(w.rank, w.heads * (self._unrotated + w.head_dim_v))
        self._output = making.matrix(w.heads * w.head_dim_v, hidden)
        self._indexer = Indexer(making, hidden, widths, tokens) if w.index_heads else None
        self._latents = making.zeros(tokens, w.rank + w.rope)

    def __call__(self, inputs: Tensor, first: int) -> Tensor:
        """What tokens [length, hidden] from `first` on find among themselves and those before them; as many rows."""
        w = self._w
        end = first + inputs.shape[0]
        asking = inputs if self._to_query_rank is None else normed(inputs @ self._to_query_rank)
        query = (asking @ self._query).view(-1, w.heads, w.head_dim_k)
        made = inputs @ self._to_latent
        self._latents[first:end] = torch.cat([normed(made[:, : w.rank]), made[:, w.rank :]], 1)
        if self._indexer is None:
            return self._to_all(query, first, end) @ self._output
        found, all_until = [], first
        for start, stop, chosen in self._indexer.choices(inputs, asking, first):
            if stop <= w.index_topk:
                all_until = stop
            else:
                found.append(self._to_chosen(query[start - first : stop - first], chosen))
        if all_until > first:
            found.insert(0, self._to_all(query[: all_until - first], first, all_until))
        return torch.cat(found) @ self._output

    def _to_all(self, query: Tensor, first: int, end: int) -> Tensor:
        w = self._w
        latent, rotary = torch.split(self._latents[:end], [w.rank, w.rope], 1)
        made = (latent @ self._from_latent).view(end, w.heads, -1)
        keys = torch.cat([made[..., : self._unrotated], rotary[:, None].expand(-1, w.heads, -1)], 2)
        return _attended(query, keys, made[..., self._unrotated :], first, (first, end, 0))

    def _to_chosen(self, query: Tensor, chosen: Tensor) -> Tensor:
        """Of tokens [length, heads, head_dim_k] to the `chosen` ones of each, [length, index_topk]."""
        w = self._w
        made_of = self._from_latent.view(w.rank, w.heads, -1)
        to_keys, to_values = made_of[..., : self._unrotated], made_of[..., self._unrotated :]
        turned = torch.einsum("thn,rhn->thr", query[..., : self._unrotated], to_keys)
        asking = torch.cat([turned, query[..., self._unrotated :]], 2)
        latents = self._latents[chosen]
        shares = (asking @ latents.transpose(1, 2) * w.head_dim_k**-0.5).softmax(2)
        found = torch.einsum("thr,rhv->thv", shares @ latents[..., : w.rank], to_values)
        return found.reshape(len(chosen), -1)


def _attended(query: Tensor, keys: Tensor, values: Tensor, first: int, span: Span, window: int = 0) -> Tensor:
    """Of the tokens of a span, whose queries are those from `first` on; [stop - start, heads * head_dim_v]."""
    start, stop, low = span
    mask = None
    if low != start or window:
        attending = torch.arange(start, stop, device=query.device)[:, None]
        distance = attending - torch.arange(low, stop, device=query.device)
        mask = (distance >= 0) & (distance < window) if window else distance >= 0
    asking, seen, taken = (
        part.transpose(0, 1)[None] for part in (query[start - first : stop - first], keys[low:stop], values[low:stop])
    )
    found = scaled_dot_product_attention(asking, seen, taken, attn_mask=mask, is_causal=mask is None)
    return found[0].transpose(0, 1).reshape(stop - start, -1)
