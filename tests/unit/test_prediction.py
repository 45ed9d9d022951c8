"""The committed measurements of pipelining: their predictions follow from their samples, and are good enough."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median
from types import ModuleType

import jsonschema
import numpy as np
import pytest

from kvxfer.cache.sends import send_ends
from kvxfer.cost.pipeline import computed_sends, exposed_ns, fit_link
from kvxfer.result.file import read_result, schema

BENCH = Path(__file__).parents[2] / "bench"
RESULTS = sorted((BENCH / "results").glob("*-pipelining-*.json"))
GOAL = 0.15
"""Of the serial transfer: how far the prediction may be from what was measured, at the median."""


@pytest.fixture(scope="module")
def prediction() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prediction", BENCH / "prediction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_predictions_are_within_the_goal(prediction: ModuleType) -> None:
    rows = prediction.pipelined_rows(RESULTS)
    assert {(row["backend"], row["op"]) for row in rows} == {
        (backend, op) for backend in ("tcp", "shm", "cma") for op in ("push", "pull")
    }
    assert sum(len(row["pipeline"]["cuts"]) for row in rows) >= 36
    every = [abs(error) for row in rows for _, error in prediction.errors(row)]
    assert median(every) <= GOAL


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figures_follow_from_the_samples(path: Path) -> None:
    result = read_result(path)
    jsonschema.validate(result, schema())
    for row in result["results"]:
        pipeline = row["pipeline"]
        compute, cuts = pipeline["compute"], pipeline["cuts"]
        alone = [(cut["sends"], float(np.median(cut["alone_samples_ns"]))) for cut in cuts]
        part = row["bytes"] / compute["layers"], round(float(np.median(pipeline["model"]["one_layer_ns"])))
        link = fit_link(row["bytes"], alone, part)
        for cut in cuts:
            total = np.median(cut["total_samples_ns"])
            assert cut["exposed_ns"] == pytest.approx(total - compute["alone_p50_ns"], abs=1)
            layers, together = compute["layers"], cut["layers_per_send"]
            compute_ns = float(compute["layer_ns"] * layers)
            parts = [min(together, layers - first) for first in range(0, layers, together)]
            weights = [(row["bytes"] * part / layers, 0.0) for part in parts]
            after = send_ends([range(layers)], together)
            predicted = exposed_ns(computed_sends([(compute_ns, weights)], after), link, compute_ns)
            assert cut["predicted_exposed_ns"] == pytest.approx(predicted, rel=1e-4, abs=1000)


def test_the_script_says_the_median_error(prediction: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert prediction.main([str(path) for path in RESULTS]) == 0
    assert "median error" in capsys.readouterr().out.splitlines()[-1]
    assert prediction.main([str(BENCH / "results" / "2026-11-30-epyc-2cpu-70b-tcp-loopback.json")]) == 2
