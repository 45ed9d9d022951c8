"""TransferPlan: the descriptors of one request as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.cache.tables import Table


@dataclass(frozen=True)
class TransferPlan:
    """Descriptors of one request, region by region, as one side sees them; arrays of equal length.

    `regions` are positions in the pool's list of regions, the same on both sides. `segment_starts` holds the first
    descriptor of each layer, so that layers can be sent apart.
    """

    regions: npt.NDArray[np.uint32]
    local_offsets: npt.NDArray[np.uint64]
    remote_offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    segment_starts: npt.NDArray[np.uint32]

    @property
    def descriptors(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


def transfer_plan(local: Table, remote: Table, block_bytes: Sequence[int], regions_per_layer: int) -> TransferPlan:
    """The plan of a request with these block tables; blocks adjacent in memory on both sides become one descriptor.

    `block_bytes` holds the bytes of a block in each region.
    """
    first, count = _runs(local, remote)
    runs, regions = len(first), len(block_bytes)
    size = np.repeat(np.asarray(block_bytes, np.uint64), runs)
    return TransferPlan(
        regions=np.repeat(np.arange(regions, dtype=np.uint32), runs),
        local_offsets=np.tile(local[first].astype(np.uint64), regions) * size,
        remote_offsets=np.tile(remote[first].astype(np.uint64), regions) * size,
        lengths=np.tile(count.astype(np.uint64), regions) * size,
        segment_starts=np.arange(0, regions * runs, regions_per_layer * runs, dtype=np.uint32),
    )


def _runs(local: Table, remote: Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First position and length of each stretch of the tables that is contiguous in both."""
    step = np.ones(1, np.int64)
    breaks = (np.diff(local.astype(np.int64)) != step) | (np.diff(remote.astype(np.int64)) != step)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return first, np.diff(np.concatenate([first, [len(local)]]))
