"""A contender as it is offered to the cases: what it is, and how its processes are started."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import contenders
from environment import Environment

MOVES = "pieces"
LINK = "one buffer"
FLOOR = "floor"


@dataclass(frozen=True)
class Offer:
    """`kind`: it moves the job's pieces between two processes, it moves one buffer again and again (a link test), or
    it is the least that any mover has to do. `transport`: tcp or memory.
    """

    name: str
    module: str
    kind: str
    transport: str
    version: str
    ops: tuple[str, ...] = ("push", "pull")
    python: Path = Path(sys.executable)
    environ: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def is_backend(self, name: str) -> bool:
        """Of kvxfer, with whatever options."""
        return self.name.split(":")[0] == f"kvxfer-{name}"

    @property
    def ours(self) -> bool:
        return self.name.startswith("kvxfer-")


class Side(Protocol):
    """What a contender's module brings as `Side(options, job, role)`; role is prefill or decode.

    open, allocate and connect are called in this order, each on both sides at once. `address` is that of the pool
    once it is allocated, 0 where the contender has none (its bytes are then not checked).
    """

    address: int

    def open(self) -> None: ...
    def allocate(self) -> None: ...
    def connect(self, swap: Callable[[Any], Any]) -> None:
        """Everything that is left until requests can move. swap(mine) returns what the other side gave to its own."""

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        """Move requests first, first + 1, …, count of them one after another: job.request(number) is each.

        Called on both sides at once. The initiator returns when each was posted and confirmed as delivered, in ns of
        the monotonic clock; the other side returns the same if it sees the end too (the later end counts), or None.
        """


def all_offers(environment: Environment) -> list[Offer]:
    """Of every module in contenders/; each has `offers(environment)`."""
    found: list[Offer] = []
    for module in sorted(one.name for one in pkgutil.iter_modules(contenders.__path__)):
        found += importlib.import_module(f"contenders.{module}").offers(environment)
    return found
