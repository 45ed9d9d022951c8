"""Warm-up and steady state of one pair, in batches, so that several pairs can be sampled in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvxfer.measure.pair import Batch, Pair
from kvxfer.measure.request import Effort
from kvxfer.result import statistics

BATCH_NS = 250_000_000
"""A batch takes about so long: short against --max-seconds, long against what is said between batches."""

MAX_BATCH = 1000
WARM_UP_SHARE = 0.25
"""The most of --max-seconds that warming up may take."""


@dataclass
class Totals:
    """What a row's sampling batches add up to."""

    requests: int = 0
    wall_ns: int = 0
    elapsed_ns: int = 0  # the same with stamping, checking and waiting between requests
    cpu_prefill_ns: int = 0
    cpu_decode_ns: int = 0
    checking_prefill_ns: int = 0  # of that, what stamping and checking took
    checking_decode_ns: int = 0
    others_prefill_ns: int = 0  # CPU time of others on the prefill side's host
    others_decode_ns: int = 0
    steal_ns: int = 0
    batches: list[Batch] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        self.requests += len(batch.transfer_ns)
        self.wall_ns += batch.wall_ns
        self.elapsed_ns += max(batch.prefill.elapsed_ns, batch.decode.elapsed_ns)
        self.cpu_prefill_ns += batch.prefill.cpu_ns
        self.cpu_decode_ns += batch.decode.cpu_ns
        self.checking_prefill_ns += batch.prefill.checking_cpu_ns
        self.checking_decode_ns += batch.decode.checking_cpu_ns
        self.others_prefill_ns += batch.prefill.other_cpu_ns
        self.others_decode_ns += batch.decode.other_cpu_ns
        self.steal_ns += max(batch.prefill.steal_ns, batch.decode.steal_ns)
        self.batches.append(batch)

    def joined(self, name: str) -> npt.NDArray[np.int64]:
        """One series of all batches, in order."""
        return np.concatenate([getattr(batch, name) for batch in self.batches])


class SteadyState:
    """Sampling of one pair. step() runs one batch and says whether more is wanted."""

    def __init__(self, pair: Pair, effort: Effort) -> None:
        self.pair = pair
        self.totals = Totals()
        self.warm_up_samples = 0
        self.warm_up_ns = 0
        self.agreed = False
        self._effort = effort
        self._spent_ns = 0
        self._window: npt.NDArray[np.int64] | None = None
        self._typical_ns = 1

    @property
    def samples(self) -> npt.NDArray[np.int64]:
        return self.totals.joined("transfer_ns")

    def step(self) -> bool:
        """Run one batch. False when sampling has ended; time wins over the number of samples."""
        began = time.monotonic_ns()
        if self._warming_up():
            self._warm_up()
        else:
            self.totals.add(self._run(self._batch_size(BATCH_NS)))
        self._spent_ns += time.monotonic_ns() - began
        return not self._ended()

    def _warming_up(self) -> bool:
        return not self.agreed and self._spent_ns < WARM_UP_SHARE * self._effort.max_seconds * 1e9

    def _warm_up(self) -> None:
        """Windows grow 1, 2, 4, …; two in a row that agree end the warm-up."""
        previous = self._window
        wanted = 1 if previous is None else 2 * len(previous)
        self._window = self._run(min(wanted, self._batch_size(BATCH_NS))).transfer_ns
        self.warm_up_samples += len(self._window)
        self.warm_up_ns += int(self._window.sum())
        self.agreed = previous is not None and statistics.windows_agree(previous, self._window)

    def _run(self, count: int) -> Batch:
        batch = self.pair.run(count)
        self._typical_ns = max(1, statistics.median(batch.transfer_ns) // self.pair.row.inflight)
        return batch

    def _batch_size(self, share_ns: int) -> int:
        left = max(0, int(self._effort.max_seconds * 1e9) - self._spent_ns)
        fits = min(share_ns, left) // self._typical_ns
        return int(max(1, self.pair.row.inflight * 4 if self.pair.row.inflight > 1 else 1, min(fits, MAX_BATCH)))

    def _ended(self) -> bool:
        if self.totals.requests == 0:
            return False
        if self._spent_ns + self._typical_ns > self._effort.max_seconds * 1e9:
            return True
        return self.totals.requests >= self._effort.min_samples and statistics.converged(self.samples)
