"""vLLM's own log line of its transfers (KV Transfer metrics): the mean of those of one interval of its log."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvxfer.cost.observed_ranges import RANGES
from kvxfer.cost.prometheus import Scraped
from kvxfer.cost.terms import Observation
from kvxfer.errors import UsageError
from kvxfer.wording import quoted

MARK = "KV Transfer metrics:"
EXAMPLE = f"'{MARK} Num successful transfers=4, Avg xfer time (ms)=1.381, …'"

COUNT, TIME, TAIL, POST, SIZE, DESCRIPTORS = (
    "Num successful transfers",
    "Avg xfer time (ms)",
    "P90 xfer time (ms)",
    "Avg post time (ms)",
    "Avg MB per transfer",
    "Avg number of descriptors",
)
MIB = 1 << 20
"""What vLLM calls a MB here."""

NO_TRANSFER = rf"{COUNT}=0(?![0-9.])"
"""Where all of an interval failed, or nothing moved."""

MOST_WRAPPED = 8
LARGEST = 1e12
"""Of any of its figures."""


def is_log(text: str) -> bool:
    """Whether there is such a line in it, with or without what a logger puts before it."""
    return MARK in text or f"{TIME}=" in text


def read_log(text: str, source: str) -> Scraped:
    """The mean transfer of the last line that tells of transfers; lines may be wrapped.

    `source` names the text in errors. Raises UsageError when no line does, or a figure of it is none.
    """
    told = {
        number: line for number, line in _unwrapped(text) if f"{TIME}=" in line and not re.search(NO_TRANSFER, line)
    }
    if not told:
        raise UsageError(f"{source} tells of no successful transfer with its {TIME}; give a line such as {EXAMPLE}")
    number, line = list(told.items())[-1]
    last = _read(line, source if len(text.splitlines()) == 1 else f"{source}, line {number}")
    if len(told) == 1:
        return last
    which = f"line {number} is the last of {len(told)} such lines; give another one itself as --observed"
    return Scraped(last.observation, last.transfers, [which, *last.notices])


def _unwrapped(text: str) -> Iterator[tuple[int, str]]:
    """Each line that may tell of transfers, with what a terminal may have wrapped of it, and its number."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if is_log(line)]
    for number, following in zip(begins, [*begins[1:], len(lines)], strict=True):
        yield number + 1, " ".join(" ".join(lines[number : min(following, number + MOST_WRAPPED)]).split())


def _read(line: str, source: str) -> Scraped:
    count, mean, tail, post, size, descriptors = (
        _figure(line, name, source) for name in (COUNT, TIME, TAIL, POST, SIZE, DESCRIPTORS)
    )
    if not mean:
        raise UsageError(f"{source} has no {TIME} above 0; give a line such as {EXAMPLE}")
    if post is not None and post > mean:
        raise UsageError(
            f"{source}: {POST} is {post:g} and {TIME} {mean:g}, of which it is a part; take another line, or give "
            "bytes=…,descriptors=…,ms=… by hand"
        )
    # A figure that is rounded to 0 tells no more than one that is not there.
    observation = Observation(
        mean, size * MIB if size else None, descriptors or None, post or None, source="vLLM's log"
    )
    _require_sensible(observation, source)
    of = "" if count is None else f" of {count:,.0f} transfers"
    notices = [f"the mean{of} in one interval of vLLM's log, whose MB are 2^20 bytes"]
    if tail:
        notices.append(f"90 % of them took at most {tail:g} ms")
        if mean > tail:
            notices.append(
                "their mean is above that: a few very long ones carry it, such as first requests with set-up"
            )
    return Scraped(observation, round(count or 1), notices)


def _require_sensible(observation: Observation, source: str) -> None:
    """Raises UsageError of a figure that no transfer has."""
    for name, (low, high) in RANGES.items():
        value = getattr(observation, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{source}: {name} would be {value:g}, and it is from {low:g} to {high:g}")


def _figure(text: str, name: str, source: str) -> float | None:
    """None where the line does not have it: connectors differ in what they log."""
    found = re.search(rf"{re.escape(name)}=([^,\s]*)", text)
    if found is None:
        return None
    number = re.fullmatch(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?", found[1])
    value = float(number[0]) if number else -1.0
    if not 0 <= value <= LARGEST:
        raise UsageError(f"{source}: {name} is {quoted(found[1])}; it should be a number from 0 to {LARGEST:g}")
    return value
