"""What is said of each cut, of times that a pair of made-up speed would have measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer.cache.sends import Cut
from kvxfer.cache.spec import CacheSpec
from kvxfer.control.messages import LayersBuilt, Pipelined
from kvxfer.cost.pipeline import Link
from kvxfer.errors import UnavailableError
from kvxfer.measure.pipeline import PipelineRun, best_and_ties
from kvxfer.measure.request import ComputeKind, Effort, Pipelining, Row
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

MS = 1_000_000
LAYER_NS = 1 * MS
ROW = Row(CacheSpec(load_model("8b"), resolve_dtype("bf16"), 16), "tcp", "push", 64)
COMPUTE_MS = ROW.layers
ANY_LAYER = "full attention, 8 KV heads of 128; MLP of 14,336"


class SteadyPair:
    """Every sample of a cut takes its time: (the sends alone, exposed behind compute), in ms."""

    row = ROW

    def __init__(self, times: dict[str, tuple[float, float]], chunk_factor: float = 1.0) -> None:
        self._times = times
        self._chunk_factor = chunk_factor  # of compute in chunks, to that of the whole prompt

    def build_layers(self, _: object) -> LayersBuilt:
        return LayersBuilt(1, [[LAYER_NS]], 1e12, "as here", False)

    def run_verified(self, request: Callable[[], object]) -> None:
        request()

    def pipelined(
        self, cut: Cut, layer_ns: list[int], compute: str = "timed", sends: str = "all", order: Sequence[int] = ()
    ) -> Pipelined:
        assert len(order) == (ROW.layers if compute == "layers" else 0)
        busy = ROW.layers * sum(layer_ns) * (self._chunk_factor if len(layer_ns) > 1 else 1.0)
        alone_ms, exposed_ms = (0.0, 0.0) if sends == "none" else (1.0, 1.0)
        if sends == "all":
            alone_ms, exposed_ms = self._times[str(cut)]
        total = busy + MS * (exposed_ms if busy else alone_ms)
        if sends == "first":
            return Pipelined(*(_times(one) for one in (total, busy, busy, total)), [1], [ROW.bytes // ROW.layers], 0, 0)
        after = [end for _ in layer_ns for end in [*range(cut.layers, ROW.layers, cut.layers), ROW.layers]]
        parts = (_times(*[one] * len(after)) for one in (busy, total))
        return Pipelined(_times(total), _times(busy), *parts, after, [ROW.bytes // len(after)] * len(after), 0, 0)


def _times(*ns: float) -> bytes:
    return np.array([round(one) for one in ns], np.int64).tobytes()


def measured(pair: Any, *cuts: Cut, compute: ComputeKind = "timed") -> dict[str, Any]:
    asked = Pipelining(cuts, compute, {ROW.tokens: LAYER_NS}, "--compute")
    return PipelineRun(pair, asked, Effort(max_seconds=0)).run(lambda _: None)


def by_name(pipeline: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cut["cut"]: cut for cut in pipeline["cuts"]}


def test_what_is_hidden_is_a_share_of_the_cut_s_own_transfer() -> None:
    """17.5 ms of sends by layers, of which 4.7 are exposed; that serial's take 25.9 is no compute's doing."""
    cuts = by_name(measured(SteadyPair({"1": (17.5, 4.7), "2": (16.0, 20.0), "32": (25.9, 25.9)}), Cut(1), Cut(2)))
    assert round(cuts["1"]["hidden_share"], 3) == round(1 - 4.7 / 17.5, 3)
    assert cuts["2"]["hidden_share"] == -0.25  # slower than with nothing to wait for
    assert cuts["32"]["hidden_share"] == 0


def test_what_chunks_cost_is_not_the_transfer_s_doing() -> None:
    """Compute in chunks takes a quarter longer, with something to send or without."""
    pair = SteadyPair({"1": (10, 2), "1x16": (10, 2), "4x16": (10, 3), "32": (10, 10)}, chunk_factor=1.25)
    found = measured(pair, Cut(1), Cut(1, 16), Cut(4, 16))
    compute, cuts = found["compute"], by_name(found)
    assert compute["alone_p50_ns"] == COMPUTE_MS * MS
    (chunked,) = compute["chunked"]
    assert (chunked["chunk_tokens"], chunked["alone_p50_ns"]) == (16, round(1.25 * COMPUTE_MS * MS))
    assert len(chunked["alone_samples_ns"]) == found["rounds"]
    assert cuts["1x16"]["total_p50_ns"] == cuts["1"]["total_p50_ns"] + COMPUTE_MS * MS // 4
    assert [cuts[name]["exposed_ns"] for name in ("1", "1x16", "4x16")] == [2 * MS, 2 * MS, 3 * MS]
    assert {cut["slowdown"] for cut in cuts.values()} == {0}


def test_what_a_send_costs_is_told_by_cuts_of_other_numbers_of_sends_in_chunks_too() -> None:
    """Each send 1 ms, all bytes 9: 4 chunks take 13 ms, 32 sends of layers 41, and one for all 10."""
    for times, cuts, occupancy_ms, told in (
        ({"1": (41, 9)}, [Cut(1)], 1, True),
        ({"1": (41, 9), "32x16": (99, 9)}, [Cut(1), Cut(32, 16)], 1, True),
        ({"32x16": (13, 3)}, [Cut(32, 16)], 1, True),
        ({}, [Cut(32)], 0, False),
    ):
        found = measured(SteadyPair({"32": (10, 10)} | times), *cuts)
        assert found["model"]["occupancy_ns"] == pytest.approx(occupancy_ms * MS)
        assert (found["best"]["predicted_layers"] is not None) is told


def test_compute_of_no_time_is_not_slower_beside_transfers() -> None:
    asked = Pipelining((Cut(1),), "timed", {ROW.tokens: 0}, "--compute")
    pair: Any = SteadyPair({"1": (41, 9), "32": (10, 10)})
    found = PipelineRun(pair, asked, Effort(max_seconds=0)).run(lambda _: None)
    assert [cut["slowdown"] for cut in found["cuts"]] == [0, 0]


def test_of_real_layers_the_share_that_was_built_is_told() -> None:
    compute = measured(SteadyPair({"1": (10, 2), "32": (10, 10)}), Cut(1), compute="layers")["compute"]
    assert (compute["layer_ns"], compute["devices"]) == (LAYER_NS, 2)
    assert compute["kinds"] == [{"what": ANY_LAYER, "layers": ROW.layers, "samples_ns": [LAYER_NS]}]
    assert compute["mfu"] == compute["flop"] / (ROW.layers * LAYER_NS / 1e9) / 1e12
    assert compute["source"].startswith("as here, real layers of random weights, one of its kind repeated, 1/2 of each")


def test_predictions_weigh_the_layers_by_what_they_keep() -> None:
    """The last layer of gemma-3 keeps a window of 65 blocks, 131,072 B each: a link that keeps up leaves those."""
    pair = SteadyPair({})
    pair.row = Row(CacheSpec(load_model("gemma-3-27b"), resolve_dtype("bf16"), 16), "tcp", "push", 32_768)
    run = PipelineRun(pair, Pipelining((Cut(1),), "timed", {32_768: 50 * MS}, "--compute"), Effort())  # type: ignore[arg-type]
    link = Link(latency_ns=0, occupancy_ns=0, gbyte_s=10)
    assert run._predicted_ns(link, 32_768, 1) == pytest.approx(65 * 131_072 / 10)
    assert run._predicted_ns(link, 32_768, 62) == pytest.approx(pair.row.bytes / 10)
    assert run._predicted_ns(link, 160, 1) == pytest.approx(10 * 131_072 / 10)  # of which a window has all


def test_what_takes_too_long_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.measure.pipeline.LONGEST_REQUEST_S", 1e-3)
    with pytest.raises(UnavailableError, match="32 layers take 0 s for 64 tokens in as here"):
        measured(SteadyPair({"1": (10, 2), "32": (10, 10)}), Cut(1), compute="layers")


@pytest.mark.parametrize(
    ("samples", "tied"),
    [
        ([[633, 640, 717], [617, 650, 655]], True),
        ([[617, 620, 630], [631, 650, 655]], False),
        ([[617, 620, 631], [631, 632, 633]], True),
    ],
)
def test_of_few_samples_cuts_whose_samples_overlap_are_not_told_apart(samples: list[list[int]], tied: bool) -> None:
    cuts = [
        {"cut": str(number), "total_p50_ns": sorted(each)[1], "total_ci95_ns": None, "total_samples_ns": each}
        for number, each in enumerate(samples)
    ]
    assert best_and_ties(cuts) == ("0", ["1"] if tied else [])
