"""Reading the values of options.

Each function returns the value, or raises UsageError that names the option, the text and what is allowed. `name` is the
option as the user types it, such as `--tokens`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from kvxfer.errors import UsageError
from kvxfer.wording import did_you_mean, quoted

LARGEST_INT = 1 << 40


def parse_int(text: str, name: str, low: int = 1, high: int = LARGEST_INT) -> int:
    """A whole number in decimal digits, from low to high."""
    word = text.strip()
    # ASCII digits only and few of them: int() also takes 1_000 and other scripts' digits, and fails on thousands.
    if re.fullmatch(r"[+-]?[0-9]{1,30}", word) and low <= int(word) <= high:
        return int(word)
    raise UsageError(f"{name} {quoted(text)} is not allowed: give a whole number from {low:,} to {high:,}")


def parse_int_list(text: str, name: str, low: int = 1, high: int = LARGEST_INT) -> list[int]:
    """Whole numbers with commas between, in the order given, repetitions dropped."""
    return list(dict.fromkeys(parse_int(word, name, low, high) for word in split_list(text, name)))


def parse_float(text: str, name: str, low: float, high: float, *, above_low: bool = False) -> float:
    """A number from low (or, with above_low, above it) to high."""
    value = parse_number(text)
    if value is not None and low <= value <= high and not (above_low and value == low):
        return value
    start = f"above {low:g}" if above_low else f"from {low:g}"
    raise UsageError(f"{name} {quoted(text)} is not allowed: give a number {start} to {high:g}")


def parse_count(text: str, name: str, high: float = 1e18) -> float:
    """A count of at least 1 that may be written like 70e9 or 70.55e9."""
    value = parse_number(text)
    if value is not None and 1 <= value <= high:
        return value
    raise UsageError(f"{name} {quoted(text)} is not allowed: give a count from 1 to {high:g}, such as 70e9")


def parse_choice(text: str, name: str, choices: Iterable[str]) -> str:
    """One of the choices, whatever the case; the choice is returned as it is spelled there."""
    known = {choice.lower(): choice for choice in choices}
    word = text.strip().lower()
    if word in known:
        return known[word]
    near = did_you_mean(word, known.values())
    raise UsageError(f"{name} {quoted(text)} is not known{near}: choose from {', '.join(known.values())}")


def parse_choice_list(text: str, name: str, choices: Sequence[str]) -> list[str]:
    """Choices with commas between, in the order given, repetitions dropped."""
    return list(dict.fromkeys(parse_choice(word, name, choices) for word in split_list(text, name)))


def split_list(text: str, name: str) -> list[str]:
    """The words between commas, stripped; an empty one is an error."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{name} {quoted(text)} has an empty entry: give values with commas between, such as A,B")
    return words


def parse_number(text: str) -> float | None:
    """A finite decimal number in ASCII digits, or None."""
    if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", text, re.ASCII):
        return None
    value = float(text)
    return value if math.isfinite(value) else None
