"""The first request of a pair of running engines, fitted as later ones are, from the fresh starts of the same requests.

Engines connect, exchange keys and prepare the plan, and then comes the first transfer, which takes longer than later
ones: each of these takes a fixed time, a time per descriptor and one per byte, and so does their sum. Single starts
scatter more than medians of transfers do, and what a new pair waits for is one of them: the spread is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvxfer.cost.fit import LEVEL, fit
from kvxfer.cost.points import Point
from kvxfer.result.cold import COLD_PHASES

KEPT = ("form", "alpha_ns", "gamma_ns", "beta_gbyte_s", "bands", "held_out")


def cold_record(points: Sequence[Point], seed: int = 0) -> dict[str, Any]:
    """A result file's `cost_model[].cold`. Raises UsageError, as fit() does, of too few points."""
    cold = [_as_cold(point) for point in points if point.inflight == 1]
    fitted = fit(cold, seed)
    ratios = [ns / fitted.model.predict_ns(point.descriptors, point.bytes) for point in cold for ns in point.process_ns]
    tail = 100 * (1 - LEVEL) / 2
    record = fitted.as_record()
    return {name: record[name] for name in KEPT} | {"spread": np.percentile(ratios, [tail, 100 - tail]).tolist()}


def _as_cold(point: Point) -> Point:
    """The same request, with its first time in each fresh start in place of the later ones."""
    return replace(point, process_ns=tuple(float(sum(start[phase] for phase in COLD_PHASES)) for start in point.starts))
