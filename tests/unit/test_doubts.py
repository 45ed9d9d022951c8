"""What bench says against a measured figure, a plan that goes by it says too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_result import cost_model, example_result

from kvxfer import plan
from kvxfer.cost.doubts import doubts
from kvxfer.cost.fitted import fitted_models
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.prefill_layers import PrefillLayers

Captured = pytest.CaptureFixture[str]
QUIET = {"noisy": False, "converged": True, "hot": False}


def told(**against: Any) -> list[str]:
    rows = example_result()["results"]
    ok = [row | QUIET for row in rows if row["status"] == "ok"]
    return doubts(measured_rows([ok[0] | against, *ok[1:]], "network"), [], None)


def test_of_rows_that_nothing_speaks_against_nothing_is_said() -> None:
    assert told() == []
    assert told(hot=None) == []  # the size of the caches is not known


@pytest.mark.parametrize(
    ("against", "why"),
    [
        ({"noisy": True}, "others used the CPUs meanwhile"),
        ({"converged": False}, "time was over before the median was certain"),
        ({"hot": True}, "data stayed in the CPU caches"),
    ],
)
def test_each_reason_names_backend_op_and_lengths(against: dict[str, Any], why: str) -> None:
    (sentence,) = told(**against)
    assert sentence.startswith("beware of tcp push, measured at 512 tokens: ")
    assert why in sentence


def test_a_cost_model_and_real_layers_are_doubted_too() -> None:
    models = fitted_models([cost_model(), cost_model() | {"noisy_share": 0.0}])
    (sentence,) = doubts([], models, None)
    assert "others used the CPUs during 25.0% of its requests" in sentence
    layers = PrefillLayers([(512, 10.0)], "float32", "here", False, 1, (0.5, 0.5))
    assert doubts([], [], layers) == []
    (sentence,) = doubts([], [], PrefillLayers([(512, 10.0)], "float32", "here", False, 1, (0.5, 0.5), noisy=True))
    assert "prefill of real layers" in sentence


def test_plan_says_it_of_the_cache_that_is_asked_for(tmp_path: Path, capsys: Captured) -> None:
    result = example_result()
    for row in result["results"]:
        row |= {"noisy": True}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    for model, said in (("70b", True), ("8b", False)):
        assert plan.main(["--model", model, "--measured", str(path), "--json", "-"]) == 0
        notices = json.loads(capsys.readouterr().out)["notices"]
        assert any("beware of tcp push, measured at" in notice for notice in notices) is said
