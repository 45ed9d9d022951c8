"""What one row of a result measures, and the memory, block tables and rank pairs that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvxfer.cache.layout import RankPair, Ranks, Region, rank_pairs
from kvxfer.cache.leaving import Leaving, Weight
from kvxfer.cache.sends import Cut, chunk_ends, send_ends
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.tables import BlockTables, scatter
from kvxfer.cache.wire import Wire, on_the_wire
from kvxfer.errors import UsageError
from kvxfer.model.shape import ModelShape

Op = Literal["push", "pull"]
ComputeKind = Literal["timed", "spin", "layers"]
VerifyMode = Literal["full", "sample", "off"]

MAX_BLOCKS = 1 << 19
"""Of a request: more take longer to place at random than the other side waits for a sign of life."""


@dataclass(frozen=True)
class Row:
    """The request that a row moves again and again."""

    spec: CacheSpec
    backend: str
    op: Op
    tokens: int
    held_blocks: int = 0  # the first ones of the prompt, which decode has already
    fragmentation: float = 1.0
    seed: int = 0
    inflight: int = 1
    options: dict[str, int] = field(default_factory=dict)
    prefill: Ranks = field(default_factory=Ranks)
    decode: Ranks = field(default_factory=Ranks)

    @property
    def shape(self) -> ModelShape:
        return self.spec.shape

    @property
    def id(self) -> str:
        parts = [self.shape.name, self.spec.dtype.name, self.backend, self.op, str(self.tokens)]
        return "/".join(parts)

    @cached_property
    def blocks(self) -> list[int]:
        """Blocks of the request that move in each group. Raises UsageError when there are none."""
        return self.spec.blocks(self.tokens, self.held_blocks)

    @cached_property
    def prefill_regions(self) -> list[Region]:
        return self.spec.regions(self.prefill)

    @cached_property
    def decode_regions(self) -> list[Region]:
        return self.spec.regions(self.decode)

    @cached_property
    def pairs(self) -> list[RankPair]:
        """Who sends what to whom."""
        return rank_pairs(self.prefill_regions, self.decode_regions, self.spec.order)

    def check(self) -> None:
        """Raises UsageError when the cache cannot be cut over the ranks, or when nothing is left to move."""
        for ranks in (self.prefill, self.decode):
            self.spec.regions(ranks)
        most = max(self.spec.blocks(self.tokens, self.held_blocks))
        if most > MAX_BLOCKS:
            raise UsageError(
                f"{self.tokens} tokens in blocks of {self.spec.block_size} are {most} blocks, and a request has at "
                f"most {MAX_BLOCKS} here; raise --block-size or lower --tokens"
            )

    @cached_property
    def wire(self) -> Wire:
        """What goes over between the ranks."""
        return on_the_wire(self.pairs, self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes that the request moves, all rank pairs together."""
        return self.wire.bytes

    @cached_property
    def prefill_bytes(self) -> int:
        """Bytes of the request in the prefill side's memory, all ranks together."""
        return self.side_bytes(self.prefill_regions)

    @cached_property
    def decode_bytes(self) -> int:
        """Bytes of the request in the decode side's memory, all ranks together."""
        return self.side_bytes(self.decode_regions)

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that are read on the prefill side: once what several decode ranks get, not what none gets."""
        slices = {
            replace(one, decode_region=0, decode_block=0, decode_offset=0, decode_stride=0)
            for pair in self.pairs
            for one in pair.slices
        }
        return sum(one.length * one.count * self.blocks[one.group] for one in slices)

    @property
    def layers(self) -> int:
        """Layers that compute the request, whatever they keep."""
        return len(self.spec.kinds)

    def chunk_ends(self, chunk_tokens: int) -> list[list[int]]:
        """Blocks of each group that there are at the end of each chunk of so many tokens."""
        return chunk_ends(self.tokens, chunk_tokens, self.spec.block_size, self.blocks)

    def leaving(self, tokens: int, together: int) -> list[Weight]:
        """What each send of `together` layers would weigh of a prompt of so many tokens in one chunk.

        The decode side holds as large a share of it as of the row's own.
        """
        held = self.held_blocks * tokens // self.tokens
        after = send_ends([range(self.layers)], together)
        (weights,) = self._leaving.sends([self.spec.blocks(tokens, held)], self.fragmentation, after)
        return weights

    @cached_property
    def _leaving(self) -> Leaving:
        return Leaving(self.pairs, self.layers, len(self.spec.limits))

    def side_bytes(self, side: Sequence[Region]) -> int:
        """Bytes of the request in a side's memory, all ranks together."""
        return sum(region.block_bytes * self.blocks[region.group] for region in side)

    def region_bytes(self, side: Sequence[Region], slots: int) -> list[int]:
        """Bytes of each region of a pool with room for so many requests."""
        return [region.block_bytes * self.blocks[region.group] * slots for region in side]


@dataclass(frozen=True)
class Pipelining:
    """What is asked of per-layer pipelining: how requests are cut, and the compute that they hide behind.

    `layer_ns` is what a layer takes for a whole prompt of so many tokens, unless layers are computed; `source` says
    where that comes from.
    """

    cuts: tuple[Cut, ...]
    compute: ComputeKind
    layer_ns: dict[int, int]
    source: str


@dataclass(frozen=True)
class Effort:
    """How much is measured of each row."""

    max_seconds: float = 5.0
    min_samples: int = 20
    setup_repeats: int = 5
    verify: VerifyMode = "full"


def tables(row: Row, slot_count: int) -> list[BlockTables]:
    """Block tables of the requests to cycle through, one for each group of layers.

    At least two requests; disjoint ones where memory for that is needed anyway.
    """
    generations = 2 if slot_count == 1 else 1
    return [
        scatter(blocks, slot_count, generations, row.fragmentation, row.seed + group)
        for group, blocks in enumerate(row.blocks)
    ]
