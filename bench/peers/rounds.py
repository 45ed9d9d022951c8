"""Interleaved rounds: every contender moves some requests in turn, again and again, the others standing still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from environment import Environment
from job import Job
from offer import Offer
from pair import ContenderError, OursFailedError, Pair, started

GIB = 1 << 30
WARM_UP = 1


@dataclass
class Measured:
    """One contender of a comparison. `ns` has the median request of every round, `first_ns` the very first one."""

    offer: Offer
    bytes: int
    setup_ns: int
    first_ns: int = 0
    ns: list[int] = field(default_factory=list)
    initiator_cpu_ns: list[int] = field(default_factory=list)
    target_cpu_ns: list[int] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        return float(np.median(self.ns))

    @property
    def spread_ns(self) -> float:
        """Between the quartiles."""
        low, high = np.percentile(self.ns, [25, 75])
        return float(high - low)

    @property
    def gbyte_s(self) -> float:
        return self.bytes / self.median_ns

    def cpu_s_per_gib(self, side: str) -> float:
        per_request = np.median(self.initiator_cpu_ns if side == "initiator" else self.target_cpu_ns)
        return float(per_request / 1e9 * GIB / self.bytes)

    def record(self) -> dict[str, Any]:
        return {
            "contender": self.offer.name,
            "version": self.offer.version,
            "kind": self.offer.kind,
            "transport": self.offer.transport,
            "setup_ns": self.setup_ns,
            "first_ns": self.first_ns,
            "ns": self.ns,
            "initiator_cpu_ns": self.initiator_cpu_ns,
            "target_cpu_ns": self.target_cpu_ns,
            "median_ns": self.median_ns,
            "iqr_ns": self.spread_ns,
            "gbyte_s": self.gbyte_s,
            "cpu_s_per_gib": {side: self.cpu_s_per_gib(side) for side in ("initiator", "target")},
        }


@dataclass(frozen=True)
class Comparison:
    """What came of one job. `rows` are in the order of the offers."""

    title: str
    job: Job
    rows: list[Measured]

    def row(self, name: str) -> Measured | None:
        return next((row for row in self.rows if row.offer.name == name), None)

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "op": self.job.op,
            "bytes": self.job.bytes,
            "descriptors": self.job.descriptors,
            "piece_bytes": self.job.piece_bytes,
            "pool_bytes": self.job.pool_bytes,
            "requests_in_rotation": len(self.job.requests),
            "rows": [row.record() for row in self.rows],
        }


def compare(
    title: str,
    job: Job,
    offers: Sequence[Offer],
    rounds: int,
    per_round: int,
    environment: Environment,
    anew: bool = False,
) -> Comparison:
    """`per_round` requests of each contender in every round, after one that does not count.

    The order turns by one every round. `anew`: each round in processes and memory of its own; else in the same ones.
    Another's contender that fails is left out; ours raises OursFailedError.
    """
    with contextlib.ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        measured: dict[str, Measured] = {}
        for offer in offers:
            try:
                with contextlib.ExitStack() as own:
                    pair = own.enter_context(started(offer, job))
                    first = pair.move(1).ns[0]
                    pair.verify()
                    if not anew:
                        pair.pause()
                        pairs[offer.name] = pair
                        stack.push(own.pop_all())
            except OursFailedError:
                raise
            except ContenderError as error:
                environment.leave_out(f"{offer.name} in {title}", error)
                continue
            measured[offer.name] = Measured(offer, job.bytes, pair.setup_ns, first)
        for turn in range(rounds):
            names = list(measured)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                row = measured[name]
                try:
                    with started(row.offer, job) if anew else _awake(pairs[name]) as pair:
                        _round(pair, row, per_round)
                except OursFailedError:
                    raise
                except ContenderError as error:
                    environment.leave_out(f"{name} in {title}", error)
                    del measured[name]
    return Comparison(title, job, list(measured.values()))


@contextlib.contextmanager
def _awake(pair: Pair) -> Iterator[Pair]:
    pair.resume()
    yield pair
    pair.pause()


def _round(pair: Pair, row: Measured, per_round: int) -> None:
    pair.move(WARM_UP)
    moved = pair.move(per_round)
    row.ns.append(round(float(np.median(moved.ns))))
    row.initiator_cpu_ns.append(moved.initiator_cpu_ns // per_round)
    row.target_cpu_ns.append(moved.target_cpu_ns // per_round)
