"""Measuring the grid of a cost model: each request by fresh processes, round after round, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvxfer.backend.probe import MEASURES_NOTHING
from kvxfer.cost.cold import cold_record
from kvxfer.cost.fit import LEAST_PROCESSES, fit, require_different
from kvxfer.cost.points import Point, Role
from kvxfer.errors import KvxferError, PeerLostError
from kvxfer.measure.grid import design
from kvxfer.measure.host import NOISY_SHARE, TICKS_NS
from kvxfer.measure.hosts import Hosts
from kvxfer.measure.pair import Pair
from kvxfer.measure.request import Effort, Row, tables
from kvxfer.measure.row import Say, others_share
from kvxfer.measure.run import Outcome, Request, require_transport
from kvxfer.measure.session import Session
from kvxfer.measure.steady import SteadyState
from kvxfer.result.cold import COLD_PHASES

MOST_PROCESSES = 7
"""Fresh starts of each request; more would make the intervals a little narrower and the wait longer."""

MOST_SECONDS = 0.25
"""Of a request's steady state in one process; of a short --fit-seconds a share."""

ALLOWANCE = 0.1
SAMPLES = 10

FIRST_NUMBER = 0


@dataclass(frozen=True)
class Process:
    """A fresh start of a request's processes: its steady time and its phases in ns, and whether others disturbed it."""

    ns: float
    start: Mapping[str, int]
    noisy: bool


@dataclass
class Sampled:
    """One request of the grid, with the processes so far."""

    role: Role
    row: Row
    descriptors: int = 0
    processes: list[Process] = field(default_factory=list)

    @property
    def _quiet(self) -> list[Process]:
        return [process for process in self.processes if not process.noisy]

    @property
    def disturbed(self) -> bool:
        """Whether too few processes were left in peace, so that the others have to count too."""
        return len(self._quiet) < LEAST_PROCESSES

    def point(self) -> Point:
        counted = self.processes if self.disturbed else self._quiet
        return Point(
            descriptors=self.descriptors,
            bytes=self.row.bytes,
            process_ns=tuple(process.ns for process in counted),
            starts=tuple(process.start for process in counted),
            role=self.role,
            inflight=self.row.inflight,
            tokens=self.row.tokens,
            block_size=self.row.spec.block_size,
            fragmentation=self.row.fragmentation,
        )


def fit_all(session: Session, request: Request, hosts: Hosts, seconds: float, outcome: Outcome, say: Say) -> None:
    """A cost model of each backend, dtype and op among the rows, in about so many seconds each, added to the outcome.

    One that cannot be measured does not keep the others from it, unless the peer was lost.
    """
    for row in _longest(request.rows):
        try:
            hosts.with_memory_now().require_memory([row])
            sampled, transport = _measure(session, row, hosts, seconds, request, say)
            measured = [one for one in sampled if one.processes]
            say(f"cost model of {_named(row)}: fitting")
            entry = session.minding(partial(_entry, [one.point() for one in measured], row.seed))
        except KvxferError as error:
            outcome.errors.append(f"no cost model of {_named(row)}: {error}")
            outcome.status = max(outcome.status, error.status)
            if isinstance(error, PeerLostError):
                return
            continue
        noisy = sum(one.disturbed for one in measured) / len(measured)
        outcome.cost_model.append(_of(row, hosts.scope_of(row, transport), transport) | {"noisy_share": noisy} | entry)


def _entry(points: Sequence[Point], seed: int) -> dict[str, Any]:
    """Seconds of computing: later requests, and the first one of a pair."""
    return fit(points, seed).as_record() | {"cold": cold_record(points, seed)}


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Of each model, dtype, backend and op that moves data the row with the most tokens."""
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        if row.backend in MEASURES_NOTHING:
            continue
        known = (row.shape.name, row.spec.dtype.name, row.backend, row.op)
        if known not in found or row.tokens > found[known].tokens:
            found[known] = row
    return list(found.values())


def _measure(
    session: Session, row: Row, hosts: Hosts, seconds: float, request: Request, say: Say
) -> tuple[list[Sampled], str]:
    """Rounds in which every request of the grid is measured once, in an order of its own."""
    sampled = [Sampled(role, one) for role, one in design(row)]
    share = min(MOST_SECONDS, ALLOWANCE + seconds / (LEAST_PROCESSES * len(sampled)) / 2)
    effort = Effort(max_seconds=share, min_samples=SAMPLES, setup_repeats=1, verify=request.effort.verify)
    rng = np.random.default_rng(row.seed)
    began, transport = time.monotonic(), ""
    for number in range(MOST_PROCESSES):
        spent = time.monotonic() - began
        if number >= LEAST_PROCESSES and spent * (number + 1) / number > seconds:
            break
        for done, index in enumerate(rng.permutation(len(sampled))):
            say(f"cost model of {_named(row)}: round {number + 1}, {done}/{len(sampled)}")
            transport = _sample(session, sampled[index], hosts, effort)
            require_transport(sampled[index].row, transport, request.require_transport)
        if not number:  # further rounds would be in vain
            require_different([one.point() for one in sampled if one.processes])
    return sampled, transport


def _sample(session: Session, one: Sampled, hosts: Hosts, effort: Effort) -> str:
    """One more process of a request, if the backend carries so many at once. Returns what carries its bytes."""
    row = one.row
    pair = Pair(session, FIRST_NUMBER, row, tables(row, hosts.slots(row)), effort, hosts.peer_host)
    pair.set_up()
    transport = "+".join(pair.described().lanes)
    if row.inflight > pair.opened.max_inflight:
        pair.end()
        return transport
    pair.prepare_rest()
    steady = SteadyState(pair, effort)
    while steady.step():
        pass
    pair.run_verified()
    pair.end()
    one.descriptors = pair.descriptors
    totals = steady.totals
    ns = float(np.median(steady.samples)) if row.inflight == 1 else totals.wall_ns / totals.requests
    ticks = TICKS_NS / (totals.elapsed_ns * min(hosts.here.cpus, hosts.there.cpus))
    noisy = others_share(totals, hosts) > NOISY_SHARE + ticks
    one.processes.append(Process(ns, {phase: pair.setup_ns[phase] for phase in COLD_PHASES}, noisy))
    return transport


def _of(row: Row, scope: str, transport: str) -> dict[str, Any]:
    """What the model is of."""
    return {
        "model": row.shape.name,
        "dtype": row.spec.dtype.name,
        "backend": row.backend,
        "op": row.op,
        "scope": scope,
        "transport": transport,
        "options": dict(row.options),
        "tp": {"prefill": row.prefill.tp, "decode": row.decode.tp},
        "pp": {"prefill": row.prefill.pp, "decode": row.decode.pp},
    }


def _named(row: Row) -> str:
    return f"{row.shape.name} in {row.spec.dtype.name} over {row.backend}, {row.op}"
