"""Line rates of links, by number or by name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvxfer.errors import UsageError
from kvxfer.wording import did_you_mean, quoted

SMALLEST_GBIT = 1e-6
LARGEST_GBIT = 100_000.0
"""Larger than any link or group of links: a rate beyond it was given in another unit."""

PLACES = (
    Path(__file__).with_name("catalogue") / "links.json",  # installed
    Path(__file__).parents[2] / "topology" / "links.json",  # source checkout
)


def parse_links(text: str, name: str = "--link") -> list[float]:
    """Line rates in Gbit/s of a list such as `100,200,ndr`: in order, without repetitions.

    Raises UsageError, naming the option `name`, for an empty entry, an unknown name, or a rate not positive and finite.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{name} {quoted(text)} has an empty entry; give Gbit/s or link names, such as 100,200,ndr")
    return list(dict.fromkeys(_line_gbit(word, name) for word in words))


@cache
def link_rates() -> dict[str, float]:
    """The catalogue: nominal line rate in Gbit/s by lower-case link name."""
    path = next((place for place in PLACES if place.exists()), PLACES[0])
    links = json.loads(path.read_text(encoding="utf-8"))["links"]
    return {link: float(entry["line_gbit"]) for link, entry in links.items()}


def _line_gbit(word: str, name: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        return _named(word, name)
    if not SMALLEST_GBIT <= rate <= LARGEST_GBIT:  # false for NaN too
        raise UsageError(f"{name} {quoted(word)} is not a line rate: give Gbit/s above 0 and up to {LARGEST_GBIT:,.0f}")
    return rate


def _named(word: str, name: str) -> float:
    rates = link_rates()
    if word.lower() not in rates:
        raise UsageError(
            f"{name} {quoted(word)} is neither a rate in Gbit/s nor a known link{did_you_mean(word, rates)}; "
            f"known are {', '.join(rates)}"
        )
    return rates[word.lower()]
