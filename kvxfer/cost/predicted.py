"""What a plan predicts of requests that nobody measured: steady and cold, by fitted cost models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvxfer.cost.fitted import Fitted


def predicted_entries(models: Iterable[Fitted], size: int, descriptors: int, prefill_ms: float) -> list[dict[str, Any]]:
    """What each says of a request, for a row of the result file's `ratio`; no time where it is outside the range."""
    return [_entry(one, size, descriptors, prefill_ms) for one in models]


def _entry(one: Fitted, size: int, descriptors: int, prefill_ms: float) -> dict[str, Any]:
    steady, cold = one.predict(size, descriptors), one.predict_cold(size, descriptors)
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
