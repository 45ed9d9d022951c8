"""Time to first token: queues by hand and event by event, paths, and what is told of too few or too narrow."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import plan
from kvxfer.cost.first_token import OnThePath, Replay, crossed, first_tokens, replayed
from kvxfer.cost.load import Load

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


def both_ends(waits_ms: float, holds_ms: float) -> OnThePath:
    return OnThePath(waits_ms, holds_ms, holds_ms)


def test_a_queue_and_a_path_by_hand() -> None:
    """The second waits 80 ms for prefill, and is through the path 10 ms after the first, 230 ms after that came."""
    queue = replayed([(0.0, 100), (20.0, 50), (300.0, 100)], {50: 50.0, 100: 100.0})
    assert queue == Replay([100, 50, 100], [0, 20, 300], [0, 80, 0], [100, 150, 400])
    path = {50: both_ends(10.0, 10.0), 100: both_ends(120.0, 120.0)}
    found = crossed([queue], path)
    assert found is not None
    assert (found.mean_ms, found.p99_ms) == (pytest.approx((220 + 210 + 220) / 3), None)
    between = crossed([Replay([75], [0.0], [0.0], [100.0])], path)
    assert between is not None
    assert between.mean_ms == pytest.approx(100 + 65)
    assert crossed([], path) is None
    assert crossed([queue], {}) is None
    hidden = {50: both_ends(10.0, 2.0), 100: both_ends(120.0, 20.0)}  # the rest is latency: nobody waits for it
    found = crossed([queue], hidden)
    assert found is not None
    assert found.mean_ms == pytest.approx((220 + 140 + 220) / 3)


def test_two_engines_that_send_to_one_by_hand() -> None:
    """All done at 100: the second waits 30 ms for decode's end; so does the third, which leaves its own at 120."""
    requests = [(0.0, 100), (0.0, 100), (10.0, 10)]
    queue = replayed(requests, {10: 10.0, 100: 100.0}, engines=2, senders=2)
    assert queue.done_ms == [100, 100, 110]
    found = crossed([queue], {10: OnThePath(40.0, 20.0, 30.0), 100: OnThePath(40.0, 20.0, 30.0)})
    assert found is not None
    assert found.mean_ms == pytest.approx((140 + 170 + 160 + 40 - 10) / 3)


def event_by_event(
    requests: Sequence[tuple[float, int]], takes_ms: Mapping[int, float], path: OnThePath, engines: int, decode: int
) -> list[float]:
    """Ms to first tokens by request, where every engine and every end of a path takes what has come first."""
    # The time, whether one comes or a place is free again, who it is, and the stage of the place.
    coming = [(at, 1, number, 0) for number, (at, _) in enumerate(requests)]
    waiting: dict[tuple[int, int], deque[int]] = {}
    busy: set[tuple[int, int]] = set()
    first = [0.0] * len(requests)
    while coming:
        now, comes, number, stage = heappop(coming)
        place = stage, number % (decode if stage == 2 else engines)
        line = waiting.setdefault(place, deque())
        if comes:
            line.append(number)
        else:
            busy.remove(place)
        if not line or place in busy:
            continue
        number = line.popleft()
        busy.add(place)
        holds = takes_ms[requests[number][1]], path.prefill_ms, path.decode_ms
        heappush(coming, (now + holds[stage], 0, number, stage))
        if stage < 2:
            heappush(coming, (now + holds[0] if stage == 0 else now, 1, number, stage + 1))
        else:
            first[number] = now + path.waits_ms - requests[number][0]
    return first


@settings(max_examples=100)
@given(
    prompts=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    gaps=st.lists(st.integers(0, 400), min_size=60, max_size=60),
    engines=st.integers(1, 6),
    decode=st.integers(1, 6),
    path=st.tuples(st.floats(0, 500), st.floats(0, 500), st.floats(0, 500)),
)
def test_it_is_what_every_engine_does_event_by_event(
    prompts: list[int], gaps: list[int], engines: int, decode: int, path: tuple[float, float, float]
) -> None:
    # None is done just when another is, which rounding would decide.
    arrivals = [sum(gaps[:number]) + number * 1.1234567 for number in range(len(prompts))]
    requests, takes_ms = list(zip(arrivals, prompts, strict=True)), {tokens: float(tokens) for tokens in prompts}
    on_path = OnThePath(sum(path), *path[1:])
    found = crossed([replayed(requests, takes_ms, engines, engines, decode)], {1: on_path})
    expected = event_by_event(requests, takes_ms, on_path, engines, decode)
    assert found is not None
    assert found.mean_ms == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize(("prefill", "decode"), [(8, 1), (3, 2), (2, 3)])
def test_one_engine_stands_for_all_of_a_load_that_is_drawn(prefill: int, decode: int) -> None:
    """Prefill's engines are busy 70 % of the time, and the busier ends of their paths 75 %."""
    takes_ms = {250: 250.0}
    holds_ms = 250 * 0.75 / 0.7 / max(1, prefill / decode)
    path = both_ends(holds_ms, holds_ms)
    draws = Load([250], "here", rate=0.7 * prefill / 0.25).draws(prefill)
    found = crossed([replayed(draw, takes_ms, 1, prefill, decode) for draw in draws], {250: path})
    streams, draw = [], random.Random(7)
    for _ in range(prefill):
        streams.append(list(accumulate(draw.expovariate(0.7 / 250) for _ in range(24_000 // prefill))))
    requests = [(stream[number], 250) for number in range(24_000 // prefill) for stream in streams]
    expected = event_by_event(requests, takes_ms, path, prefill, decode)
    assert found is not None
    assert found.mean_ms == pytest.approx(sum(expected) / len(expected), rel=0.05)


def test_the_p99_takes_a_hundred_requests() -> None:
    assert first_tokens([list(map(float, range(100, 0, -1)))]).p99_ms == 99
    assert first_tokens([[1.0] * 99]).p99_ms is None


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


def test_transfers_of_several_prefill_engines_wait_for_each_other_at_decode(capsys: Captured) -> None:
    """At 0.75 of what one decode engine's path can carry, of 8 prefill engines that are hardly busy themselves."""
    argv = ["--model", "8b", "--tokens", "4096", "--prefill-tokens-per-s", "50000", "--link", "25", "--rate", "4.366"]
    argv += ["--output-tokens", "10", "--decode-step-ms", "10", "--prefill-gpus", "32"]
    alone, paired, met = (planned(capsys, *argv, "--decode-gpus", gpus)["split"][0] for gpus in ("64", "32", "4"))
    assert (met["busy"], met["busy_side"]) == (pytest.approx(0.75, abs=0.001), "decode")
    assert alone["first_token_mean_ms"] == paired["first_token_mean_ms"]
    by_theory = met["median_ms"] * 0.75 / 2 / 0.25  # Pollaczek-Khinchine
    assert met["first_token_mean_ms"] - paired["first_token_mean_ms"] == pytest.approx(by_theory, rel=0.05)


def test_a_load_that_is_drawn_says_how_far_its_draws_are_apart(tmp_path: Path, capsys: Captured) -> None:
    argv = [*SERVED, "--tokens", "4096", "--prefill-tokens-per-s", "8000", "--output-tokens", "100", "--link", "100"]
    found = planned(capsys, *argv)
    for one in (found["split"][0], *found["colocated"]["modes"]):
        least, most = one["first_token_p99_range_ms"]
        assert least < one["first_token_p99_ms"] < most
    found = planned(capsys, *traced(tmp_path, [1000 * number for number in range(400)]), *SERVED[4:8])
    for one in (found["split"][0], *found["colocated"]["modes"]):
        assert one["first_token_p99_ms"] > 0
        assert one["first_token_p99_range_ms"] is None
