"""Line rates: α of a transfer and γ of its pieces are assumptions, and said to be, with what they may add."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_result import cost_model, example_result
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvxfer import plan
from kvxfer.asked import Options, read
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.beside_bytes import line_rate_notices
from kvxfer.cost.fitted import fitted_models
from kvxfer.cost.priors import TCP_ALPHA_US, TCP_GAMMA_US
from kvxfer.cost.ratio import line_rate_ms, wire_ms
from kvxfer.model.dtypes import BF16
from kvxfer.result.file import read_result, schema

Captured = pytest.CaptureFixture[str]

BENCH = Path(__file__).parents[2] / "bench" / "results"


def planned(capsys: Captured, *argv: str) -> dict[str, Any]:
    assert plan.main(["--model", "70b", *argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def transfer_ms(document: dict[str, Any], link: int = 0) -> float:
    return float(document["ratio"][0]["links"][link]["transfer_ms"])


def test_every_piece_costs_gamma_and_blocks_that_join_are_one_piece(capsys: Captured) -> None:
    argv = ["--tokens", "8192", "--link", "100,400"]
    without = planned(capsys, *argv)
    with_gamma = planned(capsys, *argv, "--gamma-us", "2.5", "--fixed-ms", "3")
    for link in (0, 1):
        added = transfer_ms(with_gamma, link) - transfer_ms(without, link)
        assert added == pytest.approx(3 + 2.5e-3 * 40_960)
    assert "gamma_us" not in without["assumptions"]
    assert with_gamma["assumptions"]["gamma_us"] == 2.5
    Draft202012Validator(schema()["properties"]["assumptions"]).validate(with_gamma["assumptions"])
    joined = planned(capsys, *argv, "--gamma-us", "2.5", "--fragmentation", "0")
    assert transfer_ms(joined) - transfer_ms(without) == pytest.approx(2.5e-3 * 80)
    apart = planned(capsys, *argv, "--gamma-us", "2.5", "--regions", "2")
    assert transfer_ms(apart) - transfer_ms(without) == pytest.approx(2.5e-3 * 2 * 40_960)


@pytest.mark.parametrize("links", ["shared", "per-rank"])
def test_ranks_post_their_own_pieces_at_the_same_time(links: str, capsys: Captured) -> None:
    """Of 8 ranks each has as many pieces as one alone would have, an eighth as long; of 4 stages each a fourth."""
    argv = ["--tokens", "8192", "--link", "100", "--gpus", "8", "--links", links]
    for ranks, pieces in ((["tp", "8"], 40_960), (["pp", "4"], 10_240)):
        named = [word for side in ("prefill", "decode") for word in (f"--{ranks[0]}-{side}", ranks[1])]
        without, with_gamma = (transfer_ms(planned(capsys, *argv, *named, "--gamma-us", us)) for us in ("0", "2"))
        assert with_gamma - without == pytest.approx(2e-3 * pieces)


def test_what_is_serial_in_the_pipelining_model_is_the_transfer_of_the_ratio(capsys: Captured) -> None:
    costs = ["--fixed-ms", "2", "--send-ms", "0.5", "--gamma-us", "2.4", "--tokens", "512,8192", "--pipeline", "best"]
    stages = ["--pp-prefill", "4", "--pp-decode", "2", "--links", "per-rank"]
    for ranks in ([], ["--tp-prefill", "4", "--tp-decode", "8"], stages):
        document = planned(capsys, *costs, *ranks)
        serial = {row["tokens"]: [link["transfer_ms"] for link in row["links"]] for row in document["ratio"]}
        for number, path in enumerate(document["plan"]["split"]):
            for prompt in path["pipelined"]["prompts"]:
                assert prompt["serial_ms"] == pytest.approx(serial[prompt["tokens"]][number])
                assert 0 <= prompt["exposed_ms"] <= prompt["serial_ms"]


WEIGHTS = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)), max_size=4)


@settings(max_examples=50)
@given(WEIGHTS, st.floats(1, 1e4), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 100))
def test_a_line_rate_never_falls_with_alpha_gamma_or_bytes(
    weights: list[tuple[int, int]], gbit: float, alpha_ms: float, gamma_us: float, more: float
) -> None:
    one = Assumptions(fixed_ms=alpha_ms, gamma_us=gamma_us)
    ms = line_rate_ms(weights, gbit, one)
    assert ms >= max((wire_ms(size, gbit) for size, _ in weights), default=0)
    assert line_rate_ms(weights, gbit, replace(one, gamma_us=gamma_us + more)) >= ms
    assert line_rate_ms(weights, gbit, replace(one, fixed_ms=alpha_ms + more)) >= ms
    assert line_rate_ms([(2 * size, pieces) for size, pieces in weights], gbit, one) >= ms
    if not any(size for size, _ in weights):
        assert ms == 0


def test_bytes_on_the_links_are_those_that_move() -> None:
    for more in ({}, {"tp_prefill": "2", "tp_decode": "4"}, {"pp_prefill": "3", "kv_bytes_per_token": "327680"}):
        for links in ("shared", "per-rank"):
            asked = read(Options(model="70b", tokens="500", links=links, prefix_hit_decode="0.3", **more))
            wire = asked.wire(BF16)
            size = asked.assumptions.moved_bytes(asked.shape, 500, 16, BF16, None if wire is None else wire(500))
            if wire is not None and links == "per-rank":
                size = wire(500).busiest_rank_bytes
            assert max(one for one, _ in asked.on_links(BF16, 1, 1.0)(500)) == size
    everything = read(Options(model="70b", tokens="512", prefix_hit_decode="1"))
    assert everything.on_links(BF16, 1, 1.0)(512) == []


# --- what is said


def test_that_both_are_assumed_is_said_with_what_they_may_add_and_what_measures_them(capsys: Captured) -> None:
    notices = planned(capsys, "--tokens", "512,8192")["notices"]
    (assumed,) = [notice for notice in notices if notice.startswith("assumed of every line rate")]
    assert "α = 0 ms" in assumed
    assert "γ = 0 µs" in assumed
    assert "--fixed-ms" in assumed
    assert "--gamma-us" in assumed
    assert "kvxfer bench --fit --peer between the two hosts measures both" in assumed
    (_, adds) = [notice for notice in notices if notice.startswith("α and γ may add")]
    own_ms = (TCP_ALPHA_US + 40_960 * TCP_GAMMA_US) / 1e3
    assert "to 8,192 tokens in 40,960 pieces, whose prefill takes " in adds
    assert f"{own_ms:.3g} ms (" in adds
    assert "by kvxfer's own fit of tcp push" in adds
    assert "98.3 … 131 ms (" in adds
    assert plan.main(["--model", "70b"]) == 0
    assert "line rate with α = γ = 0" in " ".join(capsys.readouterr().out.split())


def test_where_both_are_given_nothing_is_left_to_be_told(capsys: Captured) -> None:
    notices = planned(capsys, "--gamma-us", "2.4", "--fixed-ms", "2")["notices"]
    (assumed,) = [notice for notice in notices if notice.startswith("assumed of every line rate")]
    assert "α = 2 ms" in assumed
    assert "γ = 2.4 µs" in assumed
    assert not any("may add" in notice for notice in notices)


def test_of_what_is_given_nothing_is_added_again(capsys: Captured) -> None:
    for options, which, without in (
        (["--fixed-ms", "50"], "γ may add", "α 62"),
        (["--gamma-us", "2"], "α may add", "γ 0.25"),
    ):
        (notice,) = [one for one in planned(capsys, "--tokens", "512", *options)["notices"] if "may add" in one]
        assert notice.startswith(which)
        assert without not in notice


def test_a_fit_of_the_measured_result_over_a_network_s_stack_is_told(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(example_result()))
    (*_, adds) = [
        one for one in planned(capsys, "--measured", str(path))["notices"] if one.startswith("α and γ may add")
    ]
    assert "by the measured fit of tcp push (loopback) (α 63.7 µs, γ 0.15 µs)" in adds
    assert "own fit" not in adds
    (of_memory,) = fitted_models([cost_model() | {"backend": "shm"}])
    (*_, adds) = line_rate_notices(Assumptions(), {512: 100}, {512: 50.0}, [of_memory])
    assert "shm" not in adds
    assert "kvxfer's own fit of tcp push" in adds


def test_kvxfer_s_own_fit_is_the_committed_one() -> None:
    (one,) = fitted_models(read_result(BENCH / "2026-11-30-epyc-2cpu-cost-model-tcp-push.json")["cost_model"])
    assert (one.backend, one.op) == ("tcp", "push")
    assert float(f"{one.fitted.alpha_ns / 1e3:.2g}") == TCP_ALPHA_US
    assert float(f"{one.fitted.gamma_ns / 1e3:.2g}") == TCP_GAMMA_US


@pytest.mark.parametrize("text", ["-1", "nan", "x", "1e9"])
def test_a_gamma_that_makes_no_sense_is_refused(text: str, capsys: Captured) -> None:
    assert plan.main(["--model", "70b", "--gamma-us", text]) == 2
    assert "--gamma-us" in capsys.readouterr().err
