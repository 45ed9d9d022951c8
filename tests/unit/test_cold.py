"""Cold: the first request of a pair of running engines, as measured, as predicted beside a cost model, as printed."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from example_result import PHASES, cost_model, example_result, ok_row
from rich.console import Console

from kvxfer import plan
from kvxfer.cost.cold import cold_record
from kvxfer.cost.fitted import fitted_models
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.points import Point
from kvxfer.cost.predicted import predicted_entries
from kvxfer.errors import UsageError
from kvxfer.result.cold import COLD_PHASES, cold_pair
from kvxfer.result.file import read_result
from kvxfer.result.tables import render

BENCH = Path(__file__).parents[2] / "bench" / "results"
FITS = sorted(BENCH.glob("*-cost-model-*.json"))


# --- measured


def test_it_is_what_two_running_engines_wait_for_and_not_their_start() -> None:
    (first, *_) = example_result()["results"]
    setup = first["setup"]
    kept = ("connect", "exchange", "prepare", "first")
    expected = [sum(setup[f"{phase}_ns"]["samples"][start] for phase in kept) for start in range(5)]
    assert cold_pair(setup) == {"p50": median(expected), "max": max(expected), "samples": expected}
    left_out = [f"{phase}_ns" for phase in PHASES if phase not in kept]
    for start, cold in enumerate(expected):
        assert cold + sum(setup[phase]["samples"][start] for phase in left_out) == setup["cold_ns"]["samples"][start]
    (measured,) = measured_rows([first], "network")
    assert measured.cold_pair_ms == pytest.approx(median(expected) / 1e6)
    assert measured.cold_pair_longest_ms == pytest.approx(max(expected) / 1e6)


def test_it_is_the_median_of_the_sums_and_not_the_sum_of_medians() -> None:
    setup = copy.deepcopy(ok_row(512, 50_000_000)["setup"])
    for phase, samples in {"connect_ns": [0, 9, 9], "prepare_ns": [9, 0, 9], "first_ns": [9, 9, 0]}.items():
        setup[phase]["samples"] = samples
    setup["exchange_ns"]["samples"] = [0, 0, 1]
    assert cold_pair(setup)["samples"] == [18, 18, 19]


def test_a_row_without_these_phases_does_not_tell_it() -> None:
    (first, *_) = example_result()["results"]
    del first["setup"]["exchange_ns"]
    for damaged in (first, first | {"setup": None}):
        (measured,) = measured_rows([damaged], "network")
        assert (measured.cold_pairs_ms, measured.cold_pair_ms, measured.cold_pair_longest_ms) == ((), None, None)


@pytest.mark.parametrize("damage", [3, {"p50": 1}, {"samples": [1, "2"]}, {"samples": [-1] * 5}, {"samples": [1]}])
def test_damaged_phases_are_refused_by_name(damage: Any) -> None:
    (first, *_) = example_result()["results"]
    first["setup"]["exchange_ns"] = damage
    with pytest.raises(UsageError, match="row 'tcp-512' has setup"):
        measured_rows([first], "network")


# --- fitted and predicted


def starts(cold_ns: Sequence[float]) -> tuple[dict[str, int], ...]:
    """Fresh starts whose phases add up to these."""
    return tuple(
        {"connect_ns": 900_000, "exchange_ns": 600_000, "prepare_ns": 500_000, "first_ns": round(ns) - 2_000_000}
        for ns in cold_ns
    )


def grid(scatter: Sequence[float] = (0.9, 1.0, 1.3)) -> list[Point]:
    """3 ms, 1 µs a piece and 4 GB/s for a first request; later ones in half of that."""
    found = []
    for place in range(10):
        size = 1_000_000 << place
        for pieces in (32, size // 16_384):
            ns = 3e6 + 1e3 * pieces + size / 4
            found.append(Point(pieces, size, (ns / 2,) * 3, starts=starts([ns * each for each in scatter])))
    held_out = Point(500, 50_000_000, (1e6,) * 3, "held_out", starts=starts([16e6] * 3))
    return [*found, held_out, Point(32, 1_000_000, (1e6,) * 3, "inflight", 4, starts=starts([1e9] * 3))]


def test_it_is_fitted_on_the_starts_and_on_no_later_transfer() -> None:
    cold = cold_record(grid())
    found = [cold[name]["value"] for name in ("alpha_ns", "gamma_ns", "beta_gbyte_s")]
    assert found == pytest.approx([3e6, 1e3, 4.0], rel=1e-3)
    assert cold["spread"] == pytest.approx([0.9, 1.3], rel=1e-3)
    expected = 3e6 + 500e3 + 50e6 / 4
    assert cold["held_out"]["median_percent"] == pytest.approx(100 * (1 - expected / 16e6), rel=1e-2)


@pytest.mark.parametrize("scatter", [(1.0, 1.0, 1.0), (0.5, 1.0, 9.0)])
def test_its_interval_is_that_of_single_starts(scatter: tuple[float, ...]) -> None:
    low, high = cold_record(grid(scatter))["spread"]
    assert [low, high] == pytest.approx([min(scatter), max(scatter)], rel=1e-2)


def test_by_hand() -> None:
    """3.1 ms, 1.05 µs a piece and 4.2 GB/s; 95 % of single starts took 0.8 to 1.4 times as long."""
    (model,) = fitted_models([cost_model()])
    (entry,) = predicted_entries([model], 41_943_040, 640, 50.0)
    expected = 3.1 + 640 * 1.05e-3 + 41.943040 / 4.2
    assert entry["cold_pair_ms"] == pytest.approx(expected)
    assert (entry["cold_pair_low_ms"], entry["cold_pair_high_ms"]) == pytest.approx((0.8 * expected, 1.4 * expected))
    assert entry["cold_pair_percent"] == pytest.approx(expected / 50 * 100)


@pytest.mark.parametrize("size", [5_242_879, 83_886_081])
def test_outside_the_range_nothing_is_predicted(size: int) -> None:
    (model,) = fitted_models([cost_model()])
    assert model.predict_cold(size, 640) is None


def test_of_a_model_that_was_fitted_without_it_nothing_is_known() -> None:
    record = cost_model()
    del record["cold"]
    for known in (record, record | {"cold": None}):
        (entry,) = predicted_entries(fitted_models([known]), 41_943_040, 640, 50.0)
        assert entry["transfer_ms"] is not None
        names = ("cold_pair_ms", "cold_pair_low_ms", "cold_pair_high_ms", "cold_pair_percent")
        assert [entry[name] for name in names] == [None] * 4


@pytest.mark.parametrize(
    "damage", [3, {}, {"spread": [1]}, {"spread": [1, "x"]}, {"spread": None}, {"bands": []}, {"alpha_ns": None}]
)
def test_a_damaged_one_is_refused(damage: Any) -> None:
    record = cost_model()
    record["cold"] = record["cold"] | damage if damage and isinstance(damage, dict) else damage
    with pytest.raises(UsageError, match="cost model of 'tcp' in the result is damaged"):
        fitted_models([record])


def test_what_is_committed_follows_from_its_points() -> None:
    for path in FITS:
        for record in read_result(path)["cost_model"]:
            points = [point_of(each) for each in record["points"]]
            found, known = cold_record(points), record["cold"]
            assert found["spread"] == pytest.approx(known["spread"], rel=1e-4)
            for figure in ("alpha_ns", "gamma_ns"):
                assert found[figure]["value"] == pytest.approx(known[figure]["value"], rel=1e-4)


@pytest.mark.parametrize("path", FITS, ids=lambda path: path.stem)
def test_of_committed_runs_it_predicts_as_the_page_says(path: Path) -> None:
    """Requests that the fit never saw, and rows of other lengths with starts of their own."""
    page = (BENCH.parents[1] / "docs" / "how-it-measures.md").read_text(encoding="utf-8")
    result = read_result(path)
    (record,) = result["cost_model"]
    (one,) = fitted_models([record])
    errors = []
    for each in result["results"]:
        cold = one.predict_cold(each["bytes"], each["descriptors"])
        assert cold is not None
        errors.append(100 * abs(cold.ms * 1e6 / cold_pair(each["setup"])["p50"] - 1))
    held_out = record["cold"]["held_out"]["median_percent"]
    assert f"| {one.backend} {one.op} | {held_out:.1f} % | {median(errors):.1f} % |" in page


def point_of(record: dict[str, Any]) -> Point:
    samples = [record["setup"][phase]["samples"] for phase in COLD_PHASES]
    return Point(
        descriptors=record["descriptors"],
        bytes=record["bytes"],
        process_ns=tuple(map(float, record["process_ns"])),
        role=record["role"],
        inflight=record["inflight"],
        starts=tuple(dict(zip(COLD_PHASES, each, strict=True)) for each in zip(*samples, strict=True)),
    )


# --- printed


def printed(result: dict[str, Any]) -> str:
    printed = io.StringIO()
    render(result, Console(width=120, file=printed))
    return " ".join(printed.getvalue().split())


def test_both_are_printed_under_their_names() -> None:
    result = example_result()
    setup = result["results"][0]["setup"]
    text = printed(result)
    for what, phase in (("from start: all of it", setup["cold_ns"]), ("cold: connect … first", cold_pair(setup))):
        assert f"{what} {phase['p50'] / 1e6:,.1f} ({phase['max'] / 1e6:,.1f})" in text
    entry = result["ratio"][0]["measured"][0]
    told = f"{entry['cold_pair_ms']:,.0f} ({entry['cold_pair_percent']:.0f}%) {entry['cold_pair_longest_ms']:,.0f}"
    assert told in text
    for field in [field for field in entry if field.startswith("cold_pair")]:
        del entry[field]  # as in a result of an earlier kvxfer
    assert "912 (127%) not known" in printed(result)


def test_plan_tells_cold_of_measured_and_predicted_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = example_result()
    path = tmp_path / "result.json"
    for with_setup in (True, False):
        if not with_setup:
            result["cost_model"][0]["cold"] = None
            for each in result["results"]:
                each["setup"] = None
        path.write_text(json.dumps(result))
        argv = ["--model", "70b", "--tokens", "200,8192", "--measured", str(path)]
        assert plan.main([*argv, "--json", "-"]) == 0
        rows = json.loads(capsys.readouterr().out)["ratio"]
        (measured,) = next(each["measured"] for each in rows if each["tokens"] == 8192)
        (predicted,) = next(each["predicted"] for each in rows if each["tokens"] == 200)
        assert plan.main(argv) == 0
        text = capsys.readouterr().out
        if with_setup:
            assert measured["cold_pair_over_steady"] == pytest.approx(
                measured["cold_pair_ms"] / measured["transfer_ms"]
            )
            assert predicted["cold_pair_ms"] > predicted["transfer_ms"]
            assert "not known" not in text
        else:
            assert (measured["cold_pair_ms"], predicted["cold_pair_ms"]) == (None, None)
            assert predicted["transfer_ms"] is not None
            assert "not known" in text
