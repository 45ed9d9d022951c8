"""Small pieces of wording that error messages share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_QUOTE = 60
LONGEST_PATH = 300


def quoted(value: object, longest: int = LONGEST_QUOTE) -> str:
    """The value as one short printable line: control characters escaped, cut after `longest` characters."""
    # Cut before repr as well: a number of a million digits or a huge list must not be spelled out first.
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    if isinstance(value, (str, list)):
        value = value[: longest + 1]
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def quoted_path(path: object) -> str:
    """The path between quotes, control characters escaped, long enough to be recognised."""
    return quoted(str(path), LONGEST_PATH)


def plain(text: str) -> str:
    """The text on one line and without control characters: some of it comes from another host."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or nothing when no name is near; the case is ignored."""
    by_lower = {name.lower(): name for name in names}
    near = get_close_matches(text.lower()[:200], by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""


def digits(value: float, count: int) -> str:
    """So many significant digits, and every digit before the point."""
    return f"{value:,.{count}g}" if abs(value) < 10**count - 0.5 else f"{value:,.0f}"


def three_digits(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    return digits(value, 3)


def told_beside(value: float, *limits: float) -> str:
    """Three significant digits, or up to six where fewer do not tell it from each limit."""

    def alike(count: int) -> bool:
        return digits(value, count) in [digits(limit, count) for limit in limits]

    return digits(value, next((count for count in range(3, 7) if not alike(count)), 3))


def told_requests(sizes: tuple[float, float], pieces: tuple[float, float] | None = None) -> str:
    """`5.24 … 83.9 MB in 80 … 1,280 pieces`, of the least and the most of both; without pieces: of any number."""
    told = f"{_between(*map(_megabytes, sizes))} MB"
    if pieces is None:
        return told
    return f"{told} in {_between(*(f'{count:,.0f}' for count in pieces))} piece{'s' * (pieces[1] > 1)}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} … {high}"


def _megabytes(size: float) -> str:
    """Three significant digits, and every digit before the point."""
    megabytes = size / 1e6
    decimals = 2 - math.floor(math.log10(megabytes)) if megabytes > 0 else 0
    return f"{megabytes:,.{max(0, decimals)}f}"
