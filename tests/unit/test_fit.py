"""Fitting: known figures are found again, within intervals that hold them as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cost import fit as fitting
from kvxfer.cost.choose import held_out_error
from kvxfer.cost.fit import Fit, fit
from kvxfer.cost.model import FORMS, Band, CostModel, Form, from_record
from kvxfer.cost.points import Point
from kvxfer.cost.solve import Rows, Shape, solve

MIB = 1 << 20
PIECES = (64 << 10, 16 << 10, 4 << 10, 1 << 40)
SIZES = tuple(2 * MIB * 4**step for step in range(5))
PROCESSES = 5

SUM = CostModel("sum", 40_000.0, 300.0, (Band(0, 0.2),), 10_000.0)
OVERLAP = CostModel("overlap", 40_000.0, 3_500.0, (Band(0, 0.2),), 10_000.0)
KNEE = CostModel("sum", 40_000.0, 300.0, (Band(0, 0.1), Band(16 * MIB, 0.4)), 10_000.0)

FIGURES: list[Callable[[CostModel], float | None]] = [
    lambda model: model.alpha_ns,
    lambda model: model.gamma_ns,
    lambda model: model.bands[-1].ns_per_byte,
]


def points(true: CostModel, noise: float, seed: int, processes: int = PROCESSES) -> list[Point]:
    """The grid as `true` would give it, every process off by its own factor."""
    rng = np.random.default_rng(seed)

    def point(descriptors: int, size: int, **rest: object) -> Point:
        inflight = int(rest.get("inflight", 1))  # type: ignore[call-overload]
        exact = true.predict_ns(descriptors, size, inflight)
        times = exact * np.exp(rng.normal(0, noise, processes))
        return Point(descriptors, size, tuple(float(each) for each in times), **rest)  # type: ignore[arg-type]

    shapes = [(max(32, size // piece), size) for size in SIZES for piece in PIECES]
    held_out = [(size // (32 << 10), size) for size in (3 * MIB, 12 * MIB, 100 * MIB, 300 * MIB)]
    return [
        *(point(*each) for each in shapes),
        *(point(*each, role="held_out") for each in held_out),
        *(point(32, size, role="inflight", inflight=4) for size in (128 << 10, 2 * MIB, 8 * MIB)),
    ]


def coverage(true: CostModel, datasets: int) -> float:
    """How often an interval holds the true figure."""
    held = 0
    for seed in range(datasets):
        found = fit(points(true, 0.03, seed), seed)
        for figure in FIGURES:
            low, high = found.interval(figure) or (np.inf, 0.0)
            held += low <= (figure(true) or 0.0) <= high
    return held / (datasets * len(FIGURES))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_takes_no_part_in_the_model_that_it_judges(form: Form) -> None:
    """Rows far off any one model: each by the others' is far worse told than by a model that has seen it."""
    shape = Shape(form)
    rows = Rows(
        np.array([1.0, 100, 10, 40, 80]),
        np.array([1e3, 1e6, 2e5, 5e5, 1e4]),
        np.array([5e4, 1e6, 9e5, 3e5, 4e4]),
    )
    apart = []
    for number in (2, 3, 4):  # within what the others have of bytes and of descriptors
        left = [each for each in range(5) if each != number]
        model = solve(shape, Rows(rows.descriptors[left], rows.bytes[left], rows.ns[left]))
        guess = model.predict_ns(rows.descriptors[number], rows.bytes[number])
        apart.append(abs(guess / rows.ns[number] - 1))
    assert held_out_error(shape, rows) == pytest.approx(np.mean(apart))


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "BOOTSTRAPS", 100)


@pytest.mark.parametrize("true", [SUM, OVERLAP, KNEE], ids=["sum", "overlap", "knee"])
@pytest.mark.usefixtures("few_draws")
def test_without_noise_it_is_exact(true: CostModel) -> None:
    found = fit(points(true, 0.0, 0))
    assert found.model.form == true.form
    assert [band.from_bytes for band in found.model.bands] == [band.from_bytes for band in true.bands]
    for figure in FIGURES:
        assert figure(found.model) == pytest.approx(figure(true), rel=1e-3)
    assert found.errors()[-1] < 1e-3
    assert found.model.occupancy_ns == pytest.approx(true.occupancy_ns, abs=true.alpha_ns / 100)


@pytest.mark.usefixtures("few_draws")
def test_intervals_hold_what_is_true() -> None:
    assert coverage(SUM, 4) >= 10 / 12


@pytest.mark.slow
@pytest.mark.parametrize("true", [SUM, OVERLAP], ids=["sum", "overlap"])
def test_intervals_hold_what_is_true_about_as_often_as_they_say(true: CostModel) -> None:
    assert coverage(true, 40) >= 0.9


@pytest.mark.usefixtures("few_draws")
def test_intervals_hold_what_is_true_where_the_form_cannot_be_told(few_draws: None) -> None:
    """Posting that hides behind the wire in most requests: what fits them as a sum has hardly any of it."""
    true = CostModel("overlap", 400_000.0, 700.0, (Band(0, 0.2),), 10_000.0)
    found = [fit(points(true, 0.05, seed), seed) for seed in range(3)]
    assert "sum" in {one.model.form for one in found}
    for one in found:
        low, high = one.interval(lambda model: model.gamma_ns) or (np.inf, 0.0)
        assert low <= 700 <= high


def test_noise_alone_makes_no_further_bandwidths() -> None:
    assert all(len(fit(points(SUM, 0.03, seed)).model.bands) == 1 for seed in range(4))


@pytest.mark.usefixtures("few_draws")
def test_one_bandwidth_that_does_not_fit_is_told() -> None:
    found = fit(points(KNEE, 0.02, 3))
    record = found.as_record()
    assert len(record["bands"]) > 1
    one, *_, chosen = record["chosen_from"]
    assert one["breaks"] == []
    assert chosen["error_percent"] < 0.75 * one["error_percent"]
    assert record["held_out"]["median_percent"] < 10


@pytest.mark.usefixtures("few_draws")
def test_one_disturbed_request_does_not_bend_the_rest() -> None:
    calm = points(SUM, 0.0, 0)
    disturbed = [
        Point(each.descriptors, each.bytes, tuple(3 * ns for ns in each.process_ns)) if number == 9 else each
        for number, each in enumerate(calm)
    ]
    found = fit(disturbed).model
    assert found.gamma_ns == pytest.approx(SUM.gamma_ns, rel=0.1)
    assert found.bands[-1].ns_per_byte == pytest.approx(0.2, rel=0.05)


@settings(max_examples=15, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    alpha=st.floats(0, 1e6),
    gamma=st.floats(0, 1e4),
    per_byte=st.floats(0.01, 5),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    seed=st.integers(0, 1000),
)
def test_what_is_fitted_is_never_negative_and_never_falls(
    form: str, alpha: float, gamma: float, per_byte: float, noise: float, seed: int
) -> None:
    true = CostModel(form, alpha, gamma, (Band(0, per_byte),), alpha / 2)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "BOOTSTRAPS", 20)
        model = fit(points(true, noise, seed)).model
    assert min(model.alpha_ns, model.gamma_ns, model.occupancy_ns or 0.0) >= 0
    assert all(band.ns_per_byte >= 0 and band.step_ns >= 0 for band in model.bands)
    times = [model.predict_ns(100, size) for size in np.geomspace(1, 1e10, 200)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))


@pytest.mark.usefixtures("few_draws")
def test_the_record_predicts_what_the_fit_does() -> None:
    found = fit(points(SUM, 0.02, 1))
    record = found.as_record()
    read = from_record(record | {"backend": "tcp"})
    for point in found.points:
        assert point.error(read) == pytest.approx(point.error(found.model), abs=1e-6)
    assert record["valid"] == {"bytes": [2 * MIB, 512 * MIB], "descriptors": [32, 131_072], "inflight": 4}
    assert record["held_out"]["requests"] == 4


def test_bytes_that_seem_to_cost_nothing_may_cost_something() -> None:
    """Half of the redrawn fits give them 0.1 ns: so long they may take, and their bandwidth has no upper end."""

    def model(ns_per_byte: float) -> CostModel:
        return CostModel("sum", 1000.0, 10.0, (Band(0, ns_per_byte),))

    def beta(middle: float, *others: float) -> object:
        drawn = [model(each) for each in others for _ in range(50)]
        found = Fit(model(middle), Shape("sum"), [], drawn, points(SUM, 0.0, 0, processes=5))
        return found.as_record()["bands"][0]["beta_gbyte_s"]

    widened = math.sqrt(5 / 4)
    assert beta(0.0, 0.0, 0.1) == {"value": None, "ci95": [pytest.approx(1 / (0.1 * widened)), None]}
    assert beta(0.1, 0.0, 0.1) == {"value": pytest.approx(10), "ci95": [pytest.approx(10), None]}
    assert beta(0.0, 0.0, 0.0) is None


def refused(chosen: list[Point]) -> str:
    from kvxfer.errors import UsageError

    with pytest.raises(UsageError) as error:
        fit(chosen)
    return str(error.value)


def test_too_few_points_are_refused_and_it_says_how_many_it_needs() -> None:
    every = points(SUM, 0.0, 0)
    assert "at least 6 requests" in refused(every[:4])
    assert "here are 3, 3 too few; give a longer --tokens" in refused(every[:4])
    assert "here are 0, 6 too few; give a longer --tokens" in refused([])
    assert "at least 3 fresh starts" in refused(points(SUM, 0.0, 0, processes=2))


def test_points_that_do_not_tell_the_unknowns_apart_are_refused() -> None:
    alike = [Point(size // 65536, size, (size * 0.2,) * 3) for size in (2 * MIB * 2**step for step in range(8))]
    assert "bytes per descriptor differ by a factor of 4" in refused(alike)
    one_size = [Point(32 * 2**step, 8 * MIB, (1e6,) * 3) for step in range(8)]
    assert "requests whose bytes differ" in refused(one_size)


def test_an_interval_of_what_was_not_measured_is_none() -> None:
    found = Fit(SUM, None, [], [], [])  # type: ignore[arg-type]
    assert found.interval(lambda model: None) is None
