"""Fitting a cost model to measured requests: its shape, its figures with 95 % intervals, its error, its range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvxfer.cost.choose import Candidate, choose
from kvxfer.cost.model import FORMS, CostModel
from kvxfer.cost.points import Point, with_role
from kvxfer.cost.solve import Array, Rows, Shape, loss, predicted, solve
from kvxfer.errors import UsageError

LEAST_POINTS = 6
"""Three unknowns, and as many requests again to hold out."""

LEAST_PROCESSES = 3
LEAST_SPREAD = 4.0
"""Bytes, descriptors and their ratio have to differ by this factor, or γ and β cannot be told apart."""

LONGER = "give a longer --tokens, of which all are made"

BOOTSTRAPS = 400
LEVEL = 0.95
OCCUPANCY_STEPS = 200
ROUNDING = 1e-9
"""In ns per byte: what takes less takes no time."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Fit:
    """A fitted model, other fits of it to resampled processes, and the points that it comes from."""

    model: CostModel
    shape: Shape
    tried: Sequence[Candidate]
    resampled: Sequence[CostModel]
    points: Sequence[Point]

    def interval(self, of: Callable[[CostModel], float | None]) -> Interval | None:
        """The 95 % interval of a figure of the model. None where it is unknown.

        From fits to processes drawn again with replacement, of each request among its own. Of few processes such draws
        differ less than fresh ones would, by the factor √(n / (n − 1)), which is made good here.
        """
        middle = of(self.model)
        values = [value for value in map(of, self.resampled) if value is not None]
        if middle is None or len(values) < len(self.resampled):
            return None
        fewest = min(len(point.process_ns) for point in self.points)
        tail = 100 * (1 - LEVEL) / 2
        low, high = (float(each) for each in np.percentile(values, [tail, 100 - tail]))
        widen = math.sqrt(fewest / (fewest - 1))
        return max(0.0, middle + widen * (min(low, middle) - middle)), middle + widen * (max(high, middle) - middle)

    def errors(self) -> list[float]:
        """Of the requests that took no part in it: |relative error| of each, ascending."""
        return sorted(abs(point.error(self.model)) for point in with_role(self.points, "held_out"))

    def as_record(self) -> dict[str, Any]:
        """An entry of a result file's `cost_model`, but for what was measured (backend, dtype, op …)."""
        model, errors = self.model, self.errors()
        fitted = with_role(self.points, "fit")
        return {
            "form": model.form,
            "alpha_ns": self._figure(lambda one: one.alpha_ns),
            "latency_ns": self._figure(lambda one: one.latency_ns),
            "occupancy_ns": self._figure(lambda one: one.occupancy_ns),
            "gamma_ns": self._figure(lambda one: one.gamma_ns),
            "beta_gbyte_s": self._beta(-1),
            "bands": [
                {"from_bytes": band.from_bytes, "beta_gbyte_s": self._beta(number), "step_ns": band.step_ns}
                for number, band in enumerate(model.bands)
            ],
            "processes": min(len(point.process_ns) for point in self.points),
            "chosen_from": [
                {"form": one.shape.form, "breaks": list(one.shape.breaks), "error_percent": 100 * one.error}
                for one in self.tried
            ],
            "held_out": {
                "requests": len(errors),
                "median_percent": 100 * float(np.median(errors)),
                "worst_percent": 100 * errors[-1],
            }
            if errors
            else None,
            "valid": {
                "bytes": _range(point.bytes for point in fitted),
                "descriptors": _range(point.descriptors for point in fitted),
                "inflight": max(point.inflight for point in self.points),
            },
            "points": [point.as_record(model) for point in self.points],
        }

    def _figure(self, of: Callable[[CostModel], float | None]) -> dict[str, Any] | None:
        value, interval = of(self.model), self.interval(of)
        return None if value is None or interval is None else {"value": value, "ci95": list(interval)}

    def _beta(self, number: int) -> dict[str, Any] | None:
        """Of one band, None where bytes surely cost nothing.

        Where they seem to there is no value, and where they may no upper end of the interval. The lower one is always
        there: a request may take so long, whatever the value.
        """
        value = self.model.bands[number].ns_per_byte
        interval = self.interval(lambda one: one.bands[number].ns_per_byte)
        if interval is None or interval[1] <= ROUNDING:
            return None
        low, high = interval
        return {"value": _rate(value), "ci95": [_rate(high), _rate(low)]}


def _rate(ns_per_byte: float) -> float | None:
    """GB/s; None where bytes take no time."""
    return 1 / ns_per_byte if ns_per_byte > ROUNDING else None


def fit(points: Sequence[Point], seed: int = 0) -> Fit:
    """The cost model of these requests; those held out do not influence it.

    Raises UsageError, saying how many it takes, when there are too few or they differ too little.
    """
    fitted, several = with_role(points, "fit"), with_role(points, "inflight")
    require_different(fitted)
    _require_processes([*fitted, *several])
    rows = _rows(fitted, [point.median_ns for point in fitted])
    tried = choose(rows)
    shape = tried[-1].shape
    model = _with_occupancy(solve(shape, rows), several, [point.median_ns for point in several])
    rng = np.random.default_rng(seed)
    resampled = [
        _with_occupancy(_better_form(shape.breaks, _rows(fitted, ns)), several, several_ns)
        for ns, several_ns in zip(_redrawn(fitted, rng), _redrawn(several, rng), strict=True)
    ]
    return Fit(model, shape, tried, resampled, list(points))


def _better_form(breaks: tuple[int, ...], rows: Rows) -> CostModel:
    """Of these rows, in whichever form fits them better: which one it is, is uncertain as its figures are."""
    return min((solve(Shape(form, breaks), rows) for form in FORMS), key=lambda model: loss(model, rows))


def require_different(points: Sequence[Point]) -> None:
    """Raises UsageError, saying what is missing, where no times of these requests could tell α, γ and β apart."""
    different = {(point.descriptors, point.bytes) for point in with_role(points, "fit")}
    if len(different) < LEAST_POINTS:
        raise UsageError(
            f"a cost model takes at least {LEAST_POINTS} requests that differ in bytes or descriptors, and here are "
            f"{len(different)}, {LEAST_POINTS - len(different)} too few; {LONGER}"
        )
    for what, values in (
        ("bytes", [float(size) for _, size in different]),
        ("descriptors", [float(count) for count, _ in different]),
        ("bytes per descriptor", [size / count for count, size in different]),
    ):
        if max(values) < LEAST_SPREAD * min(values):
            raise UsageError(
                f"a cost model takes requests whose {what} differ by a factor of {LEAST_SPREAD:g}, and here they go "
                f"from {min(values):,.0f} to {max(values):,.0f}; {LONGER}"
            )


def _require_processes(points: Sequence[Point]) -> None:
    processes = min(len(point.process_ns) for point in points)
    if processes < LEAST_PROCESSES:
        raise UsageError(
            f"a cost model takes each request from at least {LEAST_PROCESSES} fresh starts of its processes, and one "
            f"here has {processes}; measure {LEAST_PROCESSES - processes} more"
        )


def _rows(points: Sequence[Point], ns: Sequence[float] | Array) -> Rows:
    return Rows(
        np.array([point.descriptors for point in points], float),
        np.array([point.bytes for point in points], float),
        np.array(ns, float),
    )


def _redrawn(points: Sequence[Point], rng: np.random.Generator) -> Array:
    """[draw, point]: the median of as many processes as the point has, drawn from them with replacement."""
    medians = np.empty((BOOTSTRAPS, len(points)))
    for number, point in enumerate(points):
        drawn = rng.choice(point.process_ns, (BOOTSTRAPS, len(point.process_ns)))
        medians[:, number] = np.median(drawn, axis=1)
    return medians


def _with_occupancy(model: CostModel, several: Sequence[Point], ns: Sequence[float] | Array) -> CostModel:
    """α split so that the times with several requests in flight come out best; unsplit where there are none."""
    if not several:
        return model

    alone = predicted(model, _rows(several, ns))
    inflight = np.array([point.inflight for point in several])
    possible = np.linspace(0, model.alpha_ns, OCCUPANCY_STEPS)
    expected = np.maximum(alone / inflight, alone - model.alpha_ns + possible[:, None])
    off = np.abs(expected / np.array(ns) - 1).sum(axis=1)
    return replace(model, occupancy_ns=float(possible[np.argmin(off)]))


def _range(values: Iterable[int]) -> list[int]:
    listed = list(values)
    return [min(listed), max(listed)]
