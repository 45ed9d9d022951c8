"""The indexer of sparse attention: which tokens each token attends to, by scores of its own over all before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvxfer.measure.forward.making import Making
from kvxfer.measure.forward.room import CHOOSING
from kvxfer.model.widths import Attention


class Indexer:
    """Queries of index_heads, one key for each token, and a weight for each head, which its score above 0 is times.

    Engines compute the scores in fp8; here they are in the layer's number format.
    """

    def __init__(self, making: Making, hidden: int, widths: Attention, tokens: int) -> None:
        self._w = w = widths
        self._query = making.matrix(w.query_rank or hidden, w.index_heads * w.index_head_dim)
        self._key = making.matrix(hidden, w.index_head_dim)
        self._weights = making.matrix(hidden, w.index_heads)
        self._keys = making.zeros(tokens, w.index_head_dim)

    def choices(self, inputs: Tensor, asking: Tensor, first: int) -> Iterator[tuple[int, int, Tensor]]:
        """Blocks of tokens start … stop, and the tokens chosen for each, [stop - start, at most index_topk].

        Those of `first` on have these inputs, and queries are made of `asking`. A block has only tokens before which
        there are fewer than index_topk, for which all are chosen (and later ones, which do not count), or none of them.
        """
        w = self._w
        end = first + inputs.shape[0]
        key = torch.nn.functional.layer_norm(inputs @ self._key, (w.index_head_dim,))
        self._keys[first:end] = key
        query = (asking @ self._query).view(-1, w.index_heads, w.index_head_dim)
        weights = (inputs @ self._weights)[:, None]
        start = first
        while start < end:
            stop = min(end, start + CHOOSING, w.index_topk if start < w.index_topk else end)
            rows = slice(start - first, stop - first)
            scores = (weights[rows] @ torch.relu(query[rows] @ self._keys[:stop].T))[:, 0]
            later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
            yield start, stop, scores.masked_fill(later, -torch.inf).topk(min(w.index_topk, stop), 1).indices
            start = stop
