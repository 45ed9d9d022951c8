"""What production reported, and what a log line of one's own says: bounds, never more than the figures carry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_files import CASES

from kvxfer.cost.observed import FASTER_LINK, RIGHT_TRANSPORT, Explained, explain
from kvxfer.cost.terms import Observation, Range
from kvxfer.errors import UsageError

LINKS = (100.0, 200.0, 400.0)


def one(*observations: Observation, links: tuple[float, ...] = LINKS) -> Explained:
    """The first of these, as explained beside the others."""
    return explain(observations, links).explained[0]


def percent(explained: Explained, term: str) -> tuple[float, float]:
    found = explained.terms[term]  # type: ignore[index]
    assert explained.observation.ms is not None
    return 100 * found.low / explained.observation.ms, 100 * found.high / explained.observation.ms


def at_most(explained: Explained, remedy: str) -> float:
    """In percent of the whole."""
    (ms,) = [ms for what, ms in explained.helps if what.startswith(remedy)]
    return explained.share(ms) or 0.0


# --- what was reported, by its issue -------------------------------------------------------------------------------


def test_vllm_34054_is_bound_by_descriptors_and_a_faster_link_wins_a_quarter() -> None:
    case = one(Observation(ms=173.8, bytes=328_204_288, descriptors=40_064, post_ms=129.1))
    assert case.binds == "posting"
    assert percent(case, "posting") == pytest.approx((74.3, 74.3), abs=0.1)
    assert case.post_us == pytest.approx(3.22, abs=0.01)
    assert at_most(case, FASTER_LINK) == pytest.approx(25.7, abs=0.1)
    assert case.helps[0][0].startswith("fewer descriptors")


def test_vllm_35264_tells_the_time_per_descriptor_and_not_what_binds() -> None:
    case = one(Observation(descriptors=18_880, post_ms=46))
    assert case.post_us == pytest.approx(2.44, abs=0.01)
    assert case.binds is None
    assert case.measure == ["ms: how long the whole transfer takes, from its post to its completion"]


def test_vllm_35264_the_short_request_does_not_have_the_long_one_s_time_per_descriptor() -> None:
    """0.46 ms for 118 are 3.9 µs each, 46 ms for 18,880 are 2.4: no one γ, and it says so. What was logged stands."""
    told = [Observation(descriptors=118, post_ms=0.46), Observation(descriptors=18_880, post_ms=46)]
    found = explain(told, LINKS)
    assert found.tolerance > 0.1
    assert not found.priors
    for case in found.explained:
        assert (case.terms["posting"].low, case.terms["posting"].high) == (case.observation.post_ms,) * 2


def test_what_was_logged_stands_where_others_do_not_fit_well() -> None:
    """The third has 18.9 to 27.9 ms of posting for its 10,000 descriptors, more than the share that is off leaves."""
    told = [Observation(descriptors=118, post_ms=0.46), Observation(descriptors=18_880, post_ms=46, ms=50, bytes=1e6)]
    found = explain([*told, Observation(ms=100, bytes=1e8, descriptors=10_000)], LINKS)
    _, logged, other = found.explained
    assert percent(logged, "posting") == (92, 92)
    assert percent(logged, "wire")[1] <= 8.01
    assert other.terms["posting"].low < 24.4
    assert other.terms["posting"].high > 39


def test_bytes_are_asked_for_where_nothing_is_known_of_the_wire() -> None:
    without = "bytes: without them nothing is known of the wire"
    assert without in one(Observation(ms=263, descriptors=20_480)).measure
    assert without not in one(Observation(ms=263, descriptors=20_480, wire_ms=29)).measure
    assert one(Observation(ms=263, descriptors=20_480, wire_ms=29)).terms["wire"].high == pytest.approx(29)


@pytest.mark.parametrize(
    ("observation", "assumed"),
    [
        (Observation(descriptors=18_880, post_ms=46), []),
        (Observation(ms=100), ["fixed cost"]),
        (Observation(ms=263, descriptors=20_480, wire_ms=29), ["posting", "fixed cost"]),
        (Observation(ms=100, bytes=1e9), ["fixed cost", "bandwidth"]),
        (Observation(ms=100, bytes=1e9, descriptors=1000), ["posting", "fixed cost", "bandwidth"]),
        (Observation(ms=100, bytes=1e9, descriptors=1000, post_ms=2), ["fixed cost", "bandwidth"]),
    ],
)
def test_what_no_figure_rests_on_is_not_said_to_be_assumed(observation: Observation, assumed: list[str]) -> None:
    assert [prior.name for prior in explain([observation], LINKS).priors] == assumed


def test_vllm_52607_the_two_directions_are_not_one_path() -> None:
    pull, push = (Observation(ms=1e9 / (rate * 1e6), bytes=1e9, descriptors=2560) for rate in (0.5, 49))
    with pytest.raises(UsageError, match=r"0\.5 to 49 GB/s: one direction can fall back to TCP alone"):
        explain([pull, push], LINKS)


def test_vllm_52607_without_descriptors_nothing_binds_in_the_slow_direction() -> None:
    """Only posting of which nothing was told could explain both on one path, and that is no ground to say it binds."""
    found = explain([Observation(ms=ms, bytes=2_684_354_560) for ms in (5368, 54.8)], (400.0,))
    pull, push = found.explained
    assert pull.binds is None
    assert percent(pull, "wire")[1] == pytest.approx(100)
    assert "which transport" in pull.measure[0]
    assert any(what.startswith("descriptors") for what in pull.measure)
    assert push.binds == "wire"
    assert not push.measure
    (notice,) = found.notices
    assert "the same bytes took 98 times as long" in notice
    assert "which transport carried each" in notice


def test_vllm_52607_posting_slower_than_ever_reported_is_no_explanation() -> None:
    """It took 131 µs a descriptor, or with 500 for the fast direction 131 too: 40 is the most that was reported."""
    size = 2_684_354_560
    pull, push = Observation(ms=5368, bytes=size, descriptors=40_960), Observation(ms=54.8, bytes=size)
    found = explain([pull, push], (400.0,))
    assert found.explained[0].binds == "wrong transport"
    assert percent(found.explained[0], "posting")[1] < 31
    assert "98 times as long" in found.notices[0]
    with pytest.raises(UsageError, match="98 times as long"):
        explain([pull, Observation(ms=54.8, bytes=size, descriptors=500)], (400.0,))


def test_posting_slower_than_usual_that_nobody_told_joins_no_observations() -> None:
    """11.8 µs a descriptor in the slow direction, or a link that carries a tenth: what it is follows from post_ms."""
    size = 2_684_354_560
    pull = Observation(ms=540, bytes=size, descriptors=40_960)
    push = Observation(ms=60, bytes=size, descriptors=500)
    found = explain([pull, push], (400.0,))
    assert found.explained[0].binds is None
    assert any(what.startswith("post_ms") for what in found.explained[0].measure)
    assert "posting of more than 6.4 µs a descriptor would explain these observations" in found.notices[0]
    told = explain([Observation(ms=540, bytes=size, descriptors=40_960, post_ms=480), push], (400.0,))
    assert told.explained[0].binds == "posting"
    assert not told.notices


def test_several_reasons_for_not_fitting_are_not_refused() -> None:
    """Posting is slow, 17.7 µs a descriptor, and one of them does not tell its descriptors."""
    sizes = ((832.2, 7_752_023_396, 225), (1636, 6_536_976, None), (1435, 6_536_976, 80_443))
    found = explain([Observation(ms=ms, bytes=size, descriptors=count) for ms, size, count in sizes], (100.0,))
    assert "descriptors that nobody told or posting of more than 6.4 µs a descriptor" in found.notices[0]
    assert found.explained[0].binds == "wire"


def test_vllm_52607_a_pull_of_half_a_gigabyte_per_second_is_carried_by_something_else() -> None:
    case = one(Observation(ms=2000, bytes=1e9, descriptors=2560))
    assert case.binds == "wrong transport"
    assert "which transport" in case.measure[0]
    assert case.helps[0][0] == RIGHT_TRANSPORT


def test_vllm_50913_fixed_cost_dominates() -> None:
    """Blocks of 16 → 64 leave a quarter of the descriptors; the data alone takes about 29 ms."""
    blocks = 320
    small = Observation(ms=263, descriptors=64 * blocks, wire_ms=29)
    large = Observation(ms=197, descriptors=16 * blocks, wire_ms=29)
    for case in explain([small, large], LINKS).explained:
        assert case.binds == "fixed"
        assert case.terms["fixed"].low == pytest.approx(146, abs=7)  # by what times are taken to be off: 1 % of 263


@pytest.mark.parametrize(("share", "binds"), [(56.9, "posting"), (15.0, None)], ids=["cuda_ipc", "InfiniBand"])
def test_vllm_55434_posting_binds_on_cuda_ipc_and_not_on_infiniband(share: float, binds: str | None) -> None:
    case = one(Observation(ms=250, bytes=4.9e9, descriptors=105_000, post_ms=2.5 * share))
    assert case.binds == binds
    assert at_most(case, FASTER_LINK) <= 100 - share + 0.1


def test_vllm_53825_is_18_percent_of_line_rate_and_what_binds_is_open() -> None:
    size = 32_000 * 16_384
    case = one(Observation(ms=size / 9e6, bytes=size, descriptors=32_000), links=(400.0,))
    assert percent(case, "wire")[0] == pytest.approx(18, abs=0.1)
    assert case.binds is None
    assert any(what.startswith("post_ms") for what in case.measure)


@pytest.mark.parametrize("rate", [0.4, 0.32], ids=["NIXL #922", "NIXL #1021"])
def test_nixl_something_else_than_nvlink_carries_the_bytes(rate: float) -> None:
    case = one(Observation(ms=1e9 / (rate * 1e6), bytes=1e9, descriptors=1000), links=(2400.0,))
    assert case.binds == "wrong transport"


def test_nixl_176_posting_is_far_slower_than_usual() -> None:
    case = one(Observation(ms=700, descriptors=15_000, post_ms=600))
    assert case.binds == "posting"
    assert case.post_us == pytest.approx(40)


@pytest.mark.parametrize(
    ("observation", "asks"),
    [
        (Observation(ms=6400, descriptors=15_000, post_ms=600), "bytes"),
        (Observation(ms=5000, post_ms=100), "bytes"),
        (Observation(ms=2000, wire_ms=100), "descriptors and post_ms"),
    ],
)
def test_nixl_176_what_stands_on_the_usual_fixed_cost_alone_asks_whether_it_was_the_first(
    observation: Observation, asks: str
) -> None:
    """5.8 s of its 6.4 were set-up; without bytes they were told as those of the wire."""
    case = one(observation)
    assert case.binds is None
    assert case.measure[0].startswith("whether this was the first request of its pair")
    assert case.measure[1].startswith(asks)


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        (Observation(ms=90, post_ms=80, wire_ms=80), "took alike long"),
        (Observation(ms=100, bytes=1e9, descriptors=10_000, post_ms=40, wire_ms=30), "whether posting and wire were"),
    ],
)
def test_where_no_figure_settles_it_that_is_said(observation: Observation, says: str) -> None:
    case = one(observation)
    assert case.binds is None
    assert says in case.measure[0]


def test_a_first_request_beside_a_steady_one_is_named() -> None:
    told = [Observation(ms=ms, bytes=1e9, descriptors=2000, post_ms=5) for ms in (30, 5830)]
    with pytest.raises(UsageError, match="the first request of a pair has its set-up in it"):
        explain(told, LINKS)


def test_lmcache_4432_is_bound_by_bandwidth() -> None:
    fast, slow = (one(Observation(ms=1e9 / (rate * 1e6), bytes=1e9), links=(100.0,)) for rate in (9.3, 6.0))
    assert fast.binds == "wire"
    assert percent(fast, "wire")[0] == pytest.approx(74.4, abs=0.1)
    assert slow.binds is None  # 48 % of it at line rate: the rest may be anything


def test_sglang_31993_faster_than_the_link_is_refused() -> None:
    with pytest.raises(UsageError, match="above the line rate of 50 GB/s"):
        explain([Observation(ms=10, bytes=1e9)], LINKS)


def test_sglang_28737_38_s_of_connecting_are_more_than_any_steady_transfer_has() -> None:
    case = one(Observation(ms=38_000, bytes=1e8, descriptors=1000))
    assert case.binds == "wrong transport"
    assert "first request" in case.measure[0]


def test_efa_is_12_percent_of_line_rate_and_open() -> None:
    case = one(Observation(ms=130, bytes=0.79e9))
    assert percent(case, "wire")[0] == pytest.approx(12.2, abs=0.1)
    assert case.binds is None
    assert any("descriptors" in what for what in case.measure)


def test_mooncake_published_a_small_transfer_never_sees_the_line_rate() -> None:
    """Two sizes of one path: the small one is not bound by its bytes, the large one may be."""
    small, large = Observation(ms=20e6 / 36.5e6, bytes=20e6), Observation(ms=31.7, bytes=4.5e9)
    found = explain([small, large], (3200.0,))
    assert percent(found.explained[0], "wire")[1] < 27
    assert percent(found.explained[1], "wire")[1] > 99
    assert percent(found.explained[1], "fixed")[1] < 3


@pytest.mark.skipif(not CASES.exists(), reason="the shared cases are not here")
def test_the_shared_cases() -> None:
    first, second = json.loads(CASES.read_text())["cost_model"]
    case = one(Observation(first["total_ms"], first["bytes"], first["descriptors"], first["post_ms"]))
    share = percent(case, "posting")[0]
    assert first["says"] == f"{case.post_us:.1f} us a descriptor, {share:.0f} % posting: descriptor-bound"
    assert case.binds == "posting"
    case = one(Observation(descriptors=second["descriptors"], post_ms=second["post_ms"]))
    assert second["says"] == f"{case.post_us:.1f} us a descriptor"


# --- in general -----------------------------------------------------------------------------------------------------


TRUTHS: dict[str, st.SearchStrategy[Any]] = {
    "alpha": st.floats(0.01, 200),
    "gamma_us": st.floats(0.1, 30),
    "rate": st.floats(1, 49),
    "size": st.floats(1e6, 1e10),
    "count": st.integers(1, 100_000),
    "tells_posting": st.booleans(),
}
"""A path (ms, µs, GB/s), a request over it, and whether its log tells posting."""


@given(**TRUTHS, further=st.booleans())
def test_the_truth_is_always_within_the_bounds(
    alpha: float, gamma_us: float, rate: float, size: float, count: int, tells_posting: bool, further: bool
) -> None:
    def observed(size: float, count: int) -> Observation:
        posting = gamma_us * count / 1e3
        return Observation(alpha + posting + size / rate / 1e6, size, count, posting if tells_posting else None)

    others = [observed(size / 7, count + 5)] if further else []
    case = one(observed(size, count), *others)
    true = {"posting": gamma_us * count / 1e3, "fixed": alpha, "wire": size / rate / 1e6}
    slack = 1e-4 * (case.observation.ms or 1)
    for term, ms in true.items():
        found = case.terms[term]  # type: ignore[index]
        assert found.low - slack <= ms <= found.high + slack
    if case.binds in true:
        assert true[str(case.binds)] >= max(true.values()) - slack
    for _, most in case.helps:
        assert most <= (case.observation.ms or 0) + slack


@pytest.mark.parametrize(
    "observation",
    [Observation(ms=38_000, wire_ms=29), Observation(ms=38_000, descriptors=1000)],
    ids=["posting", "wire"],
)
def test_a_term_of_which_nothing_was_told_does_not_bind(observation: Observation) -> None:
    assert one(observation).binds is None


@pytest.mark.parametrize("more", [{}, {"bytes": 878_516}, {"descriptors": 2522}])
def test_one_that_tells_its_wire_and_not_its_whole_time_contradicts_nothing(more: dict[str, float]) -> None:
    """However much longer the wire took than posting."""
    case = one(Observation(post_ms=0.001, wire_ms=2000, **more))
    assert case.terms == {"posting": Range(0.001, 0.001)}
    assert case.measure == ["ms: how long the whole transfer takes, from its post to its completion"]


def test_what_rounding_hides_is_not_told_to_three_digits() -> None:
    """0.1 % of 1,794 ms is a quarter of what the small one has: α is 6.73 and β 15.9 GB/s."""
    large = Observation(ms=1794, descriptors=61_663, post_ms=1746, wire_ms=41.12)
    found = explain([large, Observation(ms=13.28, bytes=103_766_644, descriptors=1)], (200.0,))
    small = found.explained[1].terms
    assert small["fixed"].low < 6.73 < small["fixed"].high
    assert small["wire"].low < 6.52 < small["wire"].high
    assert "misfit" in [prior.name for prior in found.priors]


def test_what_posting_and_rounding_leave_of_the_time_is_no_contradiction() -> None:
    """0.07 ms of wire are lost in 703, and 131 are 0.0757 of posting and 131 of wire."""
    rest = Observation(ms=398, bytes=374_976_075, descriptors=41_289, post_ms=380)
    assert one(Observation(ms=703, bytes=1_566_407, post_ms=703), rest, links=(200.0,)).binds == "posting"
    both = Observation(ms=131, bytes=722_732_990, descriptors=570, post_ms=0.0757, wire_ms=131)
    assert one(both, links=(200.0,)).binds == "wire"


def test_more_fixed_cost_than_steady_requests_have_asks_whether_it_was_the_first() -> None:
    """SGLang #28737's 38 s of connecting, where the wire's time is known."""
    case = one(Observation(ms=38_000, descriptors=1000, wire_ms=29))
    assert case.binds == "fixed"
    assert case.measure[0].startswith("whether this was the first request of its pair")


@given(
    ms=st.floats(1e-3, 1e6),
    size=st.none() | st.floats(1, 1e10),
    count=st.floats(1, 1e9),
    wire=st.none() | st.floats(0, 1),
)
def test_one_observation_alone_is_never_of_different_paths(
    ms: float, size: float | None, count: float, wire: float | None
) -> None:
    """Descriptors that a backend merges take less time each than a loop in native code."""
    rate_ok = size is None or size / 1e6 / (ms * (wire or 1)) < 50
    if rate_ok and wire != 0:
        one(Observation(ms, size, count, wire_ms=None if wire is None else ms * wire))


def test_those_that_tell_enough_stay_together_where_another_does_not_fit() -> None:
    def told(size: float) -> Observation:
        return Observation(ms=50 + size / 10e6, bytes=size, descriptors=1000, post_ms=1)

    found = explain([told(0.5e9), Observation(ms=20_000, bytes=1e9), told(4e9)], LINKS)
    first, slow, last = found.explained
    for case in (first, last):
        assert (case.terms["fixed"].low, case.terms["fixed"].high) == pytest.approx((49, 49), abs=7)
    assert slow.binds is None
    assert "they move 0.05 to 8.89 GB/s" in found.notices[0]


def test_times_that_are_a_little_off_fit_without_what_nobody_told() -> None:
    """The same bytes in 100 and in 108 ms are noise, and no sign of 8 ms of posting."""
    found = explain([Observation(ms=ms, bytes=4e9) for ms in (100, 108)], LINKS)
    assert found.tolerance == 0.05
    assert not found.notices
    assert all(case.terms["posting"].low == 0 for case in found.explained)


def test_the_transport_is_asked_for_where_the_wire_could_be_far_below_the_link() -> None:
    def asks(ms: float, **more: float) -> bool:
        return any("which transport" in what for what in one(Observation(ms, 1e9, **more), links=(400.0,)).measure)

    assert asks(2000)
    assert asks(2000, post_ms=1000)
    assert not asks(2000, post_ms=1970)  # 30 ms of wire at most
    assert not asks(100)


@given(
    alpha=st.floats(0.01, 200),
    gamma_us=st.floats(0.1, 30),
    rate=st.floats(1, 49),
    told=st.lists(
        st.tuples(st.floats(1e6, 1e10), st.integers(1, 100_000), st.booleans(), st.booleans(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
)
def test_the_truth_is_within_the_bounds_of_several_rounded_ones_whatever_each_tells(
    alpha: float, gamma_us: float, rate: float, told: list[tuple[float, int, bool, bool, bool]]
) -> None:
    observations, true = [], []
    for size, count, tells_bytes, tells_descriptors, tells_posting in told:
        terms = {"posting": gamma_us * count / 1e3, "fixed": alpha, "wire": size / rate / 1e6}
        ms, post_ms = (float(f"{each:.3g}") for each in (sum(terms.values()), terms["posting"]))
        true.append(terms)
        observations.append(
            Observation(
                ms,
                size if tells_bytes else None,
                count if tells_descriptors else None,
                min(post_ms, ms) if tells_posting else None,
            )
        )
    found = explain(observations, (400.0,))
    for case, terms in zip(found.explained, true, strict=True):
        slack = 0.011 * (case.observation.ms or 1)
        for term, ms in terms.items():
            bounds = case.terms[term]  # type: ignore[index]
            assert bounds.low - slack <= ms <= bounds.high + slack
        if case.binds in terms:
            assert terms[str(case.binds)] >= max(terms.values()) - slack


def test_only_what_was_assumed_is_listed() -> None:
    def assumed(**more: float) -> list[str]:
        return [
            prior.name for prior in explain([Observation(ms=100, bytes=1e8, descriptors=1000, **more)], LINKS).priors
        ]

    assert assumed() == ["posting", "fixed cost", "bandwidth"]
    assert assumed(post_ms=50) == ["fixed cost", "bandwidth"]


def test_a_second_size_tells_fixed_cost_from_bandwidth() -> None:
    def observed(size: float) -> Observation:
        return Observation(ms=50 + size / 10e6, bytes=size, descriptors=1000, post_ms=1)

    alone, beside = one(observed(0.5e9)), one(observed(0.5e9), observed(4e9))
    assert any("a second request" in what for what in alone.measure)
    assert not any("a second request" in what for what in beside.measure)
    assert (beside.terms["fixed"].low, beside.terms["fixed"].high) == pytest.approx((49, 49), abs=3)


def test_where_posting_and_wire_overlap_each_wins_what_the_other_leaves() -> None:
    """80 ms of posting and 60 of data in 100: 40 at least were under way at once."""
    found = explain([Observation(ms=100, bytes=1e9, descriptors=10_000, post_ms=80, wire_ms=60)], LINKS)
    case = found.explained[0]
    assert 100 * found.tolerance < 0.1
    assert case.binds == "posting"
    assert percent(case, "posting") == pytest.approx((80, 80), abs=0.1)
    assert percent(case, "wire") == pytest.approx((0, 20), abs=0.1)
    assert at_most(case, FASTER_LINK) == pytest.approx(20, abs=0.1)
    assert at_most(case, "half the bytes") == pytest.approx(20, abs=0.1)
    assert at_most(case, "fewer descriptors") == pytest.approx(40, abs=0.1)


def test_bytes_that_take_longer_than_posting_leaves_overlapped_it() -> None:
    """2 GB take 40 ms on the fastest link, and posting leaves 20."""
    case = one(Observation(ms=100, bytes=2e9, post_ms=80))
    assert percent(case, "posting") == pytest.approx((80, 80), abs=0.1)
    assert at_most(case, FASTER_LINK) == pytest.approx(20, abs=0.1)


@given(**TRUTHS, overlap=st.booleans())
def test_nothing_wins_more_than_is_said_whether_or_not_posting_and_wire_overlapped(
    alpha: float, gamma_us: float, rate: float, size: float, count: int, tells_posting: bool, overlap: bool
) -> None:
    def whole(posting: float, wire: float) -> float:
        return alpha + (max(posting, wire) if overlap else posting + wire)

    posting, wire = gamma_us * count / 1e3, size / rate / 1e6
    ms = whole(posting, wire)
    case = one(Observation(ms, size, count, posting if tells_posting else None))
    wins = {
        "fewer descriptors": ms - whole(0, wire),
        "a faster link" if case.binds != "wrong transport" else RIGHT_TRANSPORT: ms - whole(posting, 0),
        "half the bytes": ms - whole(posting, wire / 2),
        "less fixed cost": alpha,
    }
    for remedy, won in wins.items():
        assert won <= at_most(case, remedy) / 100 * ms + 1e-4 * ms


def test_an_overlap_that_is_seen_is_not_counted_again_as_fixed_cost() -> None:
    case = one(Observation(ms=17.24, post_ms=16.99, wire_ms=12.82))
    assert at_most(case, "less fixed cost") == pytest.approx(100 * 0.25 / 17.24, abs=0.1)
    assert case.helps[0][0].startswith("fewer descriptors")


def test_posting_that_the_wire_may_have_outlasted_does_not_bind() -> None:
    """2.2 GB take 43.5 ms on the fastest link, and may have taken all of the 45."""
    case = one(Observation(ms=45.02, bytes=2_175_646_523, descriptors=15_275, post_ms=44))
    assert case.binds is None
    assert case.measure[0].startswith("wire_ms")
    assert one(Observation(ms=45.02, bytes=2e9, descriptors=15_275, post_ms=44, wire_ms=42)).binds == "posting"


@pytest.mark.parametrize(
    "observation",
    [
        Observation(ms=6.289, bytes=4_457_687, descriptors=15_818, post_ms=2.732, wire_ms=2.353),
        Observation(ms=24.68, bytes=92_219_496, post_ms=4.29, wire_ms=10.65),
    ],
)
def test_nothing_binds_that_a_hidden_overlap_makes_shorter_than_the_fixed_cost(observation: Observation) -> None:
    """Both were under way at once: the rest, 57 %, is fixed cost."""
    case = one(observation)
    assert case.binds is None
    assert at_most(case, "less fixed cost") == pytest.approx(57, abs=0.5)


def test_bytes_at_a_little_above_the_line_rate_leave_nothing_to_win_and_no_loss() -> None:
    case = one(Observation(ms=20, bytes=1.01e9), links=(400.0,))
    assert at_most(case, "fewer descriptors") == 0


@pytest.mark.parametrize(
    ("post_ms", "wire_ms", "binds"), [(20, 60, "wire"), (50, 60, "wire"), (60, 50, "posting"), (80, 80, None)]
)
def test_of_two_that_overlap_the_longer_binds(post_ms: float, wire_ms: float, binds: str | None) -> None:
    assert one(Observation(ms=max(70, wire_ms + 10), post_ms=post_ms, wire_ms=wire_ms)).binds == binds


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        (Observation(bytes=1e9), "has ms, or at least post_ms"),
        (Observation(ms=1, post_ms=2), "post_ms 2 is more than ms 1"),
        (Observation(ms=1, wire_ms=2), "wire_ms 2 is more than ms 1"),
    ],
)
def test_what_contradicts_itself_is_refused(observation: Observation, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        explain([observation], LINKS)


def test_too_many_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 8"):
        explain([Observation(ms=1)] * 9, LINKS)
