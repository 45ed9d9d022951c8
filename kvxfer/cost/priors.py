"""What is known of a transfer before it is observed: named ranges, each with where it comes from.

They are wide on purpose. What they leave open is said to be open, and which measurement would settle it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

GBIT_PER_GBYTE = 8


@dataclass(frozen=True)
class Prior:
    """One range, and its source; `unit` is that of both ends."""

    name: str
    low: float
    high: float
    unit: str
    source: str


POSTING = Prior(
    "posting",
    0.05,
    40.0,
    "µs per descriptor",
    "from a loop in native code to the slowest that was reported (NIXL #176: 15,000 segments in 0.6 s)",
)
FAST_POSTING = replace(POSTING, low=0.0, source="no slower than the slowest that was reported (NIXL #176)")
"""Where a loop in native code is too slow: what a backend merges is not posted one by one."""

USUAL_POSTING_US = (2.4, 3.2)
"""Per descriptor in reports of vLLM with NIXL (vLLM #35264, #34054)."""

PLAUSIBLE_POSTING = Prior(
    "posting",
    0.0,
    2 * USUAL_POSTING_US[1],
    "µs per descriptor",
    "twice the usual: more is no ground to join observations",
)

TCP_ALPHA_US, TCP_GAMMA_US = 62.0, 0.25
TCP_FIT = "kvxfer's own fit of tcp push within one host of 2 CPUs"
"""What `make cost-model` found on 2026-11-30: bench/results has it."""

FIXED = Prior(
    "fixed cost",
    0.0,
    300.0,
    "ms",
    "twice the most that a report of steady transfers leaves over (vLLM #50913)",
)


def wire(link_gbit: Sequence[float]) -> Prior:
    """Bandwidth, of which only the upper end is known."""
    fastest = max(link_gbit)
    return Prior("bandwidth", 0.0, fastest / GBIT_PER_GBYTE, "GB/s", f"{fastest:g} Gb/s, the fastest of --link")


def one_path(tolerance: float) -> Prior:
    """That several observations have the same α, γ and β, and by what share of a time they may miss it."""
    return Prior("misfit", 0.0, 100 * tolerance, "% of a time", "all are of one path, with one α, γ and β")
