"""What a log line of a user's own transfers says: what binds, what would help, and by how much at most.

A request takes T = α + γ · descriptors + bytes / β, and one line cannot fix three unknowns. So each term has a least
and a most that the observations and named priors allow, and "undetermined; measure this" is an answer. Several
observations are taken to be of one path, with the same α, γ and β.

Where posting and wire overlap, wire is what it adds to posting: a faster link can win no more than what posting leaves,
and fewer descriptors no more than what the wire leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvxfer.cost import priors
from kvxfer.cost.bounds import Limit, between, bounds
from kvxfer.errors import UsageError

Term = Literal["posting", "fixed", "wire"]
TERMS: tuple[Term, ...] = ("posting", "fixed", "wire")

TOLERANCES = (1e-6, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares by which observed times may be off; the first with which all of them fit together is taken, and told."""

SUSPICIOUS = 0.1
"""Of the slowest link's rate: bytes that move slower than that are carried by something else."""

FASTER_THAN_LINK = 1.02

OVERLAPPING = 1.02
"""Of the whole: posting and wire that add up to more were under way at once; up to here figures are rounded."""

MOST_OBSERVATIONS = 8
WIDE = 0.2
"""Of T: a term that is known less well than this is worth a measurement."""


@dataclass(frozen=True)
class Observation:
    """One request as logged, or the mean of many; None: not known. post_ms and wire_ms are parts of ms."""

    ms: float | None = None
    bytes: float | None = None
    descriptors: float | None = None
    post_ms: float | None = None
    wire_ms: float | None = None
    source: str = "given"

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


@dataclass(frozen=True)
class Explained:
    """One observation: its terms as far as they are known, and what follows. Nothing binds where `ms` is unknown."""

    observation: Observation
    terms: dict[Term, Range]
    binds: Term | Literal["wrong transport"] | None
    helps: list[tuple[str, float]]  # what, and the ms that it wins at most
    measure: list[str]

    def share(self, ms: float) -> float | None:
        """In percent of the whole; None where that is unknown."""
        whole = self.observation.ms
        return None if whole is None else 100 * ms / whole

    @property
    def post_us(self) -> float | None:
        """What posting one descriptor took, where that was told."""
        one = self.observation
        return None if one.post_ms is None or one.descriptors is None else 1e3 * one.post_ms / one.descriptors

    def as_record(self) -> dict[str, Any]:
        """An entry of the plan's `observed.explained[]`."""
        return {
            "observation": asdict(self.observation),
            "terms": {
                name: {
                    "ms": [term.low, term.high],
                    "percent": None if self.observation.ms is None else [self.share(term.low), self.share(term.high)],
                }
                for name, term in self.terms.items()
            },
            "post_us_per_descriptor": self.post_us,
            "usual_post_us_per_descriptor": list(priors.USUAL_POSTING_US),
            "binds": self.binds,
            "helps": [{"what": what, "at_most_ms": ms, "at_most_percent": self.share(ms)} for what, ms in self.helps],
            "measure": self.measure,
        }


@dataclass(frozen=True)
class Explanation:
    """All observations together, what was assumed of them, and by how much their times had to be off to fit."""

    explained: list[Explained]
    priors: list[priors.Prior]
    tolerance: float

    def as_record(self) -> dict[str, Any]:
        """The plan's `observed`."""
        return {
            "explained": [one.as_record() for one in self.explained],
            "priors": [asdict(prior) for prior in self.priors],
            "tolerance_percent": 100 * self.tolerance,
        }


def explain(observations: Sequence[Observation], link_gbit: Sequence[float]) -> Explanation:
    """What these observations of one path say; link_gbit are the line rates that it may have.

    Raises UsageError when an observation contradicts itself, the links, or the others.
    """
    link = priors.wire(link_gbit)
    if len(observations) > MOST_OBSERVATIONS:
        raise UsageError(f"{len(observations)} observations are too many to bound; give at most {MOST_OBSERVATIONS}")
    for one in observations:
        one.check()
        one.check_rate(link)
    told = any(one.post_ms is not None and one.descriptors is not None for one in observations)
    usual = None if told else priors.POSTING
    for tolerance in TOLERANCES:
        for fixed, posting in ((priors.FIXED, usual), (None, usual), (None, None)):
            unknowns = _Unknowns(observations, link, fixed, posting, tolerance)
            terms = [unknowns.terms(number) for number in range(len(observations))]
            if all(each is not None for each in terms):
                used = _used(observations, posting, fixed, link)
                explained = [
                    _explained(one, each, link, min(link_gbit))
                    for one, each in zip(observations, terms, strict=True)
                    if each is not None
                ]
                return Explanation(explained, used, tolerance)
    raise _contradiction(observations)


def _used(
    observations: Sequence[Observation], posting: priors.Prior | None, fixed: priors.Prior | None, link: priors.Prior
) -> list[priors.Prior]:
    """The priors that a figure rests on: what has no whole time is told as it was logged."""
    whole = [one for one in observations if one.ms is not None]
    used = {
        posting: any(one.descriptors is not None for one in whole),
        fixed: bool(whole),
        link: any(one.bytes is not None for one in whole),
    }
    return [prior for prior, rests in used.items() if prior is not None and rests]


class _Unknowns:
    """α, γ and 1/β, scaled so that all are times in ms of a typical request; and terms of which nobody told the size.

    The limits are what the observations and priors say of them.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        link: priors.Prior,
        fixed: priors.Prior | None,
        posting: priors.Prior | None,
        tolerance: float,
    ) -> None:
        self._observations = observations
        self._link = link
        self._count = 3 + 2 * len(observations)
        self._descriptors = _typical([one.descriptors for one in observations])
        self._bytes = _typical([one.bytes for one in observations])
        self._scale = max(one.ms or one.post_ms or 0.0 for one in observations) or 1.0
        self.limits: list[Limit] = []
        if fixed is not None:
            self._within(self._only(0), fixed.low, fixed.high)
        if posting is not None:
            per_ms = self._descriptors / 1e3
            self._within(self._only(1), posting.low * per_ms, posting.high * per_ms)
        self.limits.append(Limit(self._only(2, -1.0), -self._bytes / (link.high * 1e6) / self._scale))
        for number, one in enumerate(observations):
            self._observe(number, one, tolerance)

    def terms(self, number: int) -> dict[Term, Range] | None:
        """The terms of one observation; None when no α, γ and β fulfil everything."""
        found: dict[Term, Range] = {}
        for name, coefficients in self._terms(number).items():
            edges = bounds(coefficients, self.limits)
            if edges is None:
                return None
            found[name] = Range(max(0.0, edges[0]) * self._scale, edges[1] * self._scale)
        return found

    def _terms(self, number: int) -> dict[Term, list[float]]:
        one = self._observations[number]
        own = 3 + 2 * number
        return {
            "posting": self._only(own)
            if one.descriptors is None
            else self._only(1, one.descriptors / self._descriptors),
            "fixed": self._only(0),
            "wire": self._only(own + 1)
            if one.bytes is None or one.overlaps(self._link)
            else self._only(2, one.bytes / self._bytes),
        }

    def _observe(self, number: int, one: Observation, tolerance: float) -> None:
        terms = self._terms(number)
        whole = [sum(each) for each in zip(*terms.values(), strict=True)]
        wire_ms = one.wire_ms
        if one.overlaps(self._link):
            self._observe_overlap(one, terms["wire"], tolerance)
            wire_ms = None
        for told, coefficients in ((one.ms, whole), (one.post_ms, terms["posting"]), (wire_ms, terms["wire"])):
            if told is not None:
                self._within(coefficients, told * (1 - tolerance), told * (1 + tolerance))
        if one.ms is None:  # nothing else bounds what was not told
            self._within(whole, 0.0, 1e6 * self._scale)

    def _observe_overlap(self, one: Observation, adds: list[float], tolerance: float) -> None:
        """The wire's whole time tells β; what it adds is at least what outlasts posting."""
        assert one.ms is not None
        assert one.post_ms is not None
        least = one.least_wire_ms(self._link)
        self._within(adds, max(0.0, least - one.post_ms) * (1 - tolerance), one.ms * (1 + tolerance))
        if one.bytes is not None:
            most = one.ms if one.wire_ms is None else one.wire_ms
            self._within(self._only(2, one.bytes / self._bytes), least * (1 - tolerance), most * (1 + tolerance))

    def _within(self, coefficients: list[float], low_ms: float, high_ms: float) -> None:
        self.limits += between(coefficients, low_ms / self._scale, high_ms / self._scale)

    def _only(self, index: int, coefficient: float = 1.0) -> list[float]:
        row = [0.0] * self._count
        row[index] = coefficient
        return row


def _typical(values: Sequence[float | None]) -> float:
    """A size to scale with."""
    known = [value for value in values if value]
    return max(known) if known else 1.0


def _explained(one: Observation, terms: dict[Term, Range], link: priors.Prior, slowest_gbit: float) -> Explained:
    if one.ms is None:
        measure = ["ms: how long the whole transfer takes, from its post to its completion"]
        return Explained(one, {"posting": terms["posting"]}, None, [], measure)
    terms = {name: Range(term.low, min(term.high, one.ms)) for name, term in terms.items()}
    binds = _binding(terms, one.ms)
    if binds == "posting" and one.overlaps(link) and one.least_wire_ms(link) >= (one.post_ms or 0.0):
        binds = None  # without it the wire alone would take as long
    too_slow = False
    if binds == "wire" and one.bytes is not None:
        least = terms["wire"].low if one.wire_ms is None else one.wire_ms
        too_slow = one.bytes / least / 1e6 < SUSPICIOUS * slowest_gbit / priors.GBIT_PER_GBYTE
    measure = _measurements(one, terms, binds, too_slow)
    helps = _helps(_wins(one, terms, link), too_slow)
    return Explained(one, terms, "wrong transport" if too_slow else binds, helps, measure)


def _binding(terms: dict[Term, Range], whole: float) -> Term | None:
    """The term that is more than half of the whole, or more than any other can be, whatever is unknown."""
    for name, term in terms.items():
        others = max(other.high for key, other in terms.items() if key != name)
        if term.low > whole / 2 or term.low > others:
            return name
    return None


FASTER_LINK = "a faster link, or more of them"
RIGHT_TRANSPORT = "the transport that should carry the bytes"
HELPS: tuple[tuple[str, Term, float], ...] = (
    ("fewer descriptors: larger blocks, K and V in one region, blocks side by side", "posting", 1.0),
    (FASTER_LINK, "wire", 1.0),
    ("half the bytes in as many descriptors (an FP8 cache)", "wire", 0.5),
    ("less fixed cost: several requests in flight, push in place of pull, fewer control messages", "fixed", 1.0),
)
"""What would help, the term that it is about, and the share of that term which it can win."""


def _wins(one: Observation, terms: dict[Term, Range], link: priors.Prior) -> dict[Term, tuple[float, float]]:
    """Of each term how long it takes at most, and the most of that which the whole becomes shorter without it."""
    wins = {name: (term.high, term.high) for name, term in terms.items()}
    if one.ms is not None and one.overlaps(link):  # what one no longer does the other still takes
        wins["posting"] = terms["posting"].high, min(terms["posting"].high, one.ms - one.least_wire_ms(link))
        wins["wire"] = one.ms if one.wire_ms is None else one.wire_ms, terms["wire"].high
    return wins


def _helps(wins: dict[Term, tuple[float, float]], too_slow: bool) -> list[tuple[str, float]]:
    """The most that each remedy wins, the largest first."""
    found = [(what, min(share * wins[term][0], wins[term][1])) for what, term, share in HELPS]
    if too_slow:
        found = [(RIGHT_TRANSPORT if what == FASTER_LINK else what, most) for what, most in found]
    return sorted(found, key=lambda each: -each[1])


def _measurements(one: Observation, terms: dict[Term, Range], binds: Term | None, too_slow: bool) -> list[str]:
    """What would narrow the terms most."""
    whole = one.ms or 0.0
    open_terms = {name for name, term in terms.items() if term.high - term.low > WIDE * whole}
    wanted = []
    if too_slow:
        wanted.append(
            "which transport carried the bytes (kvxfer bench names it, UCX_LOG_LEVEL=info too), and whether this was "
            "the first request of its pair, with the set-up in it"
        )
    if one.bytes is None and one.wire_ms is None:
        wanted.append("bytes: without them nothing is known of the wire")
    if one.descriptors is None and one.post_ms is None:
        wanted.append("descriptors and post_ms: without them posting can be anything")
    elif one.post_ms is None and "posting" in open_terms:
        wanted.append("post_ms: how long posting took (vLLM logs it as Avg post time, vllm:nixl_post_time_seconds)")
    if binds is None and {"fixed", "wire"} <= open_terms and one.bytes is not None:
        wanted.append(
            "a second request of another size on the same path (a second --observed): it tells fixed cost from "
            "bandwidth; or kvxfer bench --fit on these hosts"
        )
    return wanted


def _contradiction(observations: Sequence[Observation]) -> UsageError:
    rates = [one.bytes / one.ms / 1e6 for one in observations if one.bytes and one.ms]
    told = ""
    if len(rates) > 1:
        told = f"; they move {min(rates):.3g} to {max(rates):.3g} GB/s: one direction can fall back to TCP alone"
    return UsageError(
        f"no α, γ and β explain these observations within {100 * TOLERANCES[-1]:g} %{told}; give those of one path "
        "together (one direction, one transport), and each other path by itself"
    )
