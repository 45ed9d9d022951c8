"""Small pieces of wording that error messages share."""

from __future__ import annotations

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
