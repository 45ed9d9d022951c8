"""The widths of what one device computes of a layer: all of it, or its share in a group that divides each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvxfer.errors import UsageError
from kvxfer.model.layers import ChunkedAttention, FullAttention, Latent, LayerKind, NoCache, SlidingWindow, State
from kvxfer.model.mlp import ACTIVATIONS, NO_MLP, Mlp
from kvxfer.model.recurrence import MAMBA2, Recurrence
from kvxfer.model.shape import ModelShape
from kvxfer.wording import quoted

LARGEST_SHARE = 4096


@dataclass(frozen=True)
class Attention:
    """Heads of K and V, which tokens attend to from all before them, the last `window`, or those of their `chunk`.

    With `rank` > 0 it is MLA: keys and values of the heads are made of a latent of rank + rope elements, and queries of
    one of `query_rank` (0: of the layer's input). An indexer of index_heads of index_head_dim then chooses the
    index_topk tokens that each token attends to. An output gate is as wide as the queries are, and made as they are.
    """

    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    chunk: int = 0
    rank: int = 0
    rope: int = 0
    query_rank: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    output_gate: bool = False

    def params(self, hidden: int) -> int:
        """Elements of its weight matrices."""
        queries = self.heads * self.head_dim_k * (2 if self.output_gate else 1)
        count = (self.query_rank or hidden) * queries + hidden * (self.query_rank + self.heads * self.head_dim_v)
        if not self.rank:
            return count + hidden * self.kv_heads * (self.head_dim_k + self.head_dim_v)
        count += hidden * (self.rank + self.rope)
        count += self.rank * self.heads * (self.head_dim_k - self.rope + self.head_dim_v)
        return count + self._index_params(hidden) if self.index_heads else count

    def _index_params(self, hidden: int) -> int:
        """Queries, one key, and a weight for each head."""
        queries = (self.query_rank or hidden) * self.index_heads * self.index_head_dim
        return queries + hidden * (self.index_head_dim + self.index_heads)


@dataclass(frozen=True)
class Widths:
    """One device's share of a layer: attention or a recurrence, or neither, and what follows it.

    Of the MLP's experts `own_experts` are here: each sees as many tokens as where all of them are.
    """

    hidden: int
    attention: Attention | None = None
    recurrence: Recurrence | None = None
    mlp: Mlp = NO_MLP
    own_experts: int = 0

    @property
    def params(self) -> int:
        """Elements of the weight matrices that are here."""
        mixers = [part.params(self.hidden) for part in (self.attention, self.recurrence) if part is not None]
        return sum(mixers) + self.mlp.params(self.hidden, self.own_experts)


@dataclass(frozen=True)
class Share:
    """What one of `devices` computes of a model: its kinds of layers, in words too, and the kind of each layer."""

    devices: int
    kinds: tuple[Widths, ...]
    labels: tuple[str, ...]
    order: tuple[int, ...]


class _IndivisibleError(Exception):
    """A layer cannot be divided over so many devices."""


def shares(shape: ModelShape, fewest: int = 1) -> list[Share]:
    """The shares of 1 / `fewest` of each layer, 1 / (2 · fewest), … as far as heads and experts divide.

    Raises UsageError when a layer is of a kind that is not computed here, or does not divide even so often.
    """
    for kind in shape.layer_kinds:
        if not _is_computed(kind):
            raise _not_computed(shape, f"it has layers with {kind.label}")
    kinds = list(zip(shape.layer_kinds, shape.mlps, strict=False))
    if shape.mtp_layers or not shape.layers == len(shape.layer_kinds) == len(shape.mlps):
        raise _not_computed(shape, "its MLPs are of no kind that is known here")
    for mlp in shape.mlps:
        if mlp.label and mlp.activation not in ACTIVATIONS:
            raise _not_computed(shape, f"the activation of its MLPs is {quoted(mlp.activation)}")
    found = list(_shares(shape, kinds, fewest))
    if not found:
        raise _not_computed(shape, f"its heads and experts do not divide over {fewest} devices")
    return found


def _is_computed(kind: LayerKind) -> bool:
    if isinstance(kind, State):
        return kind.recurrence is not None
    return isinstance(kind, (FullAttention, Latent, NoCache))


def _shares(shape: ModelShape, layers: list[tuple[LayerKind, Mlp]], fewest: int) -> Iterator[Share]:
    distinct = list(dict.fromkeys(layers))
    labels = tuple("; ".join(filter(None, (_label(kind), mlp.label))) for kind, mlp in distinct)
    order = tuple(distinct.index(layer) for layer in layers)
    devices = fewest
    while devices <= LARGEST_SHARE:
        try:
            kinds = tuple(_widths(shape, kind, mlp, devices) for kind, mlp in distinct)
        except _IndivisibleError:
            return
        yield Share(devices, kinds, labels, order)
        devices *= 2


def _label(kind: LayerKind) -> str:
    """What mixes the tokens of a layer."""
    if isinstance(kind, NoCache):
        return ""
    return kind.recurrence.label if isinstance(kind, State) and kind.recurrence else kind.label


def _widths(shape: ModelShape, kind: LayerKind, mlp: Mlp, devices: int) -> Widths:
    """One device's widths of a layer. Raises _IndivisibleError."""
    attention = recurrence = None
    if isinstance(kind, (FullAttention, Latent)):
        attention = _attention(shape, kind, devices)
    elif isinstance(kind, State) and kind.recurrence:
        recurrence = _recurrence(kind.recurrence, devices)
    own_experts = _part(mlp.experts, devices)
    mlp = replace(mlp, columns=_part(mlp.columns, devices))
    return Widths(shape.hidden_size, attention, recurrence, mlp, own_experts)


def _attention(shape: ModelShape, kind: FullAttention | Latent, devices: int) -> Attention:
    """A latent and its indexer are on every device."""
    if isinstance(kind, Latent):
        heads = _part(shape.heads, devices)
        return Attention(
            heads,
            heads,
            kind.qk_head_dim,
            kind.v_head_dim,
            rank=kind.rank,
            rope=kind.rope,
            query_rank=shape.query_rank,
            index_heads=kind.index_heads,
            index_head_dim=kind.index_head_dim,
            index_topk=kind.index_topk,
        )
    heads, kv_heads = _part(kind.query_heads or shape.heads, devices), _shared_part(kind.kv_heads, devices)
    if heads % kv_heads:
        raise _IndivisibleError
    return Attention(
        heads,
        kv_heads,
        kind.head_dim_k,
        kind.head_dim_v,
        window=kind.window if isinstance(kind, SlidingWindow) else 0,
        chunk=kind.chunk if isinstance(kind, ChunkedAttention) else 0,
        output_gate=shape.output_gate,
    )


def _recurrence(whole: Recurrence, devices: int) -> Recurrence:
    """More devices than groups of Mamba-2 have each the one that their heads need, as engines have it."""
    heads = _part(whole.heads, devices)
    key_heads = (_shared_part if whole.rule == MAMBA2 else _part)(whole.key_heads, devices)
    if heads % key_heads:
        raise _IndivisibleError
    return replace(whole, heads=heads, key_heads=key_heads)


def _part(count: int, devices: int) -> int:
    if count % devices:
        raise _IndivisibleError
    return count // devices


def _shared_part(count: int, devices: int) -> int:
    """Of what several devices may have the same one of."""
    if count % devices and devices % count:
        raise _IndivisibleError
    return max(1, count // devices)


def _not_computed(shape: ModelShape, why: str) -> UsageError:
    return UsageError(
        f"the layers of {shape.name} cannot be computed here: {why}; only attention (windows, chunks, MLA, an indexer "
        "too), Mamba-2, gated delta nets, MLPs with or without a gate and routed experts are"
    )
