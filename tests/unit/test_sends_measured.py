"""What a row's own pipelining says of its sends."""

from __future__ import annotations

from typing import Any

import pytest
from example_result import example_result

from kvxfer.cost.measured import measured_rows
from kvxfer.errors import UsageError

MODEL = {"latency_ns": 1e4, "occupancy_ns": 2e4, "bandwidth_gbyte_s": 5.0}
COMPUTE = {"source": "assumed prefill (full)", "layers": 80, "layer_ns": 1000}


def row(**changes: Any) -> dict[str, Any]:
    (first, *_) = example_result()["results"]
    cuts = [{"cut": "1", "sends": 80, "exposed_ns": 7}, {"cut": "80", "sends": 1, "exposed_ns": 5}]
    pipeline = {"compute": COMPUTE, "cuts": cuts, "best": {"cut": "80"}, "model": MODEL} | changes
    return first | {"pipeline": pipeline}


def test_they_are_told_from_one_layer_to_all_of_them() -> None:
    (found,) = measured_rows([row()], "network")
    assert found.sends is not None
    assert (found.sends.latency_ns, found.sends.occupancy_ns, found.sends.gbyte_s) == (1e4, 2e4, 5.0)
    assert found.sends.reach is not None
    assert found.sends.reach.bytes == (found.bytes / 80, found.bytes)


def test_a_row_whose_cuts_had_as_many_sends_does_not_tell_what_one_costs() -> None:
    """Serial alone, as `--pipeline 80` measures it: its model has sends for nothing."""
    alone = {"cut": "80", "sends": 1, "exposed_ns": 5}
    (found,) = measured_rows([row(cuts=[alone], model=MODEL | {"occupancy_ns": 0.0})], "network")
    assert found.exposed_ms == 5e-6
    assert found.sends is None


@pytest.mark.parametrize(
    "damage",
    [
        7,
        {},
        MODEL | {"latency_ns": -1},
        MODEL | {"bandwidth_gbyte_s": 0},
        MODEL | {"bandwidth_gbyte_s": 5e-324},
        MODEL | {"bandwidth_gbyte_s": "fast"},
    ],
)
def test_a_damaged_model_is_refused_by_name(damage: Any) -> None:
    with pytest.raises(UsageError, match=r"row 'tcp-512' has pipeline.model"):
        measured_rows([row(model=damage)], "network")


@pytest.mark.parametrize("field", ["layers", "layer_ns"])
def test_numbers_that_no_row_has_are_refused(field: str) -> None:
    with pytest.raises(UsageError, match=r"row 'tcp-512' has pipeline.compute"):
        measured_rows([row(compute=COMPUTE | {field: 10**400}, model=MODEL)], "network")
