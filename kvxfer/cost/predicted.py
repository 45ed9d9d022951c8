"""What a plan predicts of requests that nobody measured: steady by a cost model, cold by it and the set-up beside it.

Cold is the first request of a pair of running engines. Its set-up is that of the rows which were measured beside the
cost model: they connect and exchange keys as it would, and their first transfers took so many times as long as later
ones. The plan's preparation lies on a line between the rows next to it in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from kvxfer.cost.fitted import Fitted, Prediction
from kvxfer.cost.measured import Measured
from kvxfer.cost.prefill_source import on_the_line

Pick = Callable[[Iterable[float]], float]


def predicted_entries(
    models: Iterable[Fitted], measured: Sequence[Measured], size: int, descriptors: int, prefill_ms: float
) -> list[dict[str, Any]]:
    """What each says of a request, for a row of the result file's `ratio`; no time where it is outside the range.

    `measured` are the rows of the models' result.
    """
    return [_entry(one, measured, size, descriptors, prefill_ms) for one in models]


def _entry(one: Fitted, measured: Sequence[Measured], size: int, descriptors: int, prefill_ms: float) -> dict[str, Any]:
    steady = one.predict(size, descriptors)
    cold = None if steady is None else predicted_cold(rows_beside(measured, one), size, steady)
    return {
        "model": one.model,
        "backend": one.backend,
        "op": one.op,
        "scope": one.scope,
        "descriptors": descriptors,
        "transfer_ms": None if steady is None else steady.ms,
        "low_ms": None if steady is None else steady.low_ms,
        "high_ms": None if steady is None else steady.high_ms,
        "percent": None if steady is None else steady.ms / prefill_ms * 100,
        "cold_pair_ms": None if cold is None else cold.ms,
        "cold_pair_low_ms": None if cold is None else cold.low_ms,
        "cold_pair_high_ms": None if cold is None else cold.high_ms,
        "cold_pair_percent": None if cold is None else cold.ms / prefill_ms * 100,
        "held_out_percent": one.held_out_percent,
        "valid": {"bytes": list(one.bytes), "descriptors": list(one.descriptors)},
    }


def rows_beside(measured: Iterable[Measured], model: Fitted) -> list[Measured]:
    """The rows of a cost model's cache, backend and op that tell set-up, of one rank and one request at a time."""
    of_model = model.model, model.dtype, model.backend, model.op, model.scope
    return [
        row
        for row in measured
        if (row.model, row.dtype, row.backend, row.op, row.scope) == of_model
        and (row.inflight, row.tp, row.pp) == (1, (1, 1), (1, 1))
        and row.starts
        and row.transfer_ms
    ]


def predicted_cold(rows: Sequence[Measured], size: int, steady: Prediction) -> Prediction | None:
    """Of a request of so many bytes, from those rows; None where there are none.

    low and high have all parts at the least and the most of the measured starts, and the steady time at the ends of its
    interval.
    """
    if not rows:
        return None
    meeting = [start.meeting_ms for row in rows for start in row.starts]
    slower = [start.first_ms / (row.transfer_ms or 0.0) for row in rows for start in row.starts]
    preparing: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        preparing.setdefault(row.bytes, []).extend(start.prepare_ms for start in row.starts)
    within = min(max(size, min(preparing)), max(preparing))

    def cold_ms(pick: Pick, steady_ms: float) -> float:
        prepare_ms = on_the_line([(at, pick(ms)) for at, ms in preparing.items()], within)
        return pick(meeting) + prepare_ms + pick(slower) * steady_ms

    return Prediction(cold_ms(median, steady.ms), cold_ms(min, steady.low_ms), cold_ms(max, steady.high_ms))
