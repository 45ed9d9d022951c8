"""Order statistics, held against scipy and against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvxfer.result.statistics import converged, median, median_interval, percentile, samples_needed, windows_agree

TIMES = st.lists(st.integers(0, 10**12), min_size=1, max_size=300)


@given(TIMES)
def test_median_is_the_middle_as_an_integer(samples: list[int]) -> None:
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    assert type(median(samples)) is int
    assert abs(median(samples) - middle) <= 0.5


def test_median_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median([])


@pytest.mark.parametrize(("p", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000)])
def test_a_percentile_needs_ten_samples_beyond_it(p: float, needed: int) -> None:
    assert samples_needed(p) == needed
    assert percentile(range(needed - 1), p) is None
    assert percentile(range(needed), p) is not None


@pytest.mark.parametrize("p", [0.9, 0.99])
def test_percentile_interpolates_linearly_as_scipy_does(p: float) -> None:
    samples = np.random.default_rng(1).lognormal(12, 1, 1537).astype(np.int64)
    expected = stats.mstats.mquantiles(samples, [p], alphap=1, betap=1)[0]  # (1, 1) is the linear rule
    assert percentile(samples, p) == pytest.approx(expected, abs=1)
    assert type(percentile(samples, p)) is int


@pytest.mark.parametrize("p", [0.0, 1.0, 50, -0.1])
def test_a_percentile_is_a_fraction(p: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        percentile([1] * 2000, p)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 8, 9, 20, 21, 100, 1001, 30_000])
def test_interval_is_the_narrowest_that_reaches_its_level(n: int, level: float) -> None:
    interval = median_interval(range(1, n + 1), level)  # sample k is k, so the ends are the ranks
    if interval is None:
        assert 1 - 2 * stats.binom.cdf(0, n, 0.5) < level
        return
    low, high = interval
    assert low + high == n + 1
    assert 1 - 2 * stats.binom.cdf(low - 1, n, 0.5) >= level
    assert low + 1 > n / 2 or 1 - 2 * stats.binom.cdf(low, n, 0.5) < level


def test_interval_at_95_percent_begins_with_six_samples() -> None:
    assert median_interval([3, 1, 2, 5, 4]) is None
    assert median_interval([3, 1, 2, 5, 4, 9]) == (1, 9)
    assert median_interval([]) is None


@pytest.mark.parametrize("n", [6, 10, 25, 120])
def test_interval_covers_the_true_median_of_a_skewed_distribution(n: int) -> None:
    rng = np.random.default_rng(n)
    true_median = 1_000_000
    trials = rng.lognormal(np.log(true_median), 0.7, (2000, n)).astype(np.int64)
    intervals = [median_interval(trial) for trial in trials]
    covered = sum(low <= true_median <= high for low, high in filter(None, intervals))
    assert covered / len(trials) >= 0.93
    assert covered < len(trials)  # an interval that is always right is too wide to be one of 95 %


@given(TIMES)
def test_interval_holds_the_median(samples: list[int]) -> None:
    interval = median_interval(samples)
    if len(samples) < 6:
        assert interval is None
    else:
        assert interval is not None
        assert interval[0] <= median(samples) <= interval[1]


def test_converged_looks_at_the_farther_end() -> None:
    assert converged([1000] * 6)
    assert converged([980, 1000, 1000, 1000, 1000, 1020])
    assert not converged([979, 1000, 1000, 1000, 1000, 1020])
    assert not converged([980, 1000, 1000, 1000, 1000, 1021])
    assert converged([979, 1000, 1000, 1000, 1000, 1020], within=0.03)
    assert not converged([1000] * 5)


def test_windows_agree_within_a_fraction_whatever_their_order() -> None:
    assert windows_agree([1000] * 3, [1050] * 3)
    assert windows_agree([1050], [1000])
    assert not windows_agree([1000], [1051])
    assert not windows_agree([1051], [1000])
    assert windows_agree([1000], [1100], within=0.1)
    assert not windows_agree([], [1000])
    assert not windows_agree([1000], [])
