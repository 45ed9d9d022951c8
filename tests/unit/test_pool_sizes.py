"""The pools of a split, and what crosses between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_result import cost_model

from kvxfer.cache.layout import Side
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.first_token import Replay
from kvxfer.cost.fitted import fitted_models
from kvxfer.cost.load import Load
from kvxfer.cost.measured import Measured
from kvxfer.cost.pipeline import Link, Span
from kvxfer.cost.pools import Cluster, make_cluster, pools_of
from kvxfer.cost.prefill_source import PrefillRate, PrefillTimes
from kvxfer.cost.split import (
    Busy,
    FittedPath,
    MeasuredPath,
    PathCost,
    Traffic,
    line_rate_paths,
    path_cost,
    paths_between_hosts,
)
from kvxfer.errors import UsageError

A_TOKEN_A_MS = PrefillRate(1000)
NONE_CACHED = Assumptions()
EITHER: frozenset[Side] = frozenset({"prefill", "decode"})


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "expected"),
    [
        (4, 8, None, (4, 8, 12)),
        (4, None, 12, (4, 8, 12)),
        (None, 8, 12, (4, 8, 12)),
        (4, 8, 12, (4, 8, 12)),
        (None, None, 12, (None, None, 12)),
        (4, None, None, (4, None, None)),
    ],
)
def test_what_is_not_said_of_the_gpus_follows(prefill: Any, decode: Any, total: Any, expected: tuple[Any, ...]) -> None:
    cluster = make_cluster(4, 4, prefill, decode, total)
    assert (cluster.prefill, cluster.decode, cluster.total) == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "names"),
    [(4, 4, 12, "fair comparison"), (8, None, 8, "--prefill-gpus"), (None, 9, 8, "--decode-gpus")],
)
def test_gpus_that_do_not_add_up(prefill: Any, decode: Any, total: Any, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        make_cluster(4, 4, prefill, decode, total)


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "names"),
    [
        (2, 14, None, "prefill pool has 2 GPUs, .* takes 4"),
        (14, 2, 16, "decode pool has 2 GPUs, .* takes 4"),
        (14, None, 16, "decode pool has 2 GPUs"),
        (3, None, None, "prefill pool has 3 GPUs"),
    ],
)
def test_a_pool_without_an_engine_where_there_are_gpus_enough(
    prefill: Any, decode: Any, total: Any, names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        make_cluster(4, 4, prefill, decode, total)


def test_engines_and_clusters_that_are_too_small() -> None:
    assert make_cluster(4, 2, 9, 6, None).prefill_instances == 2
    assert make_cluster(4, 2, 9, 6, None).decode_instances == 3
    assert make_cluster(4, 2, 9, 6, None).colocated_instances == 3
    assert Cluster(4, 4).colocated_instances == 1
    assert not Cluster(4, 4).too_small
    assert make_cluster(4, 4, None, None, 7).too_small
    assert make_cluster(4, 4, 2, 5, None).too_small
    assert not make_cluster(4, 4, 4, 4, None).too_small


def test_how_busy_the_pools_are_by_hand() -> None:
    """Prompts of 100 and 300 ms, 4 a second on two engines: each 2 · 0.2 s a second; 4 · 50 · 0.03 sequences."""
    load = Load([100, 300], "here", outputs=[50], rate=4)
    pools = pools_of(make_cluster(4, 4, 8, 12, None), load, A_TOKEN_A_MS, NONE_CACHED, 30)
    assert pools.prefill_busy == pytest.approx(0.4)
    by_theory = 0.002 * (100**2 + 300**2) / 2 / 2 / 0.6  # Pollaczek-Khinchine
    assert pools.prefill_wait_ms == pytest.approx(by_theory, rel=0.1)
    assert pools.concurrency == pytest.approx(6)
    assert pools.decode_batch == pytest.approx(2)
    assert pools.decode_busy == pytest.approx(0.8647, abs=1e-4)


def test_a_pool_that_is_too_small_has_no_wait() -> None:
    load = Load([1000], "here", rate=2)
    pools = pools_of(make_cluster(4, 4, 4, 4, None), load, A_TOKEN_A_MS, NONE_CACHED, None)
    assert pools.prefill_busy == pytest.approx(2)
    assert (pools.prefill_wait_ms, pools.concurrency, pools.decode_batch, pools.decode_busy) == (None,) * 4


def paths_of(load: Load, assumptions: Assumptions, prefill: int = 1) -> list[Any]:
    return line_rate_paths(traffic_of(load, assumptions, prefill))


def traffic_of(load: Load, assumptions: Assumptions = NONE_CACHED, prefill: int = 1) -> Traffic:
    def on_links(tokens: int) -> list[tuple[int, int]]:
        return [(moved(tokens), tokens)]

    return Traffic(
        dtype="bf16",
        sizes=moved,
        pieces=lambda tokens: tokens,
        on_links=on_links,
        link_sides=[EITHER],
        tokens=(),
        load=load,
        source=A_TOKEN_A_MS,
        assumptions=assumptions,
        engines={"prefill": prefill},
    )


def test_line_rates_by_hand() -> None:
    """1 Mbit a token: 1 ms at 1 Gb/s."""
    load = Load([100, 300], "here", rate=2)
    slow, fast = paths_of(load, Assumptions(link_gbit=(1.0, 4.0)))
    assert (slow.percent, slow.median_ms, slow.p99_ms) == pytest.approx((100, 100, 300))
    assert share(slow) == pytest.approx(0.4)
    assert fast.percent == pytest.approx(25)
    assert share(paths_of(load, Assumptions(link_gbit=(1.0,)), prefill=2)[0]) == pytest.approx(0.2)


def test_what_is_fixed_is_in_every_transfer() -> None:
    (path,) = paths_of(Load([100], "here"), Assumptions(link_gbit=(1.0,), fixed_ms=50))
    assert path.percent == pytest.approx(150)
    assert path.busy is None
    (path,) = paths_of(Load([100], "here"), Assumptions(link_gbit=(1.0,), fixed_ms=50, gamma_us=500))
    assert path.percent == pytest.approx(200)  # a piece a token


def test_a_path_is_busy_with_what_each_send_costs_too() -> None:
    """100 and 300 ms of bytes, and 5 of the 50 ms that are fixed hold the path: 205 in the mean."""
    load = Load([100, 300], "here", rate=4)
    assumptions = Assumptions(link_gbit=(1.0,), fixed_ms=50, send_ms=5)
    (path,) = paths_of(load, assumptions, prefill=2)
    assert share(path) == pytest.approx(4 / 2 * 0.205)
    (path,) = paths_of(load, replace(assumptions, gamma_us=100))
    assert share(path) == pytest.approx(4 * 0.225)  # 0.1 ms a piece, of which there is one a token
    unequal = replace(
        traffic_of(load, assumptions),
        on_links=lambda count: [(moved(count), 1), (moved(2 * count), 1)],
        link_sides=[EITHER, EITHER],
    )
    assert share(line_rate_paths(unequal)[0]) == pytest.approx(4 * 0.405)  # the busiest link


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ({"prefill": 8, "decode": 2}, Busy(0.4, "decode", 0.1)),
        ({"prefill": 2, "decode": 8}, Busy(0.4, "prefill", 0.1)),
        ({"prefill": 2, "decode": 2}, Busy(0.4, None, 0.4)),
        ({"decode": 4}, Busy(0.2, "decode")),
        ({}, Busy(0.8, None, 0.8)),
    ],
)
def test_the_side_with_fewer_engines_has_the_busier_paths(engines: dict[Side, int], expected: Busy) -> None:
    """100 and 300 ms, 4 a second: 0.8 s a second for all engines of a side together."""
    traffic = replace(traffic_of(Load([100, 300], "here", rate=4), Assumptions(link_gbit=(1.0,))), engines=engines)
    busy = line_rate_paths(traffic)[0].busy
    assert busy is not None
    assert (busy.share, busy.side) == (pytest.approx(expected.share), expected.side)


def test_links_of_ranks_are_shared_by_the_requests_of_their_own_side() -> None:
    """A decode rank carries half of a prefill rank's, for as many requests as two prefill engines have."""
    traffic = replace(
        traffic_of(Load([200], "here", rate=4), Assumptions(link_gbit=(1.0,))),
        on_links=lambda count: [(moved(count), 1), (moved(count) // 2, 1)],
        link_sides=[frozenset({"prefill"}), frozenset({"decode"})],
    )
    for decode, expected in ((1, Busy(0.4, None)), (2, Busy(0.4, "prefill"))):
        (path,) = line_rate_paths(replace(traffic, engines={"prefill": 2, "decode": decode}))
        assert path.busy is not None
        assert (path.busy.share, path.busy.side) == (pytest.approx(expected.share), expected.side)


def test_short_prompts_keep_a_measured_path_busy_as_long_as_they_take() -> None:
    """90 of 100 ms are fixed: at the long prompt's rate the short one would take 11."""
    rows = [row(10, 91), row(1000, 190)]
    cost = cost_of(rows, Load([10], "here", rate=20))
    assert cost is not None
    assert share(cost) == pytest.approx(20 * 0.091)
    beyond = cost_of(rows, Load([10, 2000], "here", rate=1))
    assert beyond is not None
    assert share(beyond) == pytest.approx((0.091 + 0.290) / 2)  # nobody measured 2,000 tokens
    alone = cost_of([row(1000, 190)], Load([1000, 2000], "here", rate=2))
    assert alone is not None
    assert share(alone) == pytest.approx(0.190 + 0.380)


def test_requests_keep_a_fitted_path_busy_by_their_occupancy_and_pieces() -> None:
    """36.5 of α's 63.7 µs are occupancy; 151 ns a piece, of which there is one a token."""
    (model,) = fitted_models([cost_model()])
    traffic = traffic_of(Load([100], "here", rate=1000))
    found = path_cost(FittedPath(model, traffic.sizes, traffic.pieces), traffic, {})
    assert found is not None
    wire_ns = 4_194_304 / 9.1 + 20_500 + (moved(100) - 4_194_304) / 5.29
    assert share(found) == pytest.approx(1000 * (36_500 + 151 * 100 + wire_ns) / 1e9)


def share(path: PathCost) -> float:
    assert path.busy is not None
    return path.busy.share


def moved(tokens: int) -> int:
    """1 Mbit a token."""
    return tokens * 125_000


def row(tokens: int, milliseconds: float | None, **changes: Any) -> Measured:
    fields = {"of": "a", "model": "m", "dtype": "bf16", "tokens": tokens, "bytes": moved(tokens), "backend": "tcp"}
    fields |= {"op": "push", "scope": "network", "transfer_ms": milliseconds, "cold_ms": None}
    return Measured(**(fields | changes))  # type: ignore[arg-type]


def measured_paths(rows: list[Measured]) -> list[MeasuredPath]:
    return paths_between_hosts(rows, "m", "bf16", ((1, 1), (1, 1)), moved, lambda _: 40)


def cost_of(rows: list[Measured], load: Load) -> PathCost | None:
    (path,) = measured_paths(rows)
    return path_cost(path, traffic_of(load), {"long": 3.0})


def test_what_was_measured_between_two_hosts_is_a_path() -> None:
    """100 ms for 500 tokens and 300 for 1,000: 140 for 600, beside a prefill of 600 ms."""
    rows = [row(1000, 300, of="long", cold_pairs_ms=(392,)), row(500, 100, cold_pairs_ms=(900,))]
    cost = cost_of(rows, Load([600], "here", rate=10))
    assert cost is not None
    assert cost.path == "tcp push, measured at 500 … 1,000 tokens"
    assert (cost.measured, cost.reached, cost.setup_ms, cost.exposed_ms) == (True, 1, 92, 3)
    assert (cost.percent, cost.median_ms, cost.p99_ms) == pytest.approx((140 / 6, 140, 140))
    assert cost.gbit == pytest.approx(10 / 3)
    assert share(cost) == pytest.approx(10 * 0.14)


def test_a_load_that_a_measurement_reaches_in_part_is_told_by_that_part() -> None:
    cost = cost_of([row(500, 100), row(1000, 300)], Load([100, 500, 1000, 9000], "here"))
    assert cost is not None
    assert cost.path == "tcp push, measured at 500 … 1,000 tokens, 50% of the prompts"
    assert (cost.reached, cost.setup_ms, cost.p99_ms, cost.busy) == (0.5, None, None, None)
    assert cost.percent == pytest.approx(400 / 15)


def test_first_tokens_are_told_of_a_load_whose_every_prompt_is_reached() -> None:
    """500 tokens that took 500 ms of prefill, and 100 of the path."""
    for prompts, mean_ms in ([500, 1000], 600), ([500, 9000], None):
        traffic = replace(traffic_of(Load(prompts, "here", rate=0.01)), replays=[Replay([500], [0.0], [0.0], [500.0])])
        (path,) = measured_paths([row(500, 100), row(1000, 300)])
        cost = path_cost(path, traffic, {})
        assert cost is not None
        found = cost.first_tokens
        assert (found and found.mean_ms) == mean_ms


@pytest.mark.parametrize("prompts", [[499], [1001], [1, 10_000]])
def test_a_measurement_that_does_not_reach_is_not_used(prompts: list[int]) -> None:
    assert cost_of([row(500, 100), row(1000, 300)], Load(prompts, "here")) is None


def test_first_tokens_are_not_told_where_the_shortest_or_the_longest_prompt_is_not_reached() -> None:
    """One of many thousand."""
    load = Load([500] * 5000 + [90_000], "here", rate=0.01)
    traffic = replace(traffic_of(load), replays=[Replay([90_000], [0.0], [0.0], [500.0])])
    (path,) = measured_paths([row(500, 100), row(1000, 300)])
    cost = path_cost(path, traffic, {})
    assert cost is not None
    assert (cost.reached, cost.first_tokens) == (5000 / 5001, None)
    assert cost.path.endswith(", 99.98% of the prompts")


def test_a_few_long_prompts_weigh_what_they_do() -> None:
    """3 of 1,000 have three quarters of the tokens; 1 Mbit a token takes 1 ms at 1 Gb/s."""
    load = Load([100] * 997 + [100_000] * 3, "here", rate=1)
    source = PrefillTimes([(100, 100.0), (100_000, 1e6)], "times.csv")
    (path,) = line_rate_paths(replace(traffic_of(load, Assumptions(link_gbit=(1.0,))), source=source))
    assert path.percent == pytest.approx(399_700 / 3_099_700 * 100)
    assert path.busy is not None
    assert path.busy.share == pytest.approx(0.3997)


def test_sends_are_as_the_longest_row_s_own_pipelining_found_them() -> None:
    found = Link(1e5, 2e5, 5.0, reach=Span((1e6, 1e8)))
    (path,) = measured_paths([row(500, 100), row(1000, 300, sends=found)])
    assert path.sends is found
    assert path.transfer_ms(600) == 140  # whole requests are as they were measured
    (alone,) = measured_paths([row(500, 100, sends=found)])
    assert alone.sends is found
    (unknown,) = measured_paths([row(500, 100)])
    assert unknown.sends is None


def test_one_length_is_that_length_alone() -> None:
    (path,) = measured_paths([row(500, 100)])
    assert [path.reaches(tokens) for tokens in (499, 500, 501)] == [False, True, False]
    assert path.transfer_ms(500) == 100
    assert path.named == "tcp push, measured at 500 tokens"


@pytest.mark.parametrize(
    "other",
    [
        {"scope": "loopback"},
        {"scope": "host"},
        {"backend": "null"},
        {"transfer_ms": None},
        {"inflight": 4},
        {"model": "n"},
        {"tp": (2, 2)},
        {"pp": (1, 2)},
        {"descriptors": 41},
        {"dtype": "fp16"},
        {"bytes": 1},
        {"tokens": 0, "bytes": 0},
        {"tokens": 10**30, "bytes": moved(10**30)},
    ],
)
def test_what_says_nothing_about_this_cache_on_a_link_is_no_path(other: dict[str, Any]) -> None:
    assert measured_paths([replace(row(1000, 8), **other)]) == []
