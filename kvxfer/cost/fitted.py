"""Fitted cost models out of a result, for a plan to predict requests that nobody measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvxfer.cost.model import LARGEST_FIGURE, CostModel, finite, from_record, ns_per_byte
from kvxfer.cost.pipeline import Span
from kvxfer.errors import UsageError
from kvxfer.wording import quoted

ONE_RANK = {"prefill": 1, "decode": 1}


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a request.

    low and high are steady's with α, γ and 1/β all at the same ends of their 95 % intervals, and cold's between which
    95 % of the fresh starts were.
    """

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Cold:
    """The cost model of a pair's first request, and between which shares of it single ones were."""

    fitted: CostModel
    spread: tuple[float, float]


@dataclass(frozen=True)
class Fitted:
    """A cost model, and what it is of: `model` is the one whose cache was moved; bytes and descriptors are its range.

    low and high are the model with all figures at the ends of their intervals. held_out_percent is the median error on
    requests that took no part in the fit, None where there were none. cold is None where nobody told set-up.
    """

    fitted: CostModel
    low: CostModel
    high: CostModel
    model: str
    dtype: str
    backend: str
    op: str
    scope: str
    bytes: tuple[int, int]
    descriptors: tuple[int, int]
    held_out_percent: float | None
    one_rank: bool = True
    cold: Cold | None = None
    noisy_share: float = 0.0  # of its requests, those that others disturbed

    @property
    def latency_ns(self) -> float:
        """What a later send hides; nothing where several requests at once were not measured."""
        return self.fitted.latency_ns or 0.0

    def holds_ns(self, size: float, descriptors: float) -> float:
        """How long a send keeps the next one waiting."""
        return self.fitted.alpha_ns - self.latency_ns + self.fitted.work_ns(descriptors, size)

    @property
    def reach(self) -> Span:
        """The range that was fitted."""
        return Span(self.bytes, self.descriptors)

    def predict(self, size: float, descriptors: float) -> Prediction | None:
        """None outside the range."""
        if not self.reach.has(size, descriptors):
            return None
        low, middle, high = (one.predict_ns(descriptors, size) / 1e6 for one in (self.low, self.fitted, self.high))
        return Prediction(middle, low, high)

    def predict_cold(self, size: float, descriptors: float) -> Prediction | None:
        """The first request of a pair of running engines; None outside the range, or where it is not known."""
        if self.cold is None or not self.reach.has(size, descriptors):
            return None
        low, high = self.cold.spread
        ms = self.cold.fitted.predict_ns(descriptors, size) / 1e6
        return Prediction(ms, ms * low, ms * high)


def fitted_models(records: Sequence[Any]) -> list[Fitted]:
    """The entries of a result's `cost_model`. Raises UsageError, naming the backend, when one is damaged."""
    return [_fitted(record) for record in records]


def fitting(models: Iterable[Fitted], model: str, dtype: str) -> list[Fitted]:
    """Of each backend and op the cost model in this dtype: of this model's cache, or else of another's.

    Bytes and descriptors are what a request's time depends on, whichever model they are of.
    """
    found: dict[tuple[str, str], Fitted] = {}
    for one in models:
        if one.dtype == dtype and one.one_rank and (one.model == model or (one.backend, one.op) not in found):
            found[one.backend, one.op] = one
    return list(found.values())


def _fitted(record: Any) -> Fitted:
    if not isinstance(record, Mapping):
        raise UsageError(f"the measured result is damaged: cost_model holds {quoted(record)}; measure again")
    model = from_record(record)
    try:
        held_out = record["held_out"]
        return Fitted(
            fitted=model,
            low=_at_an_end(model, record, 0),
            high=_at_an_end(model, record, 1),
            bytes=_range(record["valid"]["bytes"]),
            descriptors=_range(record["valid"]["descriptors"]),
            held_out_percent=None if held_out is None else _from_zero(held_out["median_percent"]),
            one_rank=record.get("tp", ONE_RANK) == record.get("pp", ONE_RANK) == ONE_RANK,
            cold=_cold(record),
            noisy_share=_interval([record.get("noisy_share", 0), 1])[0],
            **{name: _text(record[name]) for name in ("model", "dtype", "backend", "op", "scope")},
        )
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise UsageError(
            f"the cost model of {quoted(record.get('backend'))} in the result is damaged; measure again"
        ) from error


def _cold(record: Mapping[str, Any]) -> Cold | None:
    """None in results of an earlier kvxfer."""
    cold = record.get("cold")
    if cold is None:
        return None
    return Cold(cold_model(record), _interval(cold["spread"]))


def cold_model(record: Mapping[str, Any]) -> CostModel:
    """The first request's in an entry of a result file's `cost_model` that has one; several are never in flight."""
    return from_record({**record["cold"], "occupancy_ns": None, "backend": record["backend"]})


def _at_an_end(model: CostModel, record: Mapping[str, Any], end: int) -> CostModel:
    """The model with every figure at the low (0) or the high (1) end of its interval; β at the other, being a rate."""
    betas = [band["beta_gbyte_s"] for band in record["bands"]]
    rates = [None if beta is None else beta["ci95"][1 - end] for beta in betas]
    bands = tuple(replace(band, ns_per_byte=ns_per_byte(rate)) for band, rate in zip(model.bands, rates, strict=True))
    alpha, gamma = (_interval(record[name]["ci95"])[end] for name in ("alpha_ns", "gamma_ns"))
    return CostModel(model.form, alpha, gamma, bands)


def _interval(ends: Sequence[Any]) -> tuple[float, float]:
    low, high = map(_from_zero, ends)
    if low > high:
        raise ValueError
    return low, high


def _from_zero(value: Any) -> float:
    number = finite(value)
    if number < 0:
        raise ValueError
    return number


def _range(ends: Sequence[Any]) -> tuple[int, int]:
    low, high = ends
    if type(low) is not int or type(high) is not int or not 1 <= low <= high <= LARGEST_FIGURE:
        raise ValueError
    return low, high


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
