"""One thread copying the same pieces within one process: in anonymous memory, and in that of every kvxfer backend
that moves data only within memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from environment import Environment
from job import Job
from offer import FLOOR, Offer


def offers(_: Environment) -> list[Offer]:
    from kvxfer import _native

    kinds = {"memcpy": "null"}
    for name, _summary in _native.backends():
        if _native.probe(name).available:
            can = _native.open_context(name, bytes(32), {}).capabilities
            if can.moves_data and can.own_memory:
                kinds[f"memcpy-{name}"] = name
    return [
        Offer(name, "memcpy", FLOOR, "memory", "", options={"memory of": backend}) for name, backend in kinds.items()
    ]


class Side:
    """The prefill side holds both pools; the other one has nothing to do."""

    address = 0

    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self._backend = options["memory of"]
        self._job = job
        self._copies = role == job.initiator

    def open(self) -> None:
        from kvxfer import _native

        self._native = _native
        self._context = _native.open_context(self._backend, bytes(32), {})

    def allocate(self) -> None:
        if self._copies:
            self._source, self._target = (self._context.allocate(self._job.pool_bytes) for _ in range(2))
            # Pages that were never written would all be read from one page of zeroes.
            self._native.fill(self._native.Regions([(self._source.address, self._source.bytes)]), 0)

    def connect(self, _: Callable[[Any], Any]) -> None:
        self._pieces = [
            (self._job.offsets(one, "decode"), self._job.offsets(one, "prefill"), one.lengths)
            for one in self._job.requests
        ]

    def move(self, first: int, count: int) -> list[tuple[int, int]] | None:
        if not self._copies:
            return None
        return [(0, self._copy(number)) for number in range(first, first + count)]

    def _copy(self, number: int) -> int:
        to, source, lengths = self._pieces[number % len(self._pieces)]
        return self._native.copy_pieces(self._target.address, to, self._source.address, source, lengths)
