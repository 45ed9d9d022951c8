"""A whole run: every row asked for, put together as a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

import msgspec

from kvxfer import __version__
from kvxfer.backend.probe import MEASURES_NOTHING, backend_names
from kvxfer.cache.spec import CacheSpec
from kvxfer.control.messages import HostInfo
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.errors import ExitStatus, KvxferError, PeerLostError, UnavailableError
from kvxfer.measure.hosts import Hosts, scope_of_all
from kvxfer.measure.prefill import Computed, prefill_here
from kvxfer.measure.request import Effort, Pipelining, Row
from kvxfer.measure.row import RowRun, Say, failed
from kvxfer.measure.session import Session
from kvxfer.model.record import model_record
from kvxfer.result.file import SCHEMA_VERSION

ONE_HOST = (
    "both sides ran on this host ({}): the measured times say nothing about the links, and no verdict follows from them"
)
IN_TURN = (
    "not enough memory for the pools of all backends at once: those of {} were measured one after another, not in turn"
)
ONE_MACHINE = "both sides ran on one machine, in different network namespaces: they share its CPUs and memory"
NULL = "backend null moves nothing: its times are what the harness itself costs, and nothing was verified"
NO_VERDICT = "no verdict: that takes the load and the pools, which kvxfer plan --measured asks for"


@dataclass(frozen=True)
class Request:
    """What is asked of a run."""

    rows: Sequence[Row]
    effort: Effort
    assumptions: Assumptions
    words: Sequence[str]  # the command line
    require_transport: str = ""
    notices: Sequence[str] = ()  # of the model and its cache
    leave_out: bool = False  # rows whose backend cannot or may not reach the peer, rather than fail
    pipelining: Pipelining | None = None  # to be measured of every row too
    prefill: Sequence[Computed] = ()  # measured of each prompt length


@dataclass
class Outcome:
    """What became of it: rows as far as they got, the errors in order, and the exit status they deserve."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    references: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    cost_model: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # about libraries; for stderr
    status: int = ExitStatus.DONE

    def fail(self, row: Row, error: KvxferError) -> None:
        self.rows.append(failed(row, str(error)))
        if str(error) not in self.errors:
            self.errors.append(str(error))
        self.status = max(self.status, error.status)


def within_reach(request: Request, hosts: Hosts, offered: Sequence[str]) -> Request:
    """The request without rows of backends that cannot reach the peer, or that it does not offer.

    Raises UnavailableError when there is such a backend and it is not to be left out, or when none is left.
    """
    beyond = [row for row in request.rows if not hosts.reaches(row)]
    if beyond and not request.leave_out:
        raise UnavailableError(
            f"backend {beyond[0].backend} moves bytes within one host and network namespace, and {hosts.peer_host} "
            f"({hosts.there.hostname}) is not in this one; use a backend that crosses hosts, such as tcp"
        )
    if not request.leave_out:
        return request
    rows = [row for row in request.rows if hosts.reaches(row) and hosts.may(row) and row.backend in offered]
    if not rows:
        raise UnavailableError(
            "no backend that can be used here reaches the peer; `kvxfer doctor` says what each side has"
        )
    return replace(request, rows=rows)


def measure(session: Session, request: Request, hosts: Hosts, outcome: Outcome, say: Say) -> None:
    """Measure the rows, those that differ only in their backend in turn, and add them to the outcome.

    A row that fails does not keep the others from being measured, unless the peer was lost. Raises UnavailableError
    before anything is allocated when a row's pools do not fit.
    """
    groups = [part for group in _side_by_side(request.rows) for part in _fitting(group, hosts, outcome)]
    for number, group in enumerate(groups):
        try:
            hosts.with_memory_now().require_memory(group)
        except UnavailableError as error:  # others have taken memory since
            for row in group:
                outcome.fail(row, error)
            continue
        try:
            _measure_group(session, group, request, hosts, outcome, say)
        except PeerLostError as error:
            for row in [row for rest in groups[number:] for row in rest]:
                if row.id not in {done["id"] for done in outcome.rows}:
                    outcome.fail(row, error)
            return


def _side_by_side(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that differ in nothing but the backend, in the order given."""
    for _, group in groupby(rows, key=lambda row: (row.spec, row.op, row.tokens)):
        yield list(group)


def _fitting(group: list[Row], hosts: Hosts, outcome: Outcome) -> list[list[Row]]:
    """The group, or where its pools do not fit at once, each row by itself. Raises UnavailableError where none fits."""
    try:
        hosts.require_memory(group)
    except UnavailableError:
        for row in group:
            hosts.require_memory([row])
        outcome.notices.append(IN_TURN.format(f"{group[0].tokens} tokens, {group[0].spec.dtype.name}, {group[0].op},"))
        return [[row] for row in group]
    return [group]


def _measure_group(
    session: Session, group: list[Row], request: Request, hosts: Hosts, outcome: Outcome, say: Say
) -> None:
    runs = [RowRun(session, number, row, request.effort, hosts, request.pipelining) for number, row in enumerate(group)]
    for run in runs:
        with _failing_alone(run, outcome):
            run.set_up(say)
    sampling = [run for run in runs if not run.failed]
    while sampling:
        for run in list(sampling):
            more = False
            with _failing_alone(run, outcome):
                more = run.step(say)
            if not more:
                sampling.remove(run)
    for run in runs:
        if not run.failed:
            with _failing_alone(run, outcome):
                _finish(run, request, outcome, say)


@contextmanager
def _failing_alone(run: RowRun, outcome: Outcome) -> Iterator[None]:
    """A failure in here becomes the row's, and its pair is ended. A lost peer ends the run instead."""
    try:
        yield
    except PeerLostError:
        raise
    except KvxferError as error:
        outcome.fail(run.row, error)
        run.abandon()


def _finish(run: RowRun, request: Request, outcome: Outcome, say: Say) -> None:
    row = run.finish(say)
    if (warning := row["library"]["warning"]) and warning not in outcome.warnings:
        outcome.warnings.append(warning)
    require_transport(run.row, row["transport"], request.require_transport)
    outcome.rows.append(row)
    outcome.references.extend(run.references)


def require_transport(row: Row, transport: str, wanted: str) -> None:
    """Raises UnavailableError when something else carried the row's bytes; wanted "": anything may."""
    if not wanted or all(_carried_by(lane, wanted) for lane in transport.split("+")):
        return
    other = wanted.partition("/")[0]
    hint = f"; give --backend {other} with it" if other != row.backend and other in backend_names() else ""
    raise UnavailableError(f"{row.id}: {transport} carried the bytes, and --require-transport wants {wanted}{hint}")


def _carried_by(lane: str, wanted: str) -> bool:
    """tcp/eth0 is carried by tcp and by tcp/eth0, rc_mlx5/mlx5_0:1 also by rc: UCX has its kinds of a transport so."""
    return lane == wanted or (lane.startswith((wanted + "/", wanted + "_")) and "/" not in lane[: len(wanted)])


def _scopes(request: Request, hosts: Hosts, outcome: Outcome) -> dict[str, str]:
    """What each row's bytes went through, or would have, by the row's id."""
    carried = {row["id"]: row.get("transport", "") for row in outcome.rows}
    return {row.id: hosts.scope_of(row, carried.get(row.id, "")) for row in request.rows}


def result(request: Request, hosts: Hosts, outcome: Outcome) -> dict[str, Any]:
    """The result document (kvxfer/result/schema.json) of what was measured."""
    assumptions = request.assumptions
    shape = request.rows[0].shape
    models = _models(request.rows, assumptions.kv_bytes_per_token)
    scopes = _scopes(request, hosts, outcome)
    scope = scope_of_all(scopes.values())
    rows = [row | {"scope": scopes[row["id"]]} for row in outcome.rows]
    moved = [row for row in rows if row["backend"] not in MEASURES_NOTHING]
    measured = measured_rows(moved, scope)
    ratio = [
        row
        for spec, prompts in _prompts(request.rows).items()
        for row in ratio_rows(
            shape,
            spec.dtype,
            list(prompts),
            spec.block_size,
            assumptions,
            measured,
            {tokens: row.wire for tokens, row in prompts.items()} if assumptions.parallel else None,
            prefill_here(request.prefill) if request.prefill else None,
        )
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "kvxfer_version": __version__,
        "created_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(request.words),
        "scope": scope,
        "exit_status": int(outcome.status),
        "host": _host(hosts.here),
        "peer": _host(hosts.there),
        "assumptions": assumptions.as_record(shape),
        "models": models,
        "results": rows,
        "references": outcome.references,
        "cost_model": outcome.cost_model,
        **({"prefill": [one.as_prefill() for one in request.prefill]} if request.prefill else {}),
        "ratio": ratio,
        "verdict": None,
        "notices": _notices(request, hosts, outcome),
    }


def _prompts(rows: Sequence[Row]) -> dict[CacheSpec, dict[int, Row]]:
    """A row of each prompt length, by cache."""
    prompts: dict[CacheSpec, dict[int, Row]] = {}
    for row in rows:
        prompts.setdefault(row.spec, {}).setdefault(row.tokens, row)
    return prompts


def _models(rows: Sequence[Row], given: int | None) -> list[dict[str, Any]]:
    return [
        model_record(spec.shape, spec.dtype, list(prompts), spec.block_size, given)
        for spec, prompts in _prompts(rows).items()
    ]


def _host(info: HostInfo) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(info)
    return {name: value for name, value in told.items() if name not in ("boot_id", "netns", "uid")}


def _notices(request: Request, hosts: Hosts, outcome: Outcome) -> list[str]:
    notices = [
        *request.notices,
        *ratio_notices(request.rows[0].shape, request.assumptions),
        *outcome.notices,
        *outcome.warnings,
    ]
    if hosts.same:
        notices.append(ONE_HOST.format(", ".join(dict.fromkeys(_scopes(request, hosts, outcome).values()))))
    if hosts.one_machine:
        notices.append(ONE_MACHINE)
    if any(row.backend == "null" for row in request.rows):
        notices.append(NULL)
    return [*notices, NO_VERDICT]
