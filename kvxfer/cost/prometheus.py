"""vLLM's Prometheus text: the mean transfer that its NIXL histograms tell of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvxfer.cost.observed_ranges import RANGES
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
PAIR = re.compile(r'(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"(?P<value>(?:[^"\\]|\\.)*)"')

FIGURES = {TIME: ("ms", 1e3), POST: ("post_ms", 1e3), BYTES: ("bytes", 1.0), DESCRIPTORS: ("descriptors", 1.0)}
"""What the mean of each is in an observation, and by what it is multiplied for that."""

MOST_COUNTED = 1e15
LARGEST_SUM = 1e33
"""Of so many of the largest figure."""

TAIL = 0.9

Labels = tuple[tuple[str, str], ...]


@dataclass
class Series:
    """A histogram of one engine and model, as far as its lines have been read."""

    total: float | None = None
    count: float | None = None
    below: dict[float, float] = field(default_factory=dict)  # upper edge → observations up to it


@dataclass(frozen=True)
class Histogram:
    """One metric over all its engines and models."""

    series: list[Series]

    @property
    def total(self) -> float:
        return sum(one.total or 0.0 for one in self.series)

    @property
    def count(self) -> float:
        return sum(one.count or 0.0 for one in self.series)

    def at_most(self, share: float) -> float | None:
        """The upper edge of the bucket that the quantile `share` lies in; None where the buckets do not tell.

        Of the edges that all have: only those are known of all together.
        """
        counting = [one for one in self.series if one.count]
        common = set.intersection(*(set(one.below) for one in counting)) if counting else set()
        wanted = share * self.count
        return next(
            (
                edge
                for edge in sorted(common)
                if edge != math.inf and sum(one.below[edge] for one in counting) >= wanted
            ),
            None,
        )


@dataclass(frozen=True)
class Scraped:
    """The mean transfer, how many it is the mean of, and what to know of it."""

    observation: Observation
    transfers: int
    notices: list[str]


def scrape(text: str, source: str) -> Scraped:
    """What the NIXL histograms in a Prometheus text say. `source` names it in errors.

    Raises UsageError with the number of a line that is not in this format, is there twice or ends without a newline;
    when there are no transfers in it, a histogram is not whole or contradicts itself, or a mean is none that a transfer
    has; and when they post for longer than they take.
    """
    found = _histograms(text, source)
    transfers = found[TIME]
    figures = {FIGURES[metric][0]: _mean(metric, histogram, source) for metric, histogram in found.items()}
    ms, post_ms = figures["ms"], figures["post_ms"]
    if ms is None:
        why = "has counted no transfer yet" if transfers.series else f"has no {TIME}"
        raise UsageError(f"{source} {why}; give the /metrics of a vLLM whose NixlConnector has moved something")
    if post_ms is not None and post_ms > ms:
        raise UsageError(
            f"{source}: the mean of {POST} is {post_ms:g} ms and that of {TIME} {ms:g} ms, of which it is a "
            f"part ({found[POST].count:,.0f} and {transfers.count:,.0f} counted); scrape one engine by itself, or give "
            "bytes=…,descriptors=…,ms=… by hand"
        )
    return Scraped(Observation(**figures, source=source), round(transfers.count), list(_notices(found, ms)))


def _mean(metric: str, histogram: Histogram, source: str) -> float | None:
    """As the observation has it; None before the first one was counted. Raises UsageError outside its range.

    Posting of which nothing was counted tells no more than posting that is not there.
    """
    if not histogram.count or (not histogram.total and metric == POST):
        return None
    name, factor = FIGURES[metric]
    mean = factor * histogram.total / histogram.count
    low, high = RANGES[name]
    if not low <= mean <= high:
        raise UsageError(
            f"{source}: the mean of {metric} is {name} = {mean:g}, and an observation has {low:g} to {high:g}; scrape "
            "it again, or give bytes=…,descriptors=…,ms=… by hand"
        )
    return mean


def _histograms(text: str, source: str) -> dict[str, Histogram]:
    found: dict[str, dict[Labels, Series]] = {name: {} for name in METRICS}
    lines: dict[tuple[str, str, Labels], int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip(" \t\r")
        if not stripped or stripped.startswith("#"):
            continue
        sample = SAMPLE.fullmatch(stripped)
        if sample is None:
            raise _malformed(source, number, f"{quoted(stripped)} is no sample of Prometheus' text format")
        metric, _, part = sample["name"].rpartition("_")
        if metric in found and part in ("sum", "count", "bucket"):
            labels, edge = _labels(sample["labels"] or "")
            first = lines.setdefault((sample["name"], edge, labels), number)
            if first != number:
                raise _malformed(source, number, f"{quoted(stripped, 200)} is the same series as in line {first}")
            try:
                _add(found[metric].setdefault(labels, Series()), part, float(sample["value"]), edge)
            except ValueError as error:
                raise _malformed(source, number, str(error)) from error
    if text and not text.endswith("\n"):
        raise _malformed(
            source, text.count("\n") + 1, "the text ends within this line, without a newline: it is cut off"
        )
    for metric, by_labels in found.items():
        for labels, series in by_labels.items():
            if why := _faulty(series):
                raise UsageError(f"{source}: {_told(metric, labels)} {why}; scrape it again")
    return {metric: Histogram(list(by_labels.values())) for metric, by_labels in found.items()}


def _labels(text: str) -> tuple[Labels, str]:
    """Those that tell the series, in order of their names; and the upper edge of a bucket, as it is written."""
    pairs = {pair["name"]: pair["value"] for pair in PAIR.finditer(text)}
    edge = pairs.pop("le", "")
    return tuple(sorted(pairs.items())), edge


def _add(series: Series, part: str, value: float, edge: str) -> None:
    """One sample of a histogram's. Raises ValueError for one that no histogram has."""
    most = LARGEST_SUM if part == "sum" else MOST_COUNTED
    if not 0 <= value <= most:
        raise ValueError(f"the {part} of a histogram is {value:g}, and it should be a number from 0 to {most:g}")
    if part != "sum" and not value.is_integer():
        raise ValueError(f"the {part} of a histogram is {value:g}, and it counts: it should be a whole number")
    if part == "sum":
        series.total = value
    elif part == "count":
        series.count = value
    else:
        upper = float(edge) if re.fullmatch(NUMBER, edge) else math.nan
        if math.isnan(upper):
            raise ValueError("a bucket of a histogram has no upper edge (le)")
        series.below[upper] = value


def _faulty(series: Series) -> str | None:
    """Why its lines make no histogram."""
    counts = [series.below[edge] for edge in sorted(series.below)]
    if series.total is None or series.count is None:
        return f"has no _{'sum' if series.total is None else 'count'}: the text is not whole"
    if counts != sorted(counts):
        return "has buckets that fall, and each counts all up to its edge"
    if series.below.get(math.inf, series.count) != series.count:
        return f"has {series.below[math.inf]:,.0f} in its bucket of all (le=+Inf) and {series.count:,.0f} as its _count"
    return None


def _told(metric: str, labels: Labels) -> str:
    told = quoted(", ".join(f"{name}={value}" for name, value in labels), 200)[1:-1]
    return f"{metric}{{{told}}}" if labels else metric


def _notices(found: dict[str, Histogram], mean_ms: float) -> Iterator[str]:
    transfers = found[TIME]
    whose = "one engine" if len(transfers.series) == 1 else f"{len(transfers.series)} engines or models"
    yield f"the mean of {transfers.count:,.0f} transfers since vLLM started, of {whose}"
    middle, tail = transfers.at_most(0.5), transfers.at_most(TAIL)
    if middle is not None and tail is not None:
        yield f"half of them took at most {1e3 * middle:g} ms, 90 % at most {1e3 * tail:g} ms (upper edges of buckets)"
        if mean_ms > 1e3 * tail:
            yield "their mean is above that: a few very long ones carry it, such as first requests with their set-up"
    counts = {histogram.count for histogram in found.values() if histogram.count}
    if len(counts) > 1:
        yield "the four histograms have counted different numbers of transfers; each has its own mean"


def _malformed(source: str, number: int, what: str) -> UsageError:
    return UsageError(f"{source}, line {number}: {what}; give the text that vLLM's /metrics answers, or its log")
