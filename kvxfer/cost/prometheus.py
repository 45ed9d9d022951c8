"""vLLM's Prometheus text: the mean transfer that its NIXL histograms tell of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvxfer.cost.terms import Observation
from kvxfer.errors import UsageError
from kvxfer.wording import quoted

TIME, POST, BYTES, DESCRIPTORS = (
    "vllm:nixl_xfer_time_seconds",
    "vllm:nixl_post_time_seconds",
    "vllm:nixl_bytes_transferred",
    "vllm:nixl_num_descriptors",
)
METRICS = (TIME, POST, BYTES, DESCRIPTORS)

LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"(?:[^"\\]|\\.)*"'
NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf|[nN]a[nN])"
LABELS = rf"\{{[ \t]*(?P<labels>(?:{LABEL}[ \t]*(?:,[ \t]*|(?=\}})))*)\}}[ \t]*"
SAMPLE = re.compile(
    rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]+|(?=\{{))(?:{LABELS})?"
    rf"(?P<value>{NUMBER})(?:[ \t]+[+-]?[0-9.]+)?(?:[ \t]+#.*)?"
)
EDGE = re.compile(rf'(?:^|,)[ \t]*le[ \t]*=[ \t]*"(?P<edge>{NUMBER})"')

TAIL = 0.9


@dataclass
class Histogram:
    """One metric over all its engines and models."""

    total: float = 0.0
    count: float = 0.0
    series: int = 0
    below: dict[float, float] = field(default_factory=dict)  # upper edge → observations up to it

    @property
    def mean(self) -> float | None:
        """None before the first observation."""
        return self.total / self.count if self.count else None

    def at_most(self, share: float) -> float | None:
        """The upper edge of the bucket that the quantile `share` lies in; None where the buckets do not tell."""
        edges = sorted(self.below)
        wanted = share * self.count
        return next((edge for edge in edges if self.below[edge] >= wanted and edge != math.inf), None)


@dataclass(frozen=True)
class Scraped:
    """The mean transfer, how many it is the mean of, and what to know of it."""

    observation: Observation
    transfers: int
    notices: list[str]


def scrape(text: str, source: str) -> Scraped:
    """What the NIXL histograms in a Prometheus text say. `source` names it in errors.

    Raises UsageError with the number of a line that is not in this format, when there are no transfers in it, and when
    they post for longer than they take.
    """
    found = _histograms(text, source)
    transfers = found[TIME]
    mean = transfers.mean
    if mean is None:
        why = "has counted no transfer yet" if transfers.series else f"has no {TIME}"
        raise UsageError(f"{source} {why}; give the /metrics of a vLLM whose NixlConnector has moved something")
    post, size, descriptors = (found[name].mean for name in (POST, BYTES, DESCRIPTORS))
    if post is not None and post > mean:
        raise UsageError(
            f"{source}: the mean of {POST} is {1e3 * post:g} ms and that of {TIME} {1e3 * mean:g} ms, of which it is a "
            f"part ({found[POST].count:,.0f} and {transfers.count:,.0f} counted); scrape one engine by itself, or give "
            "bytes=…,descriptors=…,ms=… by hand"
        )
    observation = Observation(
        ms=1e3 * mean,
        bytes=size,
        descriptors=descriptors,
        post_ms=None if post is None else 1e3 * post,
        source=source,
    )
    return Scraped(observation, round(transfers.count), list(_notices(found, mean)))


def _histograms(text: str, source: str) -> dict[str, Histogram]:
    found = {name: Histogram() for name in METRICS}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip(" \t")
        if not stripped or stripped.startswith("#"):
            continue
        sample = SAMPLE.fullmatch(stripped)
        if sample is None:
            raise _malformed(source, number, f"{quoted(stripped)} is no sample of Prometheus' text format")
        metric, _, part = sample["name"].rpartition("_")
        if metric in found and part in ("sum", "count", "bucket"):
            try:
                _add(found[metric], part, float(sample["value"]), sample["labels"] or "")
            except ValueError as error:
                raise _malformed(source, number, str(error)) from error
    for name, histogram in found.items():
        counts = [histogram.below[edge] for edge in sorted(histogram.below)]
        if counts != sorted(counts):
            raise UsageError(f"{source}: the buckets of {name} fall, and they should add up; scrape it again")
    return found


def _add(histogram: Histogram, part: str, value: float, labels: str) -> None:
    """One sample of a histogram's. Raises ValueError for one that no histogram has."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"the {part} of a histogram is {value:g}, and it should be a number from 0")
    if part == "sum":
        histogram.total += value
    elif part == "count":
        histogram.count += value
        histogram.series += 1
    else:
        edge = EDGE.search(labels)
        if edge is None:
            raise ValueError("a bucket of a histogram has no upper edge (le)")
        upper = float(edge["edge"])
        histogram.below[upper] = histogram.below.get(upper, 0.0) + value


def _notices(found: dict[str, Histogram], mean: float) -> Iterator[str]:
    transfers = found[TIME]
    whose = "one engine" if transfers.series == 1 else f"{transfers.series} engines or models"
    yield f"the mean of {transfers.count:,.0f} transfers since vLLM started, of {whose}"
    middle, tail = transfers.at_most(0.5), transfers.at_most(TAIL)
    if middle is not None and tail is not None:
        yield f"half of them took at most {1e3 * middle:g} ms, 90 % at most {1e3 * tail:g} ms (upper edges of buckets)"
        if mean > tail:
            yield "their mean is above that: a few very long ones carry it, such as first requests with their set-up"
    counts = {histogram.count for histogram in found.values() if histogram.count}
    if len(counts) > 1:
        yield "the four histograms have counted different numbers of transfers; each has its own mean"


def _malformed(source: str, number: int, what: str) -> UsageError:
    return UsageError(f"{source}, line {number}: {what}; give the text that vLLM's /metrics answers, or its log")
