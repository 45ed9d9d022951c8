"""Cost models as they are printed."""

from __future__ import annotations

import io
from typing import Any

from example_result import example_result
from rich.console import Console

from kvxfer.result.cost_table import render_cost_models


def printed(models: list[dict[str, Any]]) -> str:
    console = Console(width=120, file=io.StringIO())
    render_cost_models(models, "loopback", console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_figures_stand_with_their_intervals() -> None:
    text = printed(example_result()["cost_model"])
    assert "Cost model (loopback)" in text
    assert "63.7 (57.3 – 70.1)" in text  # α in µs
    assert "27.2 (24.5 – 29.9)" in text  # hidden
    assert "0.151 (0.136 – 0.166)" in text  # γ in µs
    assert "5.29 (5.13 – ∞)" in text
    assert "3.2 (3.2)" in text
    assert "T = α + γ·pieces + bytes/β, from 5.24 MB to 83.9 MB in 80 to 1,280 pieces, up to 4 requests at once" in text


def test_bandwidths_that_differ_are_told() -> None:
    (model,) = example_result()["cost_model"]
    told = "one β does not fit: at first 9.10 GB/s; 5.29 GB/s and 20.5 µs once for what is beyond 4.19 MB"
    assert told in " ".join(printed([model]).split())
    one_band = model | {"bands": model["bands"][:1]}
    assert "one β does not fit" not in printed([one_band])


def test_bytes_that_take_no_time_that_shows_have_a_least_bandwidth() -> None:
    (model,) = example_result()["cost_model"]
    unknown = {"value": None, "ci95": [20.0, None]}
    model["beta_gbyte_s"] = model["bands"][1]["beta_gbyte_s"] = unknown
    text = " ".join(printed([model]).split())
    assert "∞ (20.0 – ∞)" in text
    assert "at first 9.10 GB/s; no time that shows (at least 20.0 GB/s) and 20.5 µs once" in text
    model["bands"][1]["beta_gbyte_s"] = None
    assert "at first 9.10 GB/s; no time that shows and 20.5 µs once" in " ".join(printed([model]).split())


def test_requests_held_out_stand_beside_their_prediction() -> None:
    text = printed(example_result()["cost_model"])
    assert "Requests held out: tcp, bf16, push" in text
    assert "8.00       8.26   +3.2" in text


def test_what_was_not_measured_has_no_figure() -> None:
    (model,) = example_result()["cost_model"]
    bare = model | {"latency_ns": None, "occupancy_ns": None, "held_out": None, "points": []}
    text = printed([bare])
    assert "hidden" not in text.splitlines()[2]
    assert "Requests held out" not in text


def test_noise_is_told() -> None:
    (model,) = example_result()["cost_model"]
    assert "noisy: others used the CPUs during 25 % of its requests" in printed([model])
    assert "noisy" not in printed([model | {"noisy_share": 0.0}])


def test_no_models_no_table() -> None:
    assert printed([]) == ""
