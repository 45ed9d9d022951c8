"""What observations of one path tell of each one's terms: the least and the most of posting, fixed cost and wire.

T = α + γ · descriptors + bytes / β, with the same α, γ and β for all. What an observation says by itself always holds;
the others narrow it, as far as they fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvxfer.cost import priors
from kvxfer.cost.bounds import Limit, between, bounds
from kvxfer.errors import UsageError

Term = Literal["posting", "fixed", "wire"]

EXACT = 1e-6
TOLERANCES = (EXACT, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares by which observed times may be off; the first with which all of them fit together is taken, and told.

Of several it is never the exact one: they are rounded to three digits or so, and what is a small part of one may be all
of another.
"""

FASTER_THAN_LINK = 1.02

OVERLAPPING = 1.02
"""Of the whole: posting and wire that add up to more were under way at once; up to here figures are rounded."""


@dataclass(frozen=True)
class Observation:
    """One request as logged, or the mean of many; None: not known. post_ms and wire_ms are parts of ms."""

    ms: float | None = None
    bytes: float | None = None
    descriptors: float | None = None
    post_ms: float | None = None
    wire_ms: float | None = None
    source: str = "given"

    @property
    def untold(self) -> list[Term]:
        """The terms whose size nothing was told of: each can be all that the others leave."""
        sizes: dict[Term, tuple[float | None, float | None]] = {
            "posting": (self.descriptors, self.post_ms),
            "wire": (self.bytes, self.wire_ms),
        }
        return [term for term, told in sizes.items() if told == (None, None)]

    def check(self) -> None:
        """Raises UsageError where a part is more than the whole, or there is nothing to explain."""
        for name, part in (("post_ms", self.post_ms), ("wire_ms", self.wire_ms)):
            if part is not None and self.ms is not None and part > self.ms:
                raise UsageError(
                    f"{name} {part:g} is more than ms {self.ms:g}, of which it is a part; give the whole transfer as "
                    "ms, from its post to its completion"
                )
        if self.ms is None and self.post_ms is None:
            raise UsageError("an observation has ms, or at least post_ms; bytes=…,descriptors=…,ms=…,post_ms=…")

    def check_rate(self, link: priors.Prior) -> None:
        """Raises UsageError where more bytes arrived than the fastest link can carry."""
        least = self.ms if self.wire_ms is None else self.wire_ms
        if self.bytes is None or least is None:
            return
        rate = self.bytes / least / 1e6
        if rate > FASTER_THAN_LINK * link.high:
            raise UsageError(
                f"{self.bytes:,.0f} bytes in {least:g} ms are {rate:.3g} GB/s, above the line rate of {link.high:g} "
                f"GB/s ({link.source}): bytes and time are not of the same transfer, or --link is not this link's"
            )

    def least_wire_ms(self, link: priors.Prior) -> float:
        """How long the wire was busy: as told, or at least what the fastest link needs."""
        return self.wire_ms if self.wire_ms is not None else (self.bytes or 0.0) / (link.high * 1e6)

    def overlaps(self, link: priors.Prior) -> bool:
        """Whether posting and wire cannot have been one after the other."""
        if self.ms is None or self.post_ms is None:
            return False
        return self.post_ms + self.least_wire_ms(link) > OVERLAPPING * self.ms


@dataclass(frozen=True)
class Range:
    """The least and the most of a term, in ms."""

    low: float
    high: float

    def within(self, other: Range) -> Range:
        """What both allow; where they only just miss each other, by rounding, the edge of the other."""
        low = min(max(self.low, other.low), other.high)
        return Range(low, max(low, min(self.high, other.high)))


Terms = dict[Term, Range]


@dataclass(frozen=True)
class Assumed:
    """The priors that observations are explained with; None: any α, any γ."""

    link: priors.Prior
    fixed: priors.Prior | None = None
    posting: priors.Prior | None = None


@dataclass(frozen=True)
class Fit:
    """The terms of each observation, what was assumed, and the share by which times had to be off to fit together."""

    terms: list[Terms]
    assumed: Assumed
    tolerance: float


PRIORS = ((priors.FIXED, priors.POSTING), (None, priors.POSTING), (None, priors.FAST_POSTING))
"""Of fixed cost and posting; the first that fit are taken."""


def fit(observations: Sequence[Observation], link: priors.Prior) -> Fit | None:
    """The terms of observations of one path; None where no plausible α, γ and β explain them.

    The fixed cost may be more than usual (a first request has the set-up in it), posting not slower than ever reported.
    """
    several = len(observations) > 1
    for tolerance in TOLERANCES[several:]:
        if several and not _explains(observations, link, priors.PLAUSIBLE_POSTING, tolerance):
            continue
        for fixed, posting in PRIORS:
            assumed = Assumed(link, fixed, _unless_told(posting, observations))
            terms = (
                _together(observations, assumed, tolerance) if several else _alone(observations[0], assumed, tolerance)
            )
            if terms is not None:
                return Fit(terms, assumed, tolerance)
    return None


def slow_posting_explains(observations: Sequence[Observation], link: priors.Prior) -> bool:
    """Whether they are of one path if its posting is as slow as the slowest that was reported."""
    return any(_explains(observations, link, priors.FAST_POSTING, tolerance) for tolerance in TOLERANCES)


def _explains(observations: Sequence[Observation], link: priors.Prior, posting: priors.Prior, tolerance: float) -> bool:
    """Whether some α, γ and β do, with nothing of the terms that nobody told the size of: those explain any time."""
    assumed = Assumed(link, None, _unless_told(posting, observations))
    return _Unknowns(observations, assumed, tolerance).fit_without_untold()


def _unless_told(posting: priors.Prior, observations: Sequence[Observation]) -> priors.Prior | None:
    """None where an observation tells what a descriptor takes."""
    told = any(one.post_ms is not None and one.descriptors is not None for one in observations)
    return None if told else posting


def _alone(one: Observation, assumed: Assumed, tolerance: float) -> list[Terms] | None:
    return _Unknowns([one], assumed, tolerance).terms()


def _together(observations: Sequence[Observation], assumed: Assumed, tolerance: float) -> list[Terms] | None:
    """The terms of each by itself, as exactly as it fits, narrowed by those of all; None where either has none."""
    together = _Unknowns(observations, assumed, tolerance).terms()
    if together is None:
        return None
    found = []
    for one, terms in zip(observations, together, strict=True):
        exactly = (_alone(one, assumed, each) for each in TOLERANCES if each <= tolerance)
        alone = next((each for each in exactly if each is not None), None)
        if alone is None:
            return None
        found.append(_narrowed(one, alone[0], terms, tolerance))
    return found


def _narrowed(one: Observation, alone: Terms, together: Terms, tolerance: float) -> Terms:
    """What both say; by what a time is off, any of its terms may be."""
    off = tolerance * (one.ms or 0.0)
    return {
        name: term.within(Range(together[name].low - off, together[name].high + off)) for name, term in alone.items()
    }


class _Unknowns:
    """α, γ and 1/β, scaled so that all are times in ms of a typical request; and of each observation a posting and a
    wire of its own, where it was told how long they took, or nothing of their size.

    The limits are what the observations and priors say of them.
    """

    def __init__(self, observations: Sequence[Observation], assumed: Assumed, tolerance: float) -> None:
        self._observations = observations
        self._link = assumed.link
        self._count = 3 + 2 * len(observations)
        self._descriptors = _typical([one.descriptors for one in observations])
        self._bytes = _typical([one.bytes for one in observations])
        self._scale = max(one.ms or max(one.post_ms or 0.0, one.wire_ms or 0.0) for one in observations)
        self._limits: list[Limit] = []
        if assumed.fixed is not None:
            self._within(self._only(0), assumed.fixed.low, assumed.fixed.high)
        if assumed.posting is not None:
            per_ms = self._descriptors / 1e3
            self._within(self._only(1), assumed.posting.low * per_ms, assumed.posting.high * per_ms)
        self._limits.append(Limit(self._only(2, -1.0), -self._bytes / (self._link.high * 1e6) / self._scale))
        for number, one in enumerate(observations):
            self._observe(number, one, tolerance)

    def terms(self) -> list[Terms] | None:
        """The terms of each observation; None when no α, γ and β fulfil everything."""
        wanted = [(number, name, row) for number in range(len(self._observations)) for name, row in self._terms(number)]
        edges = bounds([row for _, _, row in wanted], self._limits)
        if edges is None:
            return None
        found: list[Terms] = [{} for _ in self._observations]
        for (number, name, _), (low, high) in zip(wanted, edges, strict=True):
            found[number][name] = Range(max(0.0, low) * self._scale, high * self._scale)
        for one, terms in zip(self._observations, found, strict=True):
            terms.update(_as_told(one, self._link))
        return found

    def fit_without_untold(self) -> bool:
        """Whether some α, γ and β explain all of it with nothing of the terms that nobody told the size of."""
        nothing = [
            Limit(self._own(number, term), 0.0)
            for number, one in enumerate(self._observations)
            if one.ms is not None
            for term in one.untold
        ]
        return bounds([], [*self._limits, *nothing]) is not None

    def _terms(self, number: int) -> list[tuple[Term, list[float]]]:
        one = self._observations[number]
        posting, wire = self._own(number, "posting"), self._own(number, "wire")
        if one.descriptors is not None and one.post_ms is None:
            posting = self._posting(one.descriptors)
        if one.bytes is not None and one.wire_ms is None and one.ms is not None and not one.overlaps(self._link):
            wire = self._wire(one.bytes)
        return [("posting", posting), ("fixed", self._only(0)), ("wire", wire)]

    def _observe(self, number: int, one: Observation, tolerance: float) -> None:
        whole = [sum(each) for each in zip(*(row for _, row in self._terms(number)), strict=True)]
        if one.ms is None:  # nothing else bounds what was not told
            self._within(whole, 0.0, 1e6 * self._scale)
        else:
            self._near(whole, one.ms, tolerance)
        if one.post_ms is not None:
            self._near(self._own(number, "posting"), one.post_ms, EXACT)
            if one.descriptors is not None:
                self._near(self._posting(one.descriptors), one.post_ms, tolerance)
        if one.overlaps(self._link):
            self._observe_overlap(one, self._own(number, "wire"), tolerance)
        elif one.wire_ms is not None:
            self._near(self._own(number, "wire"), one.wire_ms, EXACT)
            if one.bytes is not None:
                self._near(self._wire(one.bytes), one.wire_ms, tolerance)

    def _observe_overlap(self, one: Observation, adds: list[float], tolerance: float) -> None:
        """The wire's whole time tells β; what it adds is at least what outlasts posting."""
        assert one.ms is not None
        assert one.post_ms is not None
        least = one.least_wire_ms(self._link)
        self._within(adds, max(0.0, least - one.post_ms) * (1 - tolerance), one.ms * (1 + tolerance))
        if one.bytes is not None:
            most = one.ms if one.wire_ms is None else one.wire_ms
            self._within(self._wire(one.bytes), least * (1 - tolerance), most * (1 + tolerance))

    def _near(self, coefficients: list[float], told_ms: float, tolerance: float) -> None:
        self._within(coefficients, told_ms * (1 - tolerance), told_ms * (1 + tolerance))

    def _within(self, coefficients: list[float], low_ms: float, high_ms: float) -> None:
        self._limits += between(coefficients, low_ms / self._scale, high_ms / self._scale)

    def _posting(self, descriptors: float) -> list[float]:
        return self._only(1, descriptors / self._descriptors)

    def _wire(self, size: float) -> list[float]:
        return self._only(2, size / self._bytes)

    def _own(self, number: int, term: Term) -> list[float]:
        return self._only(3 + 2 * number + (term == "wire"))

    def _only(self, index: int, coefficient: float = 1.0) -> list[float]:
        row = [0.0] * self._count
        row[index] = coefficient
        return row


def _as_told(one: Observation, link: priors.Prior) -> Terms:
    """What was logged of a term is that term."""
    told: dict[Term, float | None] = {"posting": one.post_ms, "wire": None if one.overlaps(link) else one.wire_ms}
    return {name: Range(ms, ms) for name, ms in told.items() if ms is not None}


def _typical(values: Sequence[float | None]) -> float:
    """A size to scale with."""
    known = [value for value in values if value]
    return max(known) if known else 1.0
