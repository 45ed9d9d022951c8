"""CacheSpec: how a model's KV cache lies in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvxfer.cache.layout import Order, Part, Ranks, Region, Stages, pipeline_stages, regions
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DType
from kvxfer.model.layers import AttentionAndState, FullAttention, GivenBytes, Latent, LayerKind, State
from kvxfer.model.shape import ModelShape, blocks_of

GIVEN = ("given 1", "given 2")
"""Names of the parts of a layer whose bytes the user gave."""


@dataclass(frozen=True)
class CacheSpec:
    """A paged cache: what each layer keeps, in blocks of block_size tokens.

    With one region per layer the cell holds K and V of a head together (vLLM >= 0.26); with two, each layer has a
    region for K and one for V (vLLM <= 0.25). `order` is that of a block: NHD [token, head, cell] or HND [head, token,
    cell]. Layers that keep the same number of blocks of a request share a block table: a group. Every part of
    a state has a region of its own. `kinds` are what the layers keep, by default what the model says.
    """

    shape: ModelShape
    dtype: DType
    block_size: int = 16
    regions_per_layer: int = 1
    order: Order = "nhd"
    kinds: tuple[LayerKind, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UsageError(f"block size {self.block_size}: a block holds at least one token")
        if self.regions_per_layer not in (1, 2):
            raise UsageError(f"{self.regions_per_layer} regions per layer: 1 (K and V together) or 2 are possible")
        if not self.kinds:
            self.shape.kv_bytes_per_token(self.dtype)  # refuses a dtype that the model's cache cannot have
            object.__setattr__(self, "kinds", self.shape.layer_kinds)

    @cached_property
    def limits(self) -> tuple[int | None, ...]:
        """The most blocks that a request has in each group; None: all of its blocks."""
        found: dict[int | None, None] = {}
        for kind in self.kinds:
            for _, limit in _kept(kind, self.block_size):
                found.setdefault(limit)
        return tuple(found)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What every layer keeps, in the order of layers."""
        found: list[Part] = []
        for layer, kind in enumerate(self.kinds):
            for one, limit in _kept(kind, self.block_size):
                found.extend(self._parts_of(layer, one, self.limits.index(limit)))
        return tuple(found)

    def regions(self, ranks: Ranks) -> list[Region]:
        """The regions of a side. Raises UsageError when layers or heads do not divide over its ranks."""
        return regions(self.parts, self.stages(ranks), ranks, self.order)

    def stages(self, ranks: Ranks) -> Stages:
        """The layers of each pipeline stage of a side. Raises UsageError when there are more stages than layers."""
        drafting = self.shape.mtp_layers
        return pipeline_stages(self.shape.layers - drafting, ranks, drafting)

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block in each region, on the one rank of a side without parallelism."""
        return [region.block_bytes for region in self.regions(Ranks())]

    def _parts_of(self, layer: int, kind: LayerKind, group: int) -> list[Part]:
        if isinstance(kind, FullAttention):
            cells = self._cells(kind)
            names = ("kv",) if len(cells) == 1 else ("k", "v")
            return [
                Part(layer, name, kind.kv_heads, cell, self.block_size, group)
                for name, cell in zip(names, cells, strict=True)
            ]
        if isinstance(kind, Latent):
            key = kind.index_bytes
            latent = Part(layer, "latent", 1, kind.token_bytes(self.dtype) - key, self.block_size, group, True)
            return [latent, *([Part(layer, "index", 1, key, self.block_size, group, True)] if key else [])]
        if isinstance(kind, State):
            return [
                Part(layer, part.name, part.heads, part.head_bytes, 1, group, shared=part.shared, of_state=True)
                for part in kind.parts
            ]
        if isinstance(kind, GivenBytes):
            cell = kind.bytes_per_token // (self.regions_per_layer * kind.shares)
            return [
                Part(layer, name, kind.shares, cell, self.block_size, group) for name in GIVEN[: self.regions_per_layer]
            ]
        raise UsageError(f"layer {layer} ({kind.label}): bench cannot move its cache yet")

    def _cells(self, kind: FullAttention) -> list[int]:
        """Bytes per head and token in each region of a layer."""
        scale = self.dtype.scale_bytes
        k = kind.head_dim_k * self.dtype.bytes + scale
        v = kind.head_dim_v * self.dtype.bytes + scale
        return [k + v] if self.regions_per_layer == 1 else [k, v]

    def blocks(self, tokens: int, held_blocks: int = 0) -> list[int]:
        """Blocks of a request of so many tokens that move in each group; the last one may be partly used.

        The decode side holds the first `held_blocks` already. A window's blocks move as far as they are not among
        them, and a state moves as long as any block does. Raises UsageError when nothing is left to move.
        """
        if tokens < 1:
            raise UsageError(f"{tokens} tokens: a request has at least one")
        every = blocks_of(tokens, self.block_size)
        missing = every - held_blocks
        if missing < 1:
            raise UsageError(
                f"nothing to move: decode holds all {every:,} blocks of {tokens:,} tokens; choose a smaller "
                "--prefix-hit-decode"
            )
        return [missing if limit is None else min(missing, limit) for limit in self.limits]

    def request_bytes(self, tokens: int, held_blocks: int = 0) -> int:
        """Bytes that move for a request of so many tokens, between sides of one rank each."""
        blocks = self.blocks(tokens, held_blocks)
        return sum(blocks[part.group] * part.tokens * part.heads * part.cell for part in self.parts)


def _kept(kind: LayerKind, block_size: int) -> list[tuple[LayerKind, int | None]]:
    """What a layer keeps, each with the most blocks of a request that it keeps (None: all)."""
    if isinstance(kind, AttentionAndState):
        return _kept(kind.attention, block_size) + _kept(kind.state, block_size)
    if isinstance(kind, State):
        return [(kind, 1)]
    return [] if kind.regions(1) == 0 else [(kind, kind.most_blocks(block_size))]


def region_addresses(base: int, region_bytes: list[int]) -> list[int]:
    """Address of each region of a pool that begins at `base`."""
    addresses = []
    for size in region_bytes:
        addresses.append(base)
        base += size
    return addresses
