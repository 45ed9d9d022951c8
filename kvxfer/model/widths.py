"""The widths of what one device computes of a layer: all of it, or its share in a group that divides each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.model.layers import ChunkedAttention, FullAttention, Latent, LayerKind, SlidingWindow
from kvxfer.model.mlp import Mlp
from kvxfer.model.shape import ModelShape

LARGEST_SHARE = 4096


@dataclass(frozen=True)
class Widths:
    """One device's share of a layer: attention of `heads`, a gated MLP of `columns`, and experts of the layer's.

    With `rank` > 0 it is MLA: keys and values of the heads are made of a latent of rank + rope elements, and queries of
    one of `query_rank` (0: of the layer's input). Tokens attend to all before them, to the last `window`, or to those
    of their `chunk`. Of `experts` that a token may be routed to, to `per_token` of them, `own_experts` are here: each
    sees as many tokens as where all of them are.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    columns: int = 0
    window: int = 0
    chunk: int = 0
    rank: int = 0
    rope: int = 0
    query_rank: int = 0
    experts: int = 0
    own_experts: int = 0
    per_token: int = 0
    expert_columns: int = 0

    @property
    def params(self) -> int:
        """Elements of the weight matrices that are here."""
        queries, keys, values = (
            self.heads * self.head_dim_k,
            self.kv_heads * self.head_dim_k,
            self.kv_heads * self.head_dim_v,
        )
        attention = self.hidden * self.heads * self.head_dim_v
        if self.query_rank:
            attention += self.query_rank * (self.hidden + queries)
        else:
            attention += self.hidden * queries
        if self.rank:
            made = self.heads * (self.head_dim_k - self.rope + self.head_dim_v)
            attention += self.hidden * (self.rank + self.rope) + self.rank * made
        else:
            attention += self.hidden * (keys + values)
        routed = self.hidden * (self.experts + 3 * self.own_experts * self.expert_columns)
        return attention + 3 * self.hidden * self.columns + routed


@dataclass(frozen=True)
class Share:
    """What one of `devices` computes of a model: its kinds of layers, in words too, and the kind of each layer."""

    devices: int
    kinds: tuple[Widths, ...]
    labels: tuple[str, ...]
    order: tuple[int, ...]


def shares(shape: ModelShape, fewest: int = 1) -> list[Share]:
    """The shares of 1 / `fewest` of each layer, 1 / (2 · fewest), … as far as heads and experts divide.

    Raises UsageError when a layer is of a kind that is not computed here, or does not divide even so often.
    """
    kinds = list(zip(shape.layer_kinds, shape.mlps, strict=False))
    if shape.mtp_layers or not shape.layers == len(shape.layer_kinds) == len(shape.mlps):
        raise _not_computed(shape, "its MLPs are of no kind that is known here")
    found = list(_shares(shape, kinds, fewest))
    if not found:
        raise _not_computed(shape, f"its heads and experts do not divide over {fewest} devices")
    return found


def _shares(shape: ModelShape, layers: list[tuple[LayerKind, Mlp]], fewest: int) -> Iterator[Share]:
    distinct = list(dict.fromkeys(layers))
    labels = tuple(f"{kind.label}; {mlp.label}" for kind, mlp in distinct)
    order = tuple(distinct.index(layer) for layer in layers)
    devices = fewest
    while devices <= LARGEST_SHARE:
        kinds = [_widths(shape, kind, mlp, devices) for kind, mlp in distinct]
        whole = [one for one in kinds if one is not None]
        if len(whole) < len(kinds):
            return
        yield Share(devices, tuple(whole), labels, order)
        devices *= 2


def _widths(shape: ModelShape, kind: LayerKind, mlp: Mlp, devices: int) -> Widths | None:
    """One device's widths of a layer; None where it does not divide."""
    heads, latent = shape.heads, {}
    if isinstance(kind, Latent) and not kind.index_heads:
        kv_heads, key, value = heads, kind.qk_head_dim, kind.v_head_dim
        latent = {"rank": kind.rank, "rope": kind.rope, "query_rank": shape.query_rank}
    elif isinstance(kind, FullAttention):
        heads = kind.query_heads or heads
        kv_heads, key, value = kind.kv_heads, kind.head_dim_k, kind.head_dim_v
    else:
        raise _not_computed(shape, f"it has layers with {kind.label}")
    if heads % devices or (kv_heads % devices and devices % kv_heads) or mlp.experts % devices:
        return None
    if mlp.columns % devices or (heads // devices) % max(1, kv_heads // devices):
        return None
    return Widths(
        hidden=shape.hidden_size,
        heads=heads // devices,
        kv_heads=max(1, kv_heads // devices),
        head_dim_k=key,
        head_dim_v=value,
        columns=mlp.columns // devices,
        window=kind.window if isinstance(kind, SlidingWindow) else 0,
        chunk=kind.chunk if isinstance(kind, ChunkedAttention) else 0,
        experts=mlp.experts,
        own_experts=mlp.experts // devices,
        per_token=mlp.per_token,
        expert_columns=mlp.expert_columns,
        **latent,
    )


def _not_computed(shape: ModelShape, why: str) -> UsageError:
    return UsageError(
        f"the layers of {shape.name} cannot be computed here: {why}; only attention (windows, chunks and MLA too) with "
        "a gated MLP or routed experts is"
    )
