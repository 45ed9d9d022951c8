"""Measured times out of a result, for the ratio to set beside the line rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvxfer.cost.model import finite, ns_per_byte
from kvxfer.cost.pipeline import Link, Span
from kvxfer.errors import UsageError
from kvxfer.result.cold import COLD_PHASES
from kvxfer.wording import quoted

ASSUMED_COMPUTE = "assumed prefill"
"""How the source of a pipeline's compute begins that is the ratio's own prefill."""

DOUBTS = {"noisy": (True,), "converged": (False,), "hot": (True,)}
"""Fields of a row, and the values of them that speak against its figures."""


@dataclass(frozen=True)
class Measured:
    """One row of a result: the median transfer and the median time from the start of the processes to the first one.

    In ms, None where the row has too few samples. `cold_pairs_ms` has the first request of each fresh pair of running
    engines, none where a phase is not told. `of` is the row's id, `scope` what its bytes went through (on one host that
    says nothing about the links).
    """

    of: str
    model: str
    dtype: str
    tokens: int
    bytes: int
    backend: str
    op: str
    scope: str
    transfer_ms: float | None
    cold_ms: float | None
    tp: tuple[int, int] = (1, 1)  # of prefill, of decode
    pp: tuple[int, int] = (1, 1)
    cold_pairs_ms: tuple[float, ...] = ()
    inflight: int = 1  # requests at once; of several each one's time has waiting for the others in it
    exposed_ms: float | None = None  # what the best pipelining did not hide behind the assumed prefill
    behind_ms: float | None = None  # which took so long; it says nothing of another prefill
    descriptors: int | None = None  # of all rank pairs
    doubts: tuple[str, ...] = ()  # of DOUBTS
    sends: Link | None = None  # what the row's own pipelining found that its sends take

    @property
    def cold_pair_ms(self) -> float | None:
        """Median of the starts."""
        return median(self.cold_pairs_ms) if self.cold_pairs_ms else None

    @property
    def cold_pair_longest_ms(self) -> float | None:
        return max(self.cold_pairs_ms, default=None)


def measured_rows(rows: Sequence[Mapping[str, Any]], scope: str) -> list[Measured]:
    """Every row with status ok among a result's `results`; `scope` is the run's, of rows that do not tell their own.

    Raises UsageError, naming row and field, when a row lacks a field or has one of another type.
    """
    for row in rows:
        if not isinstance(row, Mapping):
            raise UsageError(f"the measured result is damaged: results holds {quoted(row)}; measure again")
    return [_measured(row, scope) for row in rows if row.get("status") == "ok"]


def matching(measured: Iterable[Measured], model: str, dtype: str, tokens: int, size: int) -> list[Measured]:
    """The rows of exactly this model, dtype, prompt length and bytes, one request at a time; none is interpolated."""
    wanted = (model, dtype, tokens, size, 1)
    return [row for row in measured if (row.model, row.dtype, row.tokens, row.bytes, row.inflight) == wanted]


def _measured(row: Mapping[str, Any], scope: str) -> Measured:
    return Measured(
        of=_field(row, "id", str),
        model=_field(row, "model", str),
        dtype=_field(row, "dtype", str),
        tokens=_field(row, "tokens", int),
        bytes=_field(row, "bytes", int),
        backend=_field(row, "backend", str),
        op=_field(row, "op", str),
        scope=_field({"scope": scope} | dict(row), "scope", str),
        transfer_ms=_ms(row, "p50_ns"),
        cold_ms=_cold_ms(row),
        tp=_sides(row, "tp"),
        pp=_sides(row, "pp"),
        cold_pairs_ms=_cold_pairs_ms(row),
        inflight=_field({"inflight": 1} | dict(row), "inflight", int),
        exposed_ms=_exposed_ms(row),
        behind_ms=_behind_ms(row),
        descriptors=None if row.get("descriptors") is None else _field(row, "descriptors", int),
        sends=_sends(row),
        doubts=tuple(name for name, against in DOUBTS.items() if row.get(name) in against),
    )


def _exposed_ms(row: Mapping[str, Any]) -> float | None:
    """Of the best cut; None where there was no pipelining, or behind another compute than the assumed prefill."""
    pipeline = row.get("pipeline")
    if pipeline is None:
        return None
    try:
        if not pipeline["compute"]["source"].startswith(ASSUMED_COMPUTE):
            return None
        (best,) = [cut for cut in pipeline["cuts"] if cut["cut"] == pipeline["best"]["cut"]]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _wrong(row, "pipeline", pipeline) from None
    return _ms(best, "exposed_ns", row)


def _behind_ms(row: Mapping[str, Any]) -> float | None:
    """The compute that the row was pipelined behind, all layers as fast as was asked for."""
    pipeline = row.get("pipeline")
    if pipeline is None:
        return None
    try:
        layers, layer_ns = pipeline["compute"]["layers"], pipeline["compute"]["layer_ns"]
    except (TypeError, KeyError):
        raise _wrong(row, "pipeline", pipeline) from None
    if not all(type(one) is int and 0 <= one < 1 << 63 for one in (layers, layer_ns)) or layers < 1:
        raise _wrong(row, "pipeline.compute", pipeline["compute"])
    return float(layers * layer_ns / 1e6)


def _sends(row: Mapping[str, Any]) -> Link | None:
    """By the model of the row's pipelining; it has sent from one layer to all of them.

    None where all cuts had as many sends: the model has nothing of what one costs then.
    """
    pipeline = row.get("pipeline")
    if pipeline is None or (isinstance(pipeline, Mapping) and "model" not in pipeline):
        return None
    try:
        if len({cut["sends"] for cut in pipeline["cuts"]}) < 2:
            return None
        model, layers = pipeline["model"], pipeline["compute"]["layers"]
        latency_ns, occupancy_ns = (finite(model[name]) for name in ("latency_ns", "occupancy_ns"))
        gbyte_s = 1 / ns_per_byte(model["bandwidth_gbyte_s"])
        if min(latency_ns, occupancy_ns) < 0:
            raise ValueError
        return Link(latency_ns, occupancy_ns, gbyte_s, reach=Span((row["bytes"] / layers, row["bytes"])))
    except (TypeError, KeyError, ValueError, ArithmeticError):
        raise _wrong(row, "pipeline.model", pipeline) from None


def _sides(row: Mapping[str, Any], field: str) -> tuple[int, int]:
    """Ranks of both sides; 1 where the row does not say."""
    value = row.get(field, {"prefill": 1, "decode": 1})
    prefill, decode = (value.get(side) if isinstance(value, Mapping) else None for side in ("prefill", "decode"))
    if not isinstance(prefill, int) or not isinstance(decode, int) or min(prefill, decode) < 1:
        raise _wrong(row, field, value)
    return prefill, decode


def _cold_ms(row: Mapping[str, Any]) -> float | None:
    setup = row.get("setup")
    if setup is None:
        return None
    cold = setup.get("cold_ns") if isinstance(setup, Mapping) else setup
    if not isinstance(cold, Mapping):
        raise _wrong(row, "setup.cold_ns", cold)
    return _ms(cold, "p50", row)


def _cold_pairs_ms(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Each fresh start's; none where a phase is not there."""
    setup = row.get("setup") or {}
    if any(phase not in setup for phase in COLD_PHASES):
        return ()
    samples = []
    for phase in COLD_PHASES:
        listed = setup[phase].get("samples") if isinstance(setup[phase], Mapping) else None
        if not isinstance(listed, list):
            raise _wrong(row, f"setup.{phase}", setup[phase])
        samples.append([_as_ms(ns, row, f"setup.{phase}.samples") for ns in listed])
    if len({len(listed) for listed in samples}) > 1:
        raise _wrong(row, "setup", "phases of different numbers of starts")
    return tuple(map(sum, zip(*samples, strict=True)))


def _ms(holder: Mapping[str, Any], field: str, row: Mapping[str, Any] | None = None) -> float | None:
    """A field of nanoseconds in ms."""
    value = holder.get(field)
    return None if value is None else _as_ms(value, row or holder, field)


def _as_ms(ns: object, row: Mapping[str, Any], field: str) -> float:
    if type(ns) is not int or not 0 <= ns < 1 << 63:
        raise _wrong(row, field, ns)
    return ns / 1e6


def _field(row: Mapping[str, Any], field: str, kind: type) -> Any:
    value = row.get(field)
    if type(value) is not kind:
        raise _wrong(row, field, value)
    return value


def _wrong(row: Mapping[str, Any], field: str, value: object) -> UsageError:
    return UsageError(
        f"the measured result is damaged: row {quoted(row.get('id'))} has {field} = {quoted(value)}; measure again"
    )
