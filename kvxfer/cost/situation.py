"""What the rules of the verdict look at, and what one of them finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.cache.layout import Ranks
from kvxfer.cost.colocated import Mode
from kvxfer.cost.load import Load
from kvxfer.cost.pools import Pools
from kvxfer.cost.rests_on import SENDS
from kvxfer.cost.split import PathCost
from kvxfer.model.dtypes import DType

Number = float | int | str | None


@dataclass(frozen=True)
class Finding:
    """Whether a rule holds (None: open), why in words, and the numbers and thresholds that say so."""

    holds: bool | None
    why: str
    numbers: dict[str, Number] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    rests_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Situation:
    """All that the rules look at: one load on one cluster, over one path in one dtype; None where not said.

    modes are what colocated engines do under the load, but with the chunks_not_known, whose prefill is not known. ranks
    are those of prefill and decode, where those that are best for each were named. path is None without a prefill to
    set it against. assumed are the assumptions of the figures.
    """

    objective: str | None
    itl_target_ms: float | None
    step_ms: float | None
    load: Load
    pools: Pools
    modes: Sequence[Mode]
    ranks: tuple[Ranks, Ranks] | None
    dtype: DType
    path: PathCost | None
    assumed: frozenset[str]
    chunks_not_known: Sequence[int] = ()

    @property
    def counts_pipelining(self) -> bool:
        """Whether what pipelining leaves exposed is known; sends that are assumed to cost nothing say too little."""
        return self.path is not None and self.path.pipelined is not None and SENDS not in self.assumed

    @property
    def waiting_percent(self) -> float:
        """What the first token waits for on the path, in percent of prefill."""
        assert self.path is not None
        found = self.path.pipelined
        if found is None or not self.counts_pipelining:
            return self.path.percent
        if found.percent <= found.serial_percent:
            return min(found.percent, self.path.percent)  # a prompt can go whole, too, as it was measured
        return found.percent

    def rests_on(self, *assumptions: str) -> tuple[str, ...]:
        """Those of these assumptions that were made."""
        return tuple(assumption for assumption in assumptions if assumption in self.assumed)

    def missing(self, *names: str) -> tuple[str, ...]:
        """Those of these options that were not given."""
        cluster = self.pools.cluster
        known = {
            "--rate": self.load.requests_per_s,
            "--output-tokens": self.load.mean_output,
            "--decode-step-ms": self.step_ms,
            "--itl-target-ms": self.itl_target_ms,
            "--prefill-gpus": cluster.prefill,
            "--decode-gpus": cluster.decode,
        }
        return tuple(name for name in names if known[name] is None)


def unknown(
    why: str,
    needs: tuple[str, ...],
    numbers: dict[str, Number] | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Finding:
    """A finding that is open for lack of `needs`."""
    return Finding(None, why, numbers or {}, thresholds or {}, needs)
