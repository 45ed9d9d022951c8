"""Order statistics of measured times: median, percentiles, the interval of the median, and when to stop.

Samples are integers of nanoseconds in any order, and so are the answers. Nothing here assumes a distribution: times on
a shared machine are skewed and have several modes, so that means and standard deviations would mislead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Samples: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

TAIL_SAMPLES = 10
"""A percentile is reported only when about so many samples lie beyond it; of fewer it would be an outlier's time."""


def median(samples: Samples) -> int:
    """The median in ns, of any number of samples from one.

    It is not held to the rule of `percentile`: on a slow link a few long transfers are all there is time for, and their
    median is still the headline (`p50_ns` of a result). What few samples leave open is said by `median_interval`.
    Raises ValueError when there is no sample.
    """
    if len(samples) == 0:
        raise ValueError("the median of no samples")
    return round(float(np.median(np.asarray(samples))))


def percentile(samples: Samples, p: float) -> int | None:
    """The percentile `p` (a fraction, 0.99 for p99) in ns, interpolated linearly; None below 10/(1−p) samples.

    So p90 takes 100 samples and p99 1000. Raises ValueError when `p` is not between 0 and 1.
    """
    if len(samples) < samples_needed(p):
        return None
    return round(float(np.quantile(np.asarray(samples), p)))


def samples_needed(p: float) -> int:
    """The fewest samples of which the percentile `p` is reported: 10/(1−p)."""
    if not 0 < p < 1:
        raise ValueError(f"a percentile is a fraction between 0 and 1, not {p}")
    return math.ceil(round(TAIL_SAMPLES / (1 - p), 6))  # rounded first: 10/(1−0.9) is no integer in floating point


def median_interval(samples: Samples, level: float = 0.95) -> tuple[int, int] | None:
    """An interval (low, high) in ns that holds the true median with at least the probability `level`.

    Its ends are samples, the k-th from below and the k-th from above: however the samples are distributed, the number
    of them below the true median is binomial(n, ½), so the interval misses with probability 2·P(binomial(n, ½) < k)
    (David and Nagaraja, Order Statistics, 7.1). None where even the extremes reach less than `level`: below 6 samples
    for 0.95.
    """
    rank = _interval_rank(len(samples), level)
    if rank == 0:
        return None
    ordered = np.sort(np.asarray(samples))
    return int(ordered[rank - 1]), int(ordered[-rank])


def converged(samples: Samples, within: float = 0.02) -> bool:
    """Whether both ends of the 95 % interval of the median lie within the fraction `within` of the median."""
    interval = median_interval(samples)
    if interval is None:
        return False
    low, high = interval
    middle = median(samples)
    return max(high - middle, middle - low) <= within * middle


def windows_agree(a: Samples, b: Samples, within: float = 0.05) -> bool:
    """Whether the medians of two windows differ by at most the fraction `within` of the smaller; the end of warm-up.

    The order of the windows does not matter. An empty window agrees with nothing.
    """
    if len(a) == 0 or len(b) == 0:
        return False
    first, second = median(a), median(b)
    return abs(first - second) <= within * min(first, second)


def _interval_rank(n: int, level: float) -> int:
    """The largest k with 2·P(binomial(n, ½) < k) ≤ 1 − level; 0 when there is none."""
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    log_probability = log_factorial[n] - log_factorial - log_factorial[::-1] - n * math.log(2)
    below = np.cumsum(np.exp(log_probability))  # below[i] = P(binomial ≤ i)
    return int(np.count_nonzero(2 * below <= 1 - level))
