"""vLLM's own log line of its transfers (KV Transfer metrics): the mean of those of one interval of its log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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


def _wrapped(name: str) -> str:
    """A pattern of the name, wherever in it a terminal began a new line."""
    return r"\s*".join(re.escape(character) for character in name if character != " ") + r"\s*="


TELLS = re.compile(_wrapped(TIME))
NO_TRANSFER = re.compile(_wrapped(COUNT) + r"0(?![0-9.])")
"""Where all of an interval failed, or nothing moved."""

CUT = re.compile(r"=[0-9.e+-]*")
"""What a line ends in where its last figure may go on in the next one."""

GOES_ON = re.compile(r"""(?=.)[0-9]*\.?[0-9]*(?:e[+-]?[0-9]+)?\s*(?:$|[,"')}\]\\\x1b])""")
"""What such a next line begins with, other than the time of another message."""

FIGURE = r"""([^,\s"')}\]\\\x1b]*)"""
"""Up to the next one, or the quote or the colour of whoever logs it."""

MOST_WRAPPED = 8
LARGEST = 1e12
"""Of any of its figures."""


def is_log(text: str) -> bool:
    """Whether there is such a line in it, with or without what a logger puts before it."""
    return MARK in text or f"{TIME}=" in text


def read_log(text: str, source: str, is_whole: bool = True) -> Scraped:
    """The mean transfer of the last line that tells of transfers; lines may be wrapped.

    `source` names the text in errors; a line without its newline is one only if the text `is_whole`, and else is still
    being written. Raises UsageError when no line tells of transfers, or a figure of it is none.
    """
    told = {
        number: line
        for number, line in _unwrapped(text)
        if TELLS.search(line.text) and not NO_TRANSFER.search(line.text)
    }
    cut_off = [number for number, line in told.items() if not is_whole and not line.ended]
    for number in cut_off:
        del told[number]
    beware = [f"line {number} ends without a newline: it may be cut off, and is left out" for number in cut_off]
    if not told:
        why = f" ({beware[0]})" if beware else ""
        raise UsageError(
            f"{source} tells of no successful transfer with its {TIME}{why}; give a line such as {EXAMPLE}"
        )
    number, line = list(told.items())[-1]
    last = _read(line.text, source if len(text.splitlines()) == 1 else f"{source}, line {number}")
    if len(told) > 1:
        beware.append(f"line {number} is the last of {len(told)} such lines; give another one itself as --observed")
    return Scraped(last.observation, last.transfers, [*beware, *last.notices])


@dataclass
class _Line:
    """A line as it was logged, and whether its end has been seen."""

    text: str
    ended: bool = False
    lines: int = 1

    def add(self, line: str) -> bool:
        """Take a next line as the rest of this one, if it can be."""
        cut = CUT.search(self.text, self.text.rfind("="))
        in_figure = cut is not None and cut.end() == len(self.text)
        if self.lines >= MOST_WRAPPED or (in_figure and not GOES_ON.match(line)):
            return False
        self.text += line if in_figure else f" {line}"
        self.lines += 1
        return True


def _unwrapped(text: str) -> Iterator[tuple[int, _Line]]:
    """Each line that may tell of transfers, with what a terminal may have wrapped of it, and its number."""
    begun, first = None, 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        begins = MARK in line or (f"{TIME}=" in line and (begun is None or TELLS.search(begun.text) is not None))
        if begun is not None and (begins or not begun.add(line)):
            begun.ended = True
            yield first, begun
            begun = None
        if begins:
            begun, first = _Line(line), number
    if begun is not None:
        begun.ended = text.endswith("\n")
        yield first, begun


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
    found = re.search(_wrapped(name) + FIGURE, text)
    if found is None:
        return None
    number = re.fullmatch(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?", found[1])
    value = float(number[0]) if number else -1.0
    if not 0 <= value <= LARGEST:
        raise UsageError(f"{source}: {name} is {quoted(found[1])}; it should be a number from 0 to {LARGEST:g}")
    return value
