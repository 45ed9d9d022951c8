"""What a family's reader is: a rule to know its models by, the fields it understands, and a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.model.fields import Fields
from kvxfer.model.layers import LayerKind


@dataclass(frozen=True)
class Reading:
    """The layers in order, and what a layer of multi-token prediction keeps (None: the config does not tell).

    head_dim_k, head_dim_v and naive_head_dim are ModelShape's. Notices are sentences, without the model's name.
    """

    kinds: tuple[LayerKind, ...]
    head_dim_k: int
    head_dim_v: int
    mtp: LayerKind | None = None
    naive_head_dim: int | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """`read` raises UsageError that names a field when the config does not determine the cache.

    `keys` are the fields, beyond the common ones, that it understands; `model_types` those whose configs are known to
    mean what it takes them to mean: no family that does not list a type reads it when another does.
    """

    name: str
    keys: frozenset[str]
    model_types: frozenset[str]
    applies: Callable[[Fields], bool]
    read: Callable[[Fields], Reading]
