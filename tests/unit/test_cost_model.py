"""What a cost model predicts: never less for a larger request, and what requests in flight hide."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cost.model import FORMS, Band, CostModel, from_record
from kvxfer.errors import UsageError

COUNTS = st.integers(1, 10**7)
SIZES = st.integers(1, 10**12)
TIMES = st.floats(0, 1e9)
PER_BYTE = st.floats(0, 10)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 10**11), max_size=2)))]
    bands = tuple(Band(start, draw(PER_BYTE), draw(TIMES) if start else 0.0) for start in starts)
    alpha = draw(TIMES)
    occupancy = draw(st.none() | st.floats(0, 1).map(lambda share: share * alpha))
    return CostModel(draw(st.sampled_from(FORMS)), alpha, draw(st.floats(0, 1e6)), bands, occupancy)


def not_less(larger: float, smaller: float) -> bool:
    return larger >= smaller * (1 - 1e-9)


@given(models(), COUNTS, COUNTS, SIZES, SIZES)
def test_a_larger_request_never_takes_less(model: CostModel, count: int, more: int, size: int, further: int) -> None:
    alone = model.predict_ns(count, size)
    assert not_less(model.predict_ns(count + more, size), alone)
    assert not_less(model.predict_ns(count, size + further), alone)
    assert not_less(alone, model.alpha_ns)


@given(models(), COUNTS, SIZES, st.integers(2, 64))
def test_requests_in_flight_hide_at_most_all_but_one_share(model: CostModel, count: int, size: int, n: int) -> None:
    if model.occupancy_ns is None:
        with pytest.raises(ValueError, match="not measured"):
            model.predict_ns(count, size, n)
        return
    alone, each = model.predict_ns(count, size), model.predict_ns(count, size, n)
    assert not_less(alone, each)
    assert not_less(each, alone / n)
    assert not_less(each, model.work_ns(count, size))


def test_both_forms_by_hand() -> None:
    bands = (Band(0, 0.1), Band(1000, 0.5, 70.0))
    together = CostModel("sum", 100.0, 10.0, bands, 40.0)
    at_once = CostModel("overlap", 100.0, 10.0, bands)
    assert together.predict_ns(3, 1000) == pytest.approx(100 + 30 + 100)
    assert together.predict_ns(3, 1200) == pytest.approx(100 + 30 + 100 + 70 + 100)
    assert at_once.predict_ns(3, 1000) == pytest.approx(100 + 100)
    assert at_once.predict_ns(30, 1000) == pytest.approx(100 + 300)
    assert together.predict_ns(3, 1000, 2) == pytest.approx(40 + 130)  # the path is busy
    assert together.latency_ns == 60
    assert bands[1].beta_gbyte_s == 2
    assert Band(0, 0.0).beta_gbyte_s is None


def record() -> dict[str, object]:
    return {
        "backend": "tcp",
        "form": "overlap",
        "alpha_ns": {"value": 100.0, "ci95": [90.0, 110.0]},
        "gamma_ns": {"value": 10.0, "ci95": [9.0, 11.0]},
        "occupancy_ns": None,
        "bands": [
            {"from_bytes": 0, "beta_gbyte_s": {"value": 5.0, "ci95": [4.0, 6.0]}, "step_ns": 0},
            {"from_bytes": 4096, "beta_gbyte_s": None, "step_ns": 50.0},
        ],
    }


def test_a_record_is_read_back() -> None:
    model = from_record(record())
    assert model == CostModel("overlap", 100.0, 10.0, (Band(0, 0.2), Band(4096, 0.0, 50.0)))
    assert math.isclose(model.predict_ns(1, 10_000), 100 + 0.2 * 4096 + 50)


@pytest.mark.parametrize(
    ("field", "value"),
    [("form", "product"), ("alpha_ns", None), ("bands", []), ("gamma_ns", {"value": "fast"}), ("bands", [{}])],
)
def test_a_damaged_record_is_one_error(field: str, value: object) -> None:
    with pytest.raises(UsageError, match="cost model of 'tcp' in the result is damaged"):
        from_record(record() | {field: value})
