"""The cost model of a transfer: what a request of so many bytes in so many bands takes.

    sum      T = α + γ · descriptors + bytes / β
    overlap  T = α + max(γ · descriptors, bytes / β), where posting and wire work at the same time

A single β need not fit: then there are bands, each with the bandwidth of what a request has beyond its `from_bytes`,
and with a time that every request beyond it takes more (a protocol switch). No term is ever negative, so that T never
falls when a request grows.

α has two parts: latency, which requests in flight hide, and occupancy, which they do not. With n in flight a request
takes, in the mean, T / n or what it occupies the path for, whichever is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.errors import UsageError
from kvxfer.wording import quoted

Form = Literal["sum", "overlap"]
FORMS: tuple[Form, ...] = ("sum", "overlap")

LARGEST_FIGURE = 1e18
"""Of a result: 30 years in ns, a billion GB."""
RATES_GBYTE_S = (1e-9, 1e9)
"""A byte per second; and where a fit says that bytes take no time."""


@dataclass(frozen=True)
class Band:
    """What a request has beyond `from_bytes` takes `ns_per_byte` (0: nothing that shows), and `step_ns` once."""

    from_bytes: int
    ns_per_byte: float
    step_ns: float = 0.0

    @property
    def beta_gbyte_s(self) -> float | None:
        """Its bandwidth; None where bytes cost nothing."""
        return 1 / self.ns_per_byte if self.ns_per_byte > 0 else None


@dataclass(frozen=True)
class CostModel:
    """Times in ns. `bands` ascend, and the first begins at 0; occupancy_ns is a part of alpha_ns, or unknown."""

    form: Form
    alpha_ns: float
    gamma_ns: float
    bands: tuple[Band, ...]
    occupancy_ns: float | None = None

    @property
    def latency_ns(self) -> float | None:
        """The part of α that requests in flight hide."""
        return None if self.occupancy_ns is None else self.alpha_ns - self.occupancy_ns

    def wire_ns(self, size: float) -> float:
        """bytes / β, over all bands."""
        ends = [band.from_bytes for band in self.bands[1:]] + [size]
        total = 0.0
        for band, end in zip(self.bands, ends, strict=True):
            if size > band.from_bytes or band.from_bytes == 0:
                total += band.step_ns + band.ns_per_byte * (min(size, end) - band.from_bytes)
        return total

    def work_ns(self, descriptors: float, size: float) -> float:
        """What a request takes beyond α."""
        posting, wire = self.gamma_ns * descriptors, self.wire_ns(size)
        return posting + wire if self.form == "sum" else max(posting, wire)

    def predict_ns(self, descriptors: float, size: float, inflight: int = 1) -> float:
        """The time of one request alone; with several in flight, the time per request while they last.

        Raises ValueError for several in flight when nobody measured what they hide.
        """
        work = self.work_ns(descriptors, size)
        if inflight == 1:
            return self.alpha_ns + work
        if self.occupancy_ns is None:
            raise ValueError("what requests in flight hide was not measured")
        return max((self.alpha_ns + work) / inflight, self.occupancy_ns + work)


def finite(value: Any) -> float:
    """Raises ValueError: JSON has numbers, such as 1e999, that are too large for one, and others that no figure has."""
    number = float(value)
    if not abs(number) <= LARGEST_FIGURE:
        raise ValueError
    return number


def ns_per_byte(gbyte_s: Any) -> float:
    """Of a rate in a result; 0 for null, where bytes take no time that shows. Raises ValueError for one of no path."""
    if gbyte_s is None:
        return 0.0
    low, high = RATES_GBYTE_S
    if not low <= gbyte_s <= high:
        raise ValueError
    return 1 / float(gbyte_s)


def from_record(record: Mapping[str, Any]) -> CostModel:
    """The model in an entry of a result file's `cost_model`. Raises UsageError when it is damaged."""
    try:
        form = record["form"]
        occupancy = record["occupancy_ns"]
        bands = tuple(
            Band(
                int(finite(band["from_bytes"])),
                ns_per_byte(None if band["beta_gbyte_s"] is None else band["beta_gbyte_s"]["value"]),
                finite(band["step_ns"]),
            )
            for band in record["bands"]
        )
        model = CostModel(
            form,
            finite(record["alpha_ns"]["value"]),
            finite(record["gamma_ns"]["value"]),
            bands,
            None if occupancy is None else finite(occupancy["value"]),
        )
        figures = [model.alpha_ns, model.gamma_ns, model.occupancy_ns or 0.0]
        figures += [part for band in bands for part in (band.ns_per_byte, band.step_ns)]
        begins = [band.from_bytes for band in bands]
        if form not in FORMS or begins[:1] != [0] or begins != sorted(set(begins)) or min(figures) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"the cost model of {quoted(record.get('backend'))} in the result is damaged; measure again"
        ) from error
    return model
