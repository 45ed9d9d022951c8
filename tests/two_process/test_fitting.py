"""`bench --fit` as a whole: what it measures, what it writes, and that it ends as any bench does."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kvxfer.cost.model import from_record

from .processes import ELEMENT_BYTES, HEAD_DIM, KV_HEADS, LAYERS, Place, prefill_worker
from .test_runs import check

FIT = ("--fit", "--fit-seconds", "0.5")
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_DIM * ELEMENT_BYTES["bf16"]
WITHIN_S = 300
"""Some 80 pairs of processes."""


@pytest.mark.slow
def test_a_cost_model_of_each_backend(place: Place) -> None:
    path = place.directory / "fitted.json"
    arguments = ("--backend", "tcp,shm", "--tokens", "2048,4096", "--min-samples", "5", *FIT, "--json", str(path))
    done = place.bench(*arguments, seconds=2 * WITHIN_S)
    assert done.status == 0, done
    assert "Cost model (loopback, host)" in done.out
    assert "Requests held out: shm, bf16, push" in done.out
    result = json.loads(path.read_text())
    check(result)
    assert [model["backend"] for model in result["cost_model"]] == ["tcp", "shm"]
    assert [model["scope"] for model in result["cost_model"]] == ["loopback", "host"]
    for model in result["cost_model"]:
        assert model["processes"] == 3
        assert model["valid"]["bytes"] == [TOKEN_BYTES, 4096 * TOKEN_BYTES]
        assert model["valid"]["descriptors"] == [LAYERS, 4096 // 16 * LAYERS]
        assert model["held_out"]["requests"] == 6
        assert from_record(model).occupancy_ns is not None
        fitted = {(one["bytes"], one["descriptors"]) for one in model["points"] if one["role"] == "fit"}
        held_out = [one for one in model["points"] if one["role"] == "held_out"]
        assert not fitted & {(one["bytes"], one["descriptors"]) for one in held_out}
        for point in model["points"]:
            blocks = point["tokens"] // point["block_size"]
            runs = 1 + round(point["fragmentation"] * (blocks - 1))
            assert (point["bytes"], point["descriptors"]) == (point["tokens"] * TOKEN_BYTES, runs * LAYERS)
            assert min(point["process_ns"]) > 0


def test_a_prompt_that_is_too_short_for_a_grid_is_refused(place: Place) -> None:
    """Of one block there are not six requests; the row itself is measured and written."""
    path = place.directory / "short.json"
    done = place.bench("--tokens", "1", "--block-size", "1", "--backend", "tcp", *FIT, "--json", str(path))
    done.failed(2, "no cost model of tiny in bf16 over tcp, push: a cost model takes at least 6 requests")
    assert "too few; give a longer --tokens" in done.err
    result = json.loads(path.read_text())
    assert [row["status"] for row in result["results"]] == ["ok"]
    assert result["cost_model"] == []
    assert result["exit_status"] == 2


def test_what_moves_nothing_has_no_cost(place: Place) -> None:
    place.bench("--backend", "null", *FIT).failed(2, "--fit: backend null moves nothing")


@pytest.mark.parametrize("seconds", ["0", "-1", "x"])
def test_wrong_seconds(place: Place, seconds: str) -> None:
    place.bench("--fit", "--fit-seconds", seconds).failed(2, "--fit-seconds")


def test_interrupted_it_keeps_what_was_measured(place: Place) -> None:
    path = place.directory / "interrupted.json"
    bench = place.start_bench("--backend", "tcp", "--fit", "--json", str(path), "--tokens", "2048", terminal=True)
    bench.says("cost model of")
    bench.signal(signal.SIGINT)
    done = bench.wait(10)
    assert done.status == 130
    assert done.err.strip().splitlines()[-2:] == [
        "kvxfer bench: error: the cost models were not finished",
        "kvxfer bench: interrupted",
    ]
    result = json.loads(path.read_text())
    assert [row["status"] for row in result["results"]] == ["ok"]
    assert result["cost_model"] == []
    place.left_alone()


def test_a_lost_worker_ends_it(place: Place) -> None:
    bench = place.start_bench("--backend", "tcp", "--fit", "--tokens", "2048", terminal=True)
    bench.says("cost model of")
    os.kill(prefill_worker(bench), signal.SIGKILL)
    done = bench.wait(20)
    assert done.status == 5, done
    assert "no cost model of tiny in bf16 over tcp, push: " in done.err
    place.left_alone()
