"""What a cost model is fitted on: measured requests, each by several fresh starts of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvxfer.cost.model import CostModel
from kvxfer.result.cold import COLD_PHASES, summary

Role = Literal["fit", "held_out", "inflight"]
"""`held_out`: took no part in the fit, and tells how good it is; `inflight`: several at once, splits α."""


@dataclass(frozen=True)
class Point:
    """One request. process_ns is its time in each fresh start: the median, or with several in flight wall / requests.

    `starts` are what each of them took before: the ns of the phases of cold, the first transfer among them.

    Samples of one process are alike in what differs between processes (where its memory lies, which core it is on), so
    a process counts as one observation, however many samples it took.
    """

    descriptors: int
    bytes: int
    process_ns: tuple[float, ...]
    role: Role = "fit"
    inflight: int = 1
    tokens: int = 0
    block_size: int = 0
    fragmentation: float = 1.0
    starts: tuple[Mapping[str, int], ...] = ()

    @property
    def median_ns(self) -> float:
        """Over the processes."""
        return float(np.median(self.process_ns))

    def error(self, model: CostModel) -> float:
        """How far the model is off, as a share of what was measured; above 0 when it says too much."""
        return model.predict_ns(self.descriptors, self.bytes, self.inflight) / self.median_ns - 1

    def as_record(self, model: CostModel) -> dict[str, Any]:
        """A result file's `cost_model[].points[]`."""
        several = self.inflight > 1 and model.occupancy_ns is None
        return {
            "role": self.role,
            "tokens": self.tokens,
            "block_size": self.block_size,
            "fragmentation": self.fragmentation,
            "inflight": self.inflight,
            "descriptors": self.descriptors,
            "bytes": self.bytes,
            "process_ns": [round(each) for each in self.process_ns],
            "setup": {phase: summary([start[phase] for start in self.starts]) for phase in COLD_PHASES}
            if self.starts
            else None,
            "p50_ns": round(self.median_ns),
            "predicted_ns": None if several else round(model.predict_ns(self.descriptors, self.bytes, self.inflight)),
        }


def with_role(points: Sequence[Point], role: Role) -> list[Point]:
    """Those of one role, in order."""
    return [point for point in points if point.role == role]
