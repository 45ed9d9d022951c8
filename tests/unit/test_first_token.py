"""Time to first token: a queue by hand, its path, and what is told of too few requests or too narrow a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer import plan
from kvxfer.cost.first_token import OnThePath, Prefilled, crossed, first_tokens, prefilled

Captured = pytest.CaptureFixture[str]

SERVED = ["--model", "8b", "--rate", "2", "--prefill-gpus", "8", "--decode-gpus", "8", "--decode-step-ms", "20"]
A_TOKEN_A_MS = ["--prefill-tokens-per-s", "1000"]


def planned(capsys: Captured, *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
    return document


def printed(capsys: Captured, *argv: str) -> str:
    assert plan.main([*argv]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_queue_and_a_path_by_hand() -> None:
    """The second waits 80 ms for prefill, and is through the path 10 ms after the first, 230 ms after that came."""
    queue = prefilled([(0.0, 100), (20.0, 50), (300.0, 100)], {50: 50.0, 100: 100.0})
    assert queue == [Prefilled(100, 0, 0, 100), Prefilled(50, 20, 100, 150), Prefilled(100, 300, 300, 400)]
    assert [one.wait_ms for one in queue] == [0, 80, 0]
    path = {50: OnThePath(10.0, 10.0), 100: OnThePath(120.0, 120.0)}
    found = crossed(queue, path)
    assert found is not None
    assert (found.mean_ms, found.p99_ms) == (pytest.approx((220 + 210 + 220) / 3), None)
    between = crossed([Prefilled(75, 0, 0, 100)], path)
    assert between is not None
    assert between.mean_ms == pytest.approx(100 + 65)
    assert crossed([], path) is None
    assert crossed(queue, {}) is None
    hidden = {50: OnThePath(10.0, 2.0), 100: OnThePath(120.0, 20.0)}  # the rest is latency: nobody waits for it
    found = crossed(queue, hidden)
    assert found is not None
    assert found.mean_ms == pytest.approx((220 + 140 + 220) / 3)


def test_the_p99_takes_a_hundred_requests() -> None:
    assert first_tokens(list(map(float, range(100, 0, -1)))).p99_ms == 99
    assert first_tokens([1.0] * 99).p99_ms is None


def traced(tmp_path: Path, arrivals_ms: list[int]) -> list[str]:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 100, "output_length": 10} for at in arrivals_ms]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--model", "8b", "--lengths", str(path), *A_TOKEN_A_MS, "--link", "100", "--decode-step-ms", "20"]


def test_a_trace_is_replayed_on_both_layouts(tmp_path: Path, capsys: Captured) -> None:
    """Two at once each second, 100 ms of prefill each, and 7 blocks of 16 tokens in 1.17 ms at 100 Gb/s.

    The split's engine of prefill has both: 100 and 200 ms, where one of two colocated ones has one.
    """
    argv = traced(tmp_path, [1000 * (number // 2) for number in range(400)])
    found = planned(capsys, *argv, "--prefill-gpus", "4", "--decode-gpus", "4")
    (path,) = found["split"]
    moves_ms = 7 * 16 * 131_072 * 8 / 100e9 * 1e3
    assert found["pools"]["prefill"]["wait_ms"] == pytest.approx(50)
    assert path["first_token_mean_ms"] == pytest.approx(150 + moves_ms)
    assert path["first_token_p99_ms"] == pytest.approx(200 + moves_ms)
    whole, *_ = found["colocated"]["modes"]
    assert 100 <= whole["first_token_mean_ms"] <= 120
    wide = planned(capsys, *argv, "--prefill-gpus", "8", "--decode-gpus", "8")
    assert wide["pools"]["prefill"]["wait_ms"] == 0


def test_what_has_no_end_is_told_so(capsys: Captured) -> None:
    argv = [*SERVED, "--tokens", "4096", *A_TOKEN_A_MS, "--link", "0.1,100"]
    assert "over 100 Gb/s line rate no end no end" in printed(capsys, *argv)
    found = planned(capsys, *argv)
    assert [path["first_token_mean_ms"] for path in found["split"]] == [None, None]  # prefill cannot keep up
    found = planned(capsys, *argv, "--rate", "0.2")
    narrow, wide = found["split"]
    assert narrow["first_token_mean_ms"] is None
    assert wide["first_token_mean_ms"] > 4096
    assert "over 0.1 Gb/s line rate no end no end" in printed(capsys, *argv, "--rate", "0.2")
    assert found["colocated"]["modes"][0]["first_token_p99_ms"] > 4096


def test_without_a_rate_or_a_pool_there_is_no_first_token(capsys: Captured) -> None:
    for argv in (["--tokens", "512"], ["--tokens", "512", "--rate", "1"]):
        assert "Time to first token" not in printed(capsys, "--model", "8b", *argv)
        assert planned(capsys, "--model", "8b", *argv)["split"][0]["first_token_mean_ms"] is None


def test_what_pipelining_hides_counts_where_sends_cost_something(capsys: Captured) -> None:
    argv = [*SERVED, "--tokens", "4096", "--prefill-tokens-per-s", "20000", "--link", "25"]
    (serial,) = planned(capsys, *argv)["split"]
    (free,) = planned(capsys, *argv, "--pipeline", "4")["split"]
    (hidden,) = planned(capsys, *argv, "--pipeline", "4", "--fixed-ms", "0.1", "--send-ms", "0.1")["split"]
    assert free["first_token_mean_ms"] == pytest.approx(serial["first_token_mean_ms"])
    saved_ms = serial["median_ms"] - hidden["pipelined"]["median_ms"]
    assert hidden["first_token_mean_ms"] == pytest.approx(serial["first_token_mean_ms"] - saved_ms, rel=0.05)


def test_latency_does_not_fill_a_path_that_is_hardly_busy(capsys: Captured) -> None:
    """30 requests a second and 50 ms of latency each: the path is free again long before the next."""
    argv = ["--model", "8b", "--tokens", "100", "--fixed-ms", "50", "--rate", "30", "--output-tokens", "100"]
    found = planned(
        capsys, *argv, "--decode-step-ms", "10", "--prefill-gpus", "4", "--decode-gpus", "4", "--link", "100"
    )
    (path,) = found["split"]
    assert path["busy"] < 0.05
    assert 50 < path["first_token_mean_ms"] < 60


def test_a_prefill_engine_waits_for_its_own_links_and_not_for_those_of_decode(capsys: Captured) -> None:
    """Four ranks to one: decode's one link takes four times as long as each of prefill's, of another engine each."""
    argv = ["--model", "8b", "--rate", "26", "--prefill-gpus", "8", "--decode-gpus", "8", "--tokens", "8192"]
    argv += ["--links", "per-rank", "--tp-prefill", "4", "--tp-decode", "1", "--prefill-tokens-per-s", "200000"]
    found = planned(capsys, *argv, "--output-tokens", "100", "--decode-step-ms", "10", "--link", "100")
    (path,) = found["split"]
    assert path["busy"] < 0.3
    assert path["first_token_mean_ms"] < 300


def test_waits_are_never_negative(capsys: Captured) -> None:
    argv = ["--model", "8b", "--tokens", "512", "--rate", "1e-6", "--eff-tflops", "1000000", "--prefill-gpus", "16"]
    found = planned(capsys, *argv, "--decode-gpus", "16", "--output-tokens", "300", "--decode-step-ms", "20")
    assert found["pools"]["prefill"]["wait_ms"] >= 0
