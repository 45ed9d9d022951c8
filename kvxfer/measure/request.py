"""What one row of a result measures, and the block tables and memory that takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.tables import BlockTables, scatter
from kvxfer.model.shape import ModelShape

Op = Literal["push", "pull"]
VerifyMode = Literal["full", "sample", "off"]


@dataclass(frozen=True)
class Row:
    """The request that a row moves again and again."""

    spec: CacheSpec
    backend: str
    op: Op
    tokens: int
    fragmentation: float = 1.0
    seed: int = 0
    inflight: int = 1
    options: dict[str, int] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        return self.spec.shape

    @property
    def id(self) -> str:
        parts = [self.shape.name, self.spec.dtype.name, self.backend, self.op, str(self.tokens)]
        return "/".join(parts)

    @property
    def bytes(self) -> int:
        return self.spec.request_bytes(self.tokens)


@dataclass(frozen=True)
class Effort:
    """How much is measured of each row."""

    max_seconds: float = 5.0
    min_samples: int = 20
    setup_repeats: int = 5
    verify: VerifyMode = "full"


def tables(row: Row, slot_count: int) -> BlockTables:
    """Block tables of the requests to cycle through: at least two, disjoint while memory for that is needed anyway."""
    generations = 2 if slot_count == 1 else 1
    return scatter(row.spec.blocks(row.tokens), slot_count, generations, row.fragmentation, row.seed)
