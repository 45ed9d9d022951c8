"""Stalls of colocated prefill: the published ones, a simulation by hand, and what queueing theory says of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.colocated import Mode, chunks_not_known, simulate, stall_rows
from kvxfer.cost.load import Load
from kvxfer.cost.prefill_source import AssumedPrefill, PrefillRate, PrefillSource, PrefillTimes, prefill_sources
from kvxfer.model.presets import load_model

NONE_CACHED = Assumptions()
A_TOKEN_A_MS = PrefillRate(1000)


def simulated(load: Load, chunks: list[int], step_ms: float = 10.0, instances: int = 1) -> list[Mode]:
    return simulate(A_TOKEN_A_MS, load, instances, step_ms, chunks, NONE_CACHED)


def test_the_published_stalls() -> None:
    """717, 179 and 45 ms for 8192, 2048 and 512 tokens of 70B on 4 GPUs at 400 TFLOP/s."""
    sources = prefill_sources(load_model("70b"), Assumptions(params=70e9))
    (seed, full) = stall_rows(sources, [8192], [2048, 512], NONE_CACHED)
    assert seed["basis"] == "seed"
    assert [round(seed["prompt_ms"]), *(round(chunk["stall_ms"]) for chunk in seed["chunks"])] == [717, 179, 45]
    assert full["chunks"][1]["stall_ms"] > seed["chunks"][1]["stall_ms"]  # the last chunk attends to all before it


def test_a_chunk_is_no_longer_than_its_prompt_and_none_where_the_times_do_not_reach() -> None:
    (row,) = stall_rows([A_TOKEN_A_MS], [100], [64, 512], NONE_CACHED)
    assert [chunk["stall_ms"] for chunk in row["chunks"]] == [64, 100]
    measured = PrefillTimes([(1000, 10.0), (4000, 50.0)], "times.csv")
    (row,) = stall_rows([measured], [4000], [2000, 512, 8000], NONE_CACHED)
    assert [chunk["chunk_tokens"] for chunk in row["chunks"]] == [2000, 8000]
    assert row["chunks"][1]["stall_ms"] == row["prompt_ms"]  # no chunk is longer than its prompt
    load = Load([4000, 1000], "here", rate=1)
    modes = simulate(measured, load, 1, 10.0, [2000, 512, 8000], NONE_CACHED)
    assert [mode.chunk_tokens for mode in modes] == [None, 2000, 8000]
    assert chunks_not_known(measured, load, [2000, 512, 8000]) == [512]


def test_every_draw_has_the_same_chunks_and_they_are_looked_up_once() -> None:
    class Counted(PrefillRate):
        asked: ClassVar[Counter[tuple[float, float]]] = Counter()

        def between_ms(self, start: float, end: float) -> float:
            self.asked[start, end] += 1
            return super().between_ms(start, end)

    simulate(Counted(1000), Load([5000, 300], "here", rate=0.01), 1, 10.0, [1024], NONE_CACHED)
    assert set(Counted.asked.values()) == {1}


def test_whole_prompts_by_hand() -> None:
    """Steps of 10 ms; prompts of 1, 30, 7 and 3 ms come at 0, 5, 12 and 95 ms.

    The first step ends at 10. Then 1 and 30 are prefilled, and 7, which has come meanwhile: to 48. Of the next steps
    the fifth ends at 98, and has 3 after it, to 101. At their rate the next would come at 126.7: two steps without.
    """
    load = Load([1, 30, 7, 3], "here", arrivals_s=[0.0, 0.005, 0.012, 0.095])
    whole, chunked = simulated(load, [10])
    assert whole.stall_max_ms == 38
    assert whole.stalled == pytest.approx(2 / 8)
    assert whole.stall_mean_ms == pytest.approx(41 / 8)
    assert whole.itl_p99_ms == 48
    # a step with 1 to 11, three with 10 each to 71, one with 7 to 88, one without to 98, one with 3 to 111, one without
    assert chunked.stalled == pytest.approx(6 / 8)
    assert chunked.stall_mean_ms == pytest.approx(41 / 8)
    assert chunked.stall_p99_ms == 10
    assert whole.first_tokens is not None
    assert whole.first_tokens.mean_ms == pytest.approx((11 + 36 + 36 + 6) / 4)
    assert chunked.first_tokens is not None
    assert chunked.first_tokens.mean_ms == pytest.approx((11 + 66 + 76 + 16) / 4)


def test_prompts_that_wait_share_what_a_chunk_has_left_by_hand() -> None:
    """Steps of 10 ms; prompts of 4, 3 and 5 ms come at 0 and one of 3 at 100, in chunks of 10.

    4, 3 and 3 of the 5 share a step to 20; the other 2 are done at 32. After seven steps without there is 3, to 115,
    and one without till the next would come. Full steps would be one and a half.
    """
    load = Load([4, 3, 5, 3], "here", arrivals_s=[0.0, 0.0, 0.0, 0.1])
    (_, chunked) = simulated(load, [10])
    assert chunked.stalled == pytest.approx(3 / 11)
    assert chunked.stall_mean_ms == pytest.approx(15 / 11)
    assert chunked.stall_max_ms == 10
    assert chunked.busy == pytest.approx(30 / (4 / 0.03))
    assert chunked.first_tokens is not None
    assert chunked.first_tokens.mean_ms == pytest.approx((20 + 20 + 32 + 15) / 4)


def test_steps_that_all_have_a_prompt_may_have_room_for_more() -> None:
    """One of 16 ms comes every 20 ms, and a step of 10 ms takes up to four along: 74 ms for what comes in 80."""
    (_, mode) = simulated(Load([16], "here", rate=50), [64])
    assert mode.busy == pytest.approx(74 / 80, rel=0.02)
    assert mode.first_tokens is not None


def test_prompts_of_one_step_stall_the_same_token() -> None:
    (whole,) = simulated(Load([1, 1], "here", arrivals_s=[0.0, 0.005]), [])
    assert (whole.stalled, whole.stall_mean_ms) == (1, 2)


def test_an_engine_with_one_request_decodes_on_after_it() -> None:
    """One of twelve, each of which has 364 ms of prefill in 720 s: 71,963 steps of 10 ms, one of them with a stall."""
    load = Load([364] * 12, "here", arrivals_s=[60.0 * number for number in range(12)])
    for mode in simulated(load, [512], instances=12):
        assert mode.stalled == pytest.approx(1 / 71_963, rel=1e-3)
        assert (mode.stall_p99_ms, mode.stall_max_ms, mode.itl_p99_ms) == (0, 364, 10)
        assert mode.stall_mean_ms == pytest.approx(Theory(0.364 / 720, 10.0).mean_stall_ms, rel=1e-3)


@dataclass(frozen=True)
class Theory:
    """A share rho of time in prefill leaves (1 - rho) / step steps a second, and rho seconds of stalls among them."""

    rho: float
    step_ms: float

    @property
    def mean_stall_ms(self) -> float:
        return self.rho * self.step_ms / (1 - self.rho)


@pytest.mark.parametrize("rho", [0.05, 0.3, 0.6])
def test_the_mean_stall_is_what_the_work_says(rho: float) -> None:
    load = Load([100, 300], "here", rate=rho * 1000 / 200)
    for mode in simulated(load, [50, 1000]):
        assert mode.stall_mean_ms == pytest.approx(Theory(rho, 10.0).mean_stall_ms, rel=0.1)
    assert simulated(load, [])[0].busy == pytest.approx(rho, rel=0.02)


def test_a_load_that_is_too_much_has_no_end() -> None:
    whole, chunked = simulated(Load([1000], "here", rate=1.1), [100])
    assert whole.overloaded
    assert whole.itl_p99_ms is None
    assert (whole.first_tokens, chunked.first_tokens) == (None, None)
    assert chunked.overloaded  # its decode goes on, a chunk at a time, but the queue grows
    assert chunked.itl_p99_ms == 110
    assert chunked.stalled == pytest.approx(1, abs=0.01)  # all but the first steps of each draw


def test_small_chunks_keep_up_with_less() -> None:
    """Each chunk costs a decode step: 10 ms for 100 ms of prefill, or for 10."""
    large, small = simulated(Load([1000], "here", rate=0.7), [100, 10])[1:]
    assert large.busy == pytest.approx(0.7 * 1.1)
    assert small.busy == pytest.approx(0.7 * 2)
    assert not large.overloaded
    assert small.overloaded


def test_more_engines_share_the_load() -> None:
    load = Load([1000], "here", rate=0.8)
    one, four = (simulated(load, [], instances=count)[0] for count in (1, 4))
    assert four.busy == pytest.approx(one.busy / 4)
    assert (four.stall_mean_ms or 0) < (one.stall_mean_ms or 0)


@settings(max_examples=50)
@given(
    prompts=st.lists(st.integers(1, 3000), min_size=2, max_size=40),
    gaps=st.lists(st.integers(0, 2000), min_size=40, max_size=40),
    chunk=st.integers(1, 4000),
    hit=st.floats(0, 1),
)
def test_all_work_is_done_and_no_chunk_is_longer_than_asked(
    prompts: list[int], gaps: list[int], chunk: int, hit: float
) -> None:
    arrivals = [sum(gaps[:number]) / 1e3 + number / 1e3 for number in range(len(prompts))]
    load = Load(prompts, "here", arrivals_s=arrivals)
    assumptions = Assumptions(prefix_hit_prefill=hit)
    (_, mode) = simulate(A_TOKEN_A_MS, load, 1, 10.0, [chunk], assumptions)
    work = sum(prompt - assumptions.cached_tokens(prompt) for prompt in prompts)
    assert mode.stall_max_ms is not None
    assert mode.stall_max_ms <= chunk + 1e-6
    assert mode.busy * (arrivals[-1] - arrivals[0]) * 1e3 * len(prompts) / (len(prompts) - 1) >= work - 1e-6


@dataclass
class Waiting:
    arrival_ms: float
    done: float
    prompt: int


def step_by_step(
    source: PrefillSource, load: Load, chunk: int, step_ms: float, assumptions: Assumptions
) -> tuple[list[float], list[float]]:
    """Stalls of all steps up to the last first token, and ms to first tokens: what an engine's scheduler does."""
    assert load.arrivals_s is not None
    coming = [
        Waiting(1e3 * at, assumptions.cached_tokens(prompt), prompt)
        for at, prompt in zip(load.arrivals_s, load.prompts, strict=True)
    ]
    clock, queue = coming[0].arrival_ms, list[Waiting]()
    stalls, first = [], []
    while coming or queue:
        while coming and coming[0].arrival_ms <= clock:
            queue.append(coming.pop(0))
        room, stall, ended = float(chunk), 0.0, list[Waiting]()
        while queue and room > 0:
            one = queue[0]
            end = min(float(one.prompt), one.done + room)
            stall += source.between_ms(one.done, end)
            room -= end - one.done
            one.done = end
            if end < one.prompt:
                break
            ended.append(queue.pop(0))
        clock += step_ms + stall
        stalls.append(stall)
        first += [clock - one.arrival_ms for one in ended]
    return stalls, first


QUADRATIC = AssumedPrefill("full", 70e9, load_model("70b"), gpus=4, eff_tflops=400)


@settings(max_examples=100)
@given(
    prompts=st.lists(st.integers(1, 3000), min_size=2, max_size=40),
    gaps=st.lists(st.integers(0, 300), min_size=40, max_size=40),
    chunk=st.integers(16, 4000),
    hit=st.sampled_from([0.0, 0.25, 0.5]),
    source=st.sampled_from([A_TOKEN_A_MS, QUADRATIC]),
)
def test_it_is_what_an_engine_does_step_by_step(
    prompts: list[int], gaps: list[int], chunk: int, hit: float, source: PrefillSource
) -> None:
    """But for steps that no prompt ends in, whose attention is that of the multiple of the chunk before."""
    # None comes just as a step begins, which rounding would decide.
    arrivals = [sum(gaps[:number]) / 1e3 + number * 1.1234567e-3 for number in range(len(prompts))]
    load = Load(prompts, "here", arrivals_s=arrivals)
    assumptions = Assumptions(prefix_hit_prefill=hit)
    (_, mode) = simulate(source, load, 1, 10.0, [chunk], assumptions)
    stalls, first = step_by_step(source, load, chunk, 10.0, assumptions)
    rel = 1e-6 if source is A_TOKEN_A_MS else 0.05
    assert mode.stall_max_ms == pytest.approx(max(stalls), rel=rel)
    assert mode.stalled is not None
    assert mode.stall_mean_ms is not None
    if mode.first_tokens is not None:
        assert mode.first_tokens.mean_ms == pytest.approx(sum(first) / len(first))
    with_prefill = sum(1 for stall in stalls if stall)
    steps = with_prefill / mode.stalled
    assert mode.stall_mean_ms * steps == pytest.approx(sum(stalls), rel=rel)


def test_prompts_of_more_than_half_a_chunk_fill_what_another_leaves() -> None:
    """700 tokens take 0.68 of a step of 1,024, and not one: 40 a second are done by steps of 20 ms."""
    (_, mode) = simulate(PrefillRate(100_000), Load([700], "here", rate=40), 1, 20.0, [1024], NONE_CACHED)
    assert mode.busy == pytest.approx(40 * (0.007 + 0.02 * 700 / 1024), rel=1e-6)
    assert mode.first_tokens is not None


def test_a_load_that_is_drawn_tells_how_far_its_draws_are_apart() -> None:
    """One prompt in a hundred draws or so: which stall the p99 is, a draw decides."""
    (whole,) = simulated(Load([10] * 99 + [2000], "here", rate=1.0), [])
    assert whole.itl_p99_ms is not None
    assert whole.itl_p99_range_ms is not None
    low, high = whole.itl_p99_range_ms
    assert low <= whole.itl_p99_ms <= high
    (traced,) = simulated(Load([10, 10], "here", arrivals_s=[0.0, 1.0]), [])
    assert traced.itl_p99_range_ms is None
