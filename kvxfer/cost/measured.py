"""Measured times out of a result, for the ratio to set beside the line rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.wording import quoted

ASSUMED_COMPUTE = "assumed prefill"
"""How the source of a pipeline's compute begins that is the ratio's own prefill."""

FIRST_REQUEST = ("connect_ns", "exchange_ns", "prepare_ns", "first_ns")
"""Phases of a start that the first request of two running engines has too."""


@dataclass(frozen=True)
class Measured:
    """One row of a result: the median transfer and the median cold time in ms, None where the row has too few samples.

    `of` is the row's id, `scope` what its bytes went through (on one host that says nothing about the links).
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
    first_ms: float | None = None  # the first request of two running engines, with connecting
    inflight: int = 1  # requests at once; of several each one's time has waiting for the others in it
    exposed_ms: float | None = None  # what the best pipelining did not hide behind the assumed prefill
    behind_ms: float | None = None  # which took so long; it says nothing of another prefill


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
        first_ms=_first_ms(row),
        inflight=_field({"inflight": 1} | dict(row), "inflight", int),
        exposed_ms=_exposed_ms(row),
        behind_ms=_behind_ms(row),
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
    if type(layers) is not int or type(layer_ns) is not int or layers < 1 or layer_ns < 0:
        raise _wrong(row, "pipeline.compute", pipeline["compute"])
    return layers * layer_ns / 1e6


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


def _first_ms(row: Mapping[str, Any]) -> float | None:
    """None where a phase is not there."""
    phases = [(row.get("setup") or {}).get(phase) for phase in FIRST_REQUEST]
    times = [_ms(phase, "p50", row) if isinstance(phase, Mapping) else None for phase in phases]
    return None if None in times else sum(time for time in times if time is not None)


def _ms(holder: Mapping[str, Any], field: str, row: Mapping[str, Any] | None = None) -> float | None:
    """A field of nanoseconds in ms."""
    value = holder.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _wrong(row or holder, field, value)
    return value / 1e6


def _field(row: Mapping[str, Any], field: str, kind: type) -> Any:
    value = row.get(field)
    if type(value) is not kind:
        raise _wrong(row, field, value)
    return value


def _wrong(row: Mapping[str, Any], field: str, value: object) -> UsageError:
    return UsageError(
        f"the measured result is damaged: row {quoted(row.get('id'))} has {field} = {quoted(value)}; measure again"
    )
