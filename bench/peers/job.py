"""What all contenders of a comparison move: the same pieces, in pools of the same shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Request:
    """The descriptors of one request; arrays of equal length. Offsets count from the start of their region."""

    prefill_regions: Numbers
    prefill_offsets: Offsets
    decode_regions: Numbers
    decode_offsets: Offsets
    lengths: Offsets
    segment_starts: Numbers


@dataclass(frozen=True)
class Job:
    """Requests to cycle through, on other blocks every time. Both pools have the same regions, one after another.

    `op` says who initiates: prefill a push, decode a pull. Bytes always go from prefill to decode.
    """

    op: str
    region_bytes: list[int]
    requests: list[Request]

    @property
    def pool_bytes(self) -> int:
        return sum(self.region_bytes)

    @property
    def bytes(self) -> int:
        """Of one request."""
        return int(self.requests[0].lengths.sum())

    @property
    def descriptors(self) -> int:
        return len(self.requests[0].lengths)

    @property
    def piece_bytes(self) -> int:
        return int(self.requests[0].lengths[0])

    @property
    def initiator(self) -> str:
        return "prefill" if self.op == "push" else "decode"

    @cached_property
    def _starts(self) -> Offsets:
        return np.concatenate([[0], np.cumsum(self.region_bytes)]).astype(np.uint64)

    def request(self, number: int) -> Request:
        """The request that is moved as the number-th one."""
        return self.requests[number % len(self.requests)]

    def offsets(self, request: Request, side: str) -> Offsets:
        """Where the pieces lie in a side's pool."""
        if side == "prefill":
            return self._starts[request.prefill_regions] + request.prefill_offsets
        return self._starts[request.decode_regions] + request.decode_offsets
