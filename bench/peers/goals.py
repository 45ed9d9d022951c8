"""What is to be reached, as ratios: a goal is a bound and the ratio that each round (or each fresh start) gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rounds import Measured


@dataclass(frozen=True)
class Goal:
    """`bound` is the least (`at_least`) or the most that the median of the ratios may be."""

    what: str
    bound: float
    at_least: bool
    ratios: list[float]
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> float:
        return float(np.median(self.ratios))

    @property
    def met(self) -> bool:
        return self.reached >= self.bound if self.at_least else self.reached <= self.bound

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "bound": self.bound,
            "at_least": self.at_least,
            "unit": self.unit,
            "reached": self.reached,
            "range": [min(self.ratios), max(self.ratios)],
            "ratios": self.ratios,
            "met": self.met,
            "note": self.note,
        }


@dataclass(frozen=True)
class Unanswered:
    """A goal that could not be looked at, and why."""

    what: str
    why: str


def fastest(rows: Sequence[Measured]) -> Measured | None:
    """By the median."""
    return min(rows, key=lambda row: row.median_ns, default=None)


def speed_ratios(ours: Measured, theirs: Measured) -> list[float]:
    """How many times as fast ours was, round by round."""
    return [them / us for us, them in zip(ours.ns, theirs.ns, strict=True)]


def faster(what: str, bound: float, ours: Measured | None, theirs: Measured | None) -> Goal | Unanswered:
    """That ours is at least `bound` times as fast."""
    if ours is None or theirs is None:
        return Unanswered(what, "nothing of ours" if ours is None else "nothing to compare with was available")
    return Goal(what, bound, True, speed_ratios(ours, theirs), note=f"{ours.offer.name} ÷ {theirs.offer.name}")
