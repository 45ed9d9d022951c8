"""The first request of a pair of running engines, out of the phases of a fresh start.

Engines have their processes, library and memory already. What a new pair of them pays before its first request is
there is to connect, to exchange keys, to prepare the plan, and the first transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

COLD_PHASES = ("connect_ns", "exchange_ns", "prepare_ns", "first_ns")


def cold_pair(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row's `setup`: the sum of these phases in each start, as `p50`, `max` and `samples` in ns."""
    samples = [sum(each) for each in zip(*(setup[phase]["samples"] for phase in COLD_PHASES), strict=True)]
    return summary(samples)


def summary(samples: Sequence[int]) -> dict[str, Any]:
    """Median and longest of the fresh starts, in ns, with all of them."""
    return {"p50": int(median(samples)), "max": max(samples), "samples": list(samples)}
