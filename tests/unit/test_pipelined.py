"""What a plan predicts of pipelining: properties of every path, and what can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.leaving import Departures, Leaves
from kvxfer.cache.sends import Cut, send_ends, sweep
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.pipeline import Carrier, Link
from kvxfer.cost.pipelined import Crossing, MeasuredLink, Pipelining
from kvxfer.cost.prefill_source import PrefillRate, PrefillTimes

LINKS = st.builds(Link, st.floats(0, 1e8), st.floats(0, 1e7), st.floats(1e-3, 1e3), st.floats(0, 1e5))
MEASURED = st.lists(
    st.tuples(st.integers(1, 10**10), st.floats(1, 1e10)), min_size=2, max_size=5, unique_by=lambda point: point[0]
).map(lambda points: MeasuredLink(list(zip(sorted(x for x, _ in points), sorted(y for _, y in points), strict=True))))
CARRIERS = st.one_of(LINKS, MEASURED)
PROMPTS = st.lists(st.integers(1, 200_000), min_size=1, max_size=3)


def crossing(carrier: Carrier, prompts: Sequence[int]) -> Crossing:
    return Crossing(
        carrier=carrier,
        prompts=dict.fromkeys(prompts, 1),
        median=prompts[0],
        p99=None,
        listed=prompts,
    )


def pipelining(
    tokens_per_s: float, cut: Cut | None = None, layers: int = 32, token_bytes: int = 1000, **changes: float
) -> Pipelining:
    assumptions = replace(Assumptions(), **changes)
    leaves = alike(layers, token_bytes)
    return Pipelining(cut, [1], layers, 16, PrefillRate(tokens_per_s), assumptions, leaves)


def alike(layers: int, token_bytes: int = 1000) -> Leaves:
    """So many bytes of each token, as many in each layer, in pieces of 16 tokens, over one link."""

    def leaves(tokens: int, ends: Sequence[float], together: int) -> Departures:
        after = send_ends([range(layers)], together)
        parts = [end - begin for begin, end in pairwise([0, *after])]
        lengths = [end - begin for begin, end in pairwise([0, *ends])]
        weights = [[(length * part * token_bytes / layers, length / 16 * part) for part in parts] for length in lengths]
        return Departures(after, [weights])

    return leaves


@given(CARRIERS, PROMPTS, st.floats(10, 1e7), st.integers(1, 32), st.none() | st.integers(64, 100_000))
def test_exposed_time_is_never_below_zero(
    carrier: Carrier, prompts: list[int], tokens_per_s: float, layers: int, chunk: int | None
) -> None:
    prompts = [min(prompt, 4 * (chunk or prompt)) for prompt in prompts]
    found = pipelining(tokens_per_s, Cut(layers, chunk)).of(crossing(carrier, prompts))
    assert found.percent >= 0
    assert all(prompt.exposed_ms >= 0 for prompt in found.prompts)
    assert found.p99_ms is None


@settings(max_examples=30)
@given(CARRIERS, PROMPTS, st.floats(10, 1e7))
def test_the_best_cut_is_never_above_serial(carrier: Carrier, prompts: list[int], tokens_per_s: float) -> None:
    best = pipelining(tokens_per_s).of(crossing(carrier, prompts))
    serial = pipelining(tokens_per_s, Cut(32)).of(crossing(carrier, prompts))
    assert best.percent <= serial.percent * (1 + 1e-9)
    assert best.layers_per_send in sweep(32)
    if len(set(prompts)) == 1:
        assert best.prompts[0].exposed_ms <= best.prompts[0].serial_ms
    for layers in (1, 4, 16):
        other = pipelining(tokens_per_s, Cut(layers)).of(crossing(carrier, prompts))
        assert best.percent <= other.percent * (1 + 1e-6)


def test_serial_is_the_whole_transfer_and_the_last_layer_is_left() -> None:
    """1000 tokens: 1 ms a layer; a layer's 31.25 kB at 1 GB/s and 0.1 ms for each send."""
    link = Link(latency_ns=50_000, occupancy_ns=100_000, gbyte_s=1.0)
    found = pipelining(1000 / 0.032, Cut(1)).of(crossing(link, [1000]))
    (prompt,) = found.prompts
    assert prompt.serial_ms == pytest.approx(0.05 + 0.1 + 1.0)
    assert prompt.exposed_ms == pytest.approx(0.05 + 0.1 + 1.0 / 32)
    assert (found.percent, found.median_ms) == (pytest.approx(prompt.exposed_ms / 32 * 100), prompt.exposed_ms)


@given(st.floats(1e3, 1e6), st.floats(1e3, 1e7), st.integers(1, 31))
def test_break_even_is_where_the_cut_stops_losing(tokens_per_s: float, occupancy: float, layers: int) -> None:
    way, link = pipelining(tokens_per_s, Cut(layers)), Link(0, occupancy, 10.0)
    found = way.of(crossing(link, [4096])).break_even_tokens
    assert found is not None
    at, before = (
        [way.exposed_ms(crossing(link, [4096]), tokens, Cut(each)) for each in (layers, 32)]
        for tokens in (found, max(16, found - 16))
    )
    assert at[0] <= at[1] * (1 + 1e-6)
    assert found == 16 or before[0] > before[1]


def test_serial_has_no_break_even_and_where_nothing_moves_nothing_is_exposed() -> None:
    link = Link(1e6, 1e6, 1.0)
    assert pipelining(1000, Cut(32)).of(crossing(link, [100])).break_even_tokens is None
    (nothing,) = pipelining(1000, Cut(1), token_bytes=0).of(crossing(link, [100])).prompts
    assert (nothing.serial_ms, nothing.exposed_ms) == (0, 0)


def test_prompts_whose_prefill_is_not_known_are_taken_at_the_nearest_rate() -> None:
    """Break-even looks at prompts beyond those that were measured; chunks may be shorter than these, too."""
    times = PrefillTimes([(1000, 10.0), (2000, 30.0)], "times.csv")
    link = Link(0, 1e6, 1.0)
    way = Pipelining(Cut(1), [1000, 2000], 32, 16, times, Assumptions(), alike(32))
    assert way.of(crossing(link, [2000])).break_even_tokens == 2144  # 32 ms: each layer's 1 ms is that of a send
    chunked = replace(way, cut=Cut(1, 1024)).of(crossing(link, [2000]))
    assert chunked.break_even_tokens is None  # chunks become more with the prompt
    assert chunked.prompts[0].exposed_ms == pytest.approx(64 + 2 - 30 + 10.48 / 32)  # 1,024 tokens take 10.48 ms


def test_a_prefix_hit_leaves_less_compute_to_hide_behind() -> None:
    link = Link(0, 0, 1.0)
    without, with_hit = (
        pipelining(1e6, Cut(1, chunk), **hit).of(crossing(link, [4096])).prompts[0]
        for chunk in (512,)
        for hit in ({}, {"prefix_hit_prefill": 0.9})
    )
    assert with_hit.serial_ms == pytest.approx(without.serial_ms)
    assert with_hit.exposed_ms > without.exposed_ms


def test_between_measured_sizes_a_line_is_drawn_and_below_them_at_least_the_share() -> None:
    link = MeasuredLink([(100, 50.0), (200, 80.0)])
    assert [link.holds_ns(size, 0) for size in (100, 150, 200, 300)] == pytest.approx([50, 65, 80, 110])
    assert link.holds_ns(50, 0) == pytest.approx(35)  # 20 of it fixed
    steep = MeasuredLink([(100, 50.0), (200, 180.0)])
    assert steep.holds_ns(50, 0) == pytest.approx(25)


def test_beyond_measured_sizes_nothing_is_faster_though_times_fell() -> None:
    """By noise: on the line 1,000 bytes would take less than no time."""
    falling = MeasuredLink([(100, 80.0), (200, 60.0)])
    assert [falling.holds_ns(size, 0) for size in (50, 100, 150, 200, 1000)] == pytest.approx([80, 80, 70, 60, 60])
