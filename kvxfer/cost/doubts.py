"""What speaks against the measured times that a plan sets beside: bench says it of each row, and a plan is no surer."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.cost.fitted import Fitted
from kvxfer.cost.measured import Measured
from kvxfer.cost.prefill_layers import PrefillLayers

WHY = {
    "noisy": "others used the CPUs meanwhile (noisy); measure again on a quiet machine",
    "converged": "time was over before the median was certain (not converged); raise bench's --max-seconds",
    "hot": "data stayed in the CPU caches, as a server's would not (hot); measure longer prompts",
}


def doubts(rows: Iterable[Measured], fitted: Iterable[Fitted], layers: PrefillLayers | None) -> list[str]:
    """A sentence about each backend, op and reason; of cost models and real layers one each."""
    against: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        for doubt in row.doubts:
            against.setdefault((row.backend, row.op, doubt), []).append(row.tokens)
    found = [
        f"beware of {backend} {op}, measured at {_lengths(tokens)} tokens: {WHY[doubt]}"
        for (backend, op, doubt), tokens in against.items()
    ]
    found += [
        f"beware of the cost model of {one.backend} {one.op}: others used the CPUs during {one.noisy_share:.1%} of its "
        "requests (noisy); measure again on a quiet machine"
        for one in fitted
        if one.noisy_share
    ]
    if layers is not None and layers.noisy:
        found.append(f"beware of the prefill of real layers: {WHY['noisy']}")
    return found


def _lengths(tokens: Iterable[int]) -> str:
    return ", ".join(f"{count:,}" for count in sorted({*tokens}))
