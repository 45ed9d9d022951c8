"""What a log line of a user's own transfers says: what binds, what would help, and by how much at most.

A request takes T = α + γ · descriptors + bytes / β, and one line cannot fix three unknowns. So each term has a least
and a most that the observations and named priors allow, and "undetermined; measure this" is an answer. Several
observations are taken to be of one path, with the same α, γ and β.

Where posting and wire overlap, wire is what it adds to posting: a faster link can win no more than what posting leaves,
and fewer descriptors no more than what the wire leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvxfer.cost import priors
from kvxfer.cost.terms import OVERLAPPING, TOLERANCES, Fit, Observation, Range, Term, Terms, fit, slow_posting_explains
from kvxfer.errors import UsageError

SUSPICIOUS = 0.1
"""Of the slowest link's rate: bytes that move slower than that are carried by something else."""

MOST_OBSERVATIONS = 8
WIDE = 0.2
"""Of T: a term that is known less well than this is worth a measurement."""


@dataclass(frozen=True)
class Explained:
    """One observation: its terms as far as they are known, and what follows. Nothing binds where `ms` is unknown."""

    observation: Observation
    terms: Terms
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
    """All observations, what was assumed of them, by how much their times had to be off to fit, and what to know."""

    explained: list[Explained]
    priors: list[priors.Prior]
    tolerance: float
    notices: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        """The plan's `observed`."""
        return {
            "explained": [one.as_record() for one in self.explained],
            "priors": [asdict(prior) for prior in self.priors],
            "tolerance_percent": 100 * self.tolerance,
        }


def explain(observations: Sequence[Observation], link_gbit: Sequence[float]) -> Explanation:
    """What these observations of one path say; link_gbit are the line rates that it may have.

    Where they fit together only by what nobody told, those that lack it are explained each by itself.
    Raises UsageError when an observation contradicts itself, the links, or the others.
    """
    link = priors.wire(link_gbit)
    if len(observations) > MOST_OBSERVATIONS:
        raise UsageError(f"{len(observations)} observations are too many to bound; give at most {MOST_OBSERVATIONS}")
    for one in observations:
        one.check()
        one.check_rate(link)
    numbers = range(len(observations))
    groups, notices = [list(numbers)], []
    fits = _fits(observations, groups, link)
    if fits is None:
        apart, slow = _lacking(observations, link)
        if not apart:
            raise _contradiction(observations)
        groups = [
            each for each in ([number for number in numbers if number not in apart], *([n] for n in apart)) if each
        ]
        fits = _fits(observations, groups, link)
        notices = [_apart([observations[number] for number in apart], slow, _compared(observations))]
    if fits is None:
        raise _contradiction(observations)
    explained: dict[int, Explained] = {}
    for group, found in zip(groups, fits, strict=True):
        for number, terms in zip(group, found.terms, strict=True):
            explained[number] = _explained(observations[number], terms, link, min(link_gbit))
    return Explanation(
        [explained[number] for number in numbers],
        _used(observations, groups, fits),
        max(found.tolerance for found in fits),
        notices,
    )


def _fits(observations: Sequence[Observation], groups: Sequence[Sequence[int]], link: priors.Prior) -> list[Fit] | None:
    """Each group's fit; None where one has none."""
    found = [fit([observations[number] for number in group], link) for group in groups]
    fits = [each for each in found if each is not None]
    return fits if len(fits) == len(found) else None


def _used(
    observations: Sequence[Observation], groups: Sequence[Sequence[int]], fits: Sequence[Fit]
) -> list[priors.Prior]:
    """The priors that a figure rests on: what has no whole time is told as it was logged."""
    used: dict[priors.Prior, bool] = {}
    for group, found in zip(groups, fits, strict=True):
        whole = [observations[number] for number in group if observations[number].ms is not None]
        for prior, rests in (
            (found.assumed.posting, any(one.descriptors is not None for one in whole)),
            (found.assumed.fixed, bool(whole)),
            (found.assumed.link, any(one.bytes is not None for one in whole)),
        ):
            if prior is not None:
                used[prior] = used.get(prior, False) or rests
        if whole and len(group) > 1:
            used[priors.one_path(found.tolerance)] = True
    return [prior for prior, rests in used.items() if rests]


def _explained(one: Observation, terms: Terms, link: priors.Prior, slowest_gbit: float) -> Explained:
    if one.ms is None:
        measure = ["ms: how long the whole transfer takes, from its post to its completion"]
        return Explained(one, {"posting": terms["posting"]}, None, [], measure)
    terms = {name: term.within(Range(0.0, one.ms)) for name, term in terms.items()}
    wins = _wins(one, terms, link)
    most_fixed, _ = wins["fixed"]
    binds = _binding_overlapped(one, link, most_fixed) if one.overlaps(link) else _binding(one, terms, most_fixed)
    least, most = terms["wire"].low, one.ms if one.overlaps(link) else terms["wire"].high
    if one.wire_ms is not None:
        least = most = one.wire_ms
    too_slow = binds == "wire" and _is_slow(one, least, slowest_gbit)
    may_be_slow = terms["wire"].high > WIDE * one.ms and _is_slow(one, most, slowest_gbit)
    helps = _helps(wins, too_slow)
    measure = _measurements(one, terms, binds, may_be_slow, one.overlaps(link))
    return Explained(one, terms, "wrong transport" if too_slow else binds, helps, measure)


def _is_slow(one: Observation, wire_ms: float, slowest_gbit: float) -> bool:
    """Whether the bytes, in so long, would have moved slower than any link carries them."""
    return one.bytes is not None and one.bytes < SUSPICIOUS * slowest_gbit / priors.GBIT_PER_GBYTE * 1e6 * wire_ms


def _binding(one: Observation, terms: Terms, most_fixed: float) -> Term | None:
    """The term that is more than half of the whole, or more than any other can be, whatever is unknown.

    Also whether or not posting and wire overlapped, which makes the fixed cost longer. None of which nobody told the
    size: that it is what the others leave says more of these than of it.
    """
    assert one.ms is not None
    most = {name: most_fixed if name == "fixed" else term.high for name, term in terms.items()}
    for name, term in terms.items():
        others = max(ms for key, ms in most.items() if key != name)
        if name not in one.untold and (term.low > one.ms / 2 or term.low > others):
            return name
    return None


def _binding_overlapped(one: Observation, link: priors.Prior, most_fixed: float) -> Term | None:
    """Of posting and wire that were under way at once the one that took longer, as far as that is known, by more than
    rounding: without the other it would take as long.
    """
    assert one.post_ms is not None
    if one.least_wire_ms(link) > max(OVERLAPPING * one.post_ms, most_fixed):
        return "wire"
    if one.wire_ms is not None and one.post_ms > max(OVERLAPPING * one.wire_ms, most_fixed):
        return "posting"
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


def _wins(one: Observation, terms: Terms, link: priors.Prior) -> dict[Term, tuple[float, float]]:
    """Of each term how long it takes at most, and the most of that which the whole becomes shorter without it.

    Whether or not posting and wire overlapped: what one no longer does the other still takes; the wire may have been
    busy all the time; and what overlapped is time that the fixed cost may have had.
    """
    assert one.ms is not None
    posting, fixed, wire = terms["posting"], terms["fixed"], terms["wire"]
    least = one.least_wire_ms(link)
    hidden = 0.0 if one.overlaps(link) else min(posting.low, least)  # an overlap that is seen is in the terms
    most_fixed = min(one.ms, fixed.high + hidden)
    return {
        "posting": (posting.high, max(0.0, min(posting.high, one.ms - least))),
        "fixed": (most_fixed, most_fixed),
        "wire": (one.ms if one.wire_ms is None else one.wire_ms, wire.high),
    }


def _helps(wins: dict[Term, tuple[float, float]], too_slow: bool) -> list[tuple[str, float]]:
    """The most that each remedy wins, the largest first."""
    found = [(what, min(share * wins[term][0], wins[term][1])) for what, term, share in HELPS]
    if too_slow:
        found = [(RIGHT_TRANSPORT if what == FASTER_LINK else what, most) for what, most in found]
    return sorted(found, key=lambda each: -each[1])


FIRST = "whether this was the first request of its pair, with the set-up in it"


STEADY = f"{FIRST}: steady ones have at most {priors.FIXED.high / 2:g} ms of fixed cost in reports"
BENCH = "kvxfer bench --fit on these hosts"
ALIKE = (
    "how both get shorter: posting and wire were under way at once and took alike long, so that neither binds by itself"
)
HIDDEN = (
    f"{BENCH}: whether posting and wire were under way at once is not in these figures, and what binds turns on it, or "
    "on parts that are alike long"
)


def _measurements(one: Observation, terms: Terms, binds: Term | None, may_be_slow: bool, overlaps: bool) -> list[str]:
    """What would narrow the terms most; where nothing of this request would, why."""
    whole = one.ms or 0.0
    open_terms = {name for name, term in terms.items() if term.high - term.low > WIDE * whole}
    # That these are so long is only that the fixed cost is not: nothing was told of them.
    rests = [name for name in one.untold if terms[name].low > WIDE * whole]
    open_terms.update(rests)
    wanted = []
    if may_be_slow:
        wanted.append(f"which transport carried the bytes (kvxfer bench names it, UCX_LOG_LEVEL=info too), and {FIRST}")
    elif rests or terms["fixed"].low > priors.FIXED.high:
        wanted.append(STEADY)
    if "wire" in one.untold and "wire" in open_terms:
        wanted.append("bytes: without them nothing is known of the wire")
    if binds is None and overlaps and one.wire_ms is None:
        wanted.append("wire_ms: how long the data were under way, which posting overlapped")
    if "posting" in one.untold and "posting" in open_terms:
        wanted.append("descriptors and post_ms: without them nothing is known of posting")
    elif one.post_ms is None and "posting" in open_terms:
        wanted.append("post_ms: how long posting took (vLLM logs it as Avg post time, vllm:nixl_post_time_seconds)")
    if binds is None and {"fixed", "wire"} <= open_terms and one.bytes is not None:
        wanted.append(
            "a second request of another size on the same path (a second --observed): it tells fixed cost from "
            f"bandwidth; or {BENCH}"
        )
    if binds is None and not wanted:
        wanted.append(ALIKE if overlaps else HIDDEN)
    return wanted


def _lacking(observations: Sequence[Observation], link: priors.Prior) -> tuple[list[int], bool]:
    """Those that may not fit the others for what they do not tell; and whether slow posting is one such reason."""
    apart = [number for number, one in enumerate(observations) if one.ms is not None and one.untold]
    told = {number: one for number, one in enumerate(observations) if number not in apart}
    rest = list(told.values())
    slow = bool(rest) and fit(rest, link) is None and slow_posting_explains(rest, link)
    if slow:
        apart += [number for number, one in told.items() if one.ms is not None and one.post_ms is None]
    return sorted(apart), slow


def _apart(apart: Sequence[Observation], slow: bool, compared: str) -> str:
    """Why these are explained each by itself."""
    names = {"posting": "descriptors", "wire": "bytes"}
    tell = [name for term, name in names.items() if any(term in one.untold for one in apart)]
    reasons = [f"{' and '.join(tell)} that nobody told"] if tell else []
    if slow:
        reasons.append(f"posting of more than {priors.PLAUSIBLE_POSTING.high:g} µs a descriptor")
        tell.append("post_ms")
    return (
        f"on one path only {' or '.join(reasons)} would explain these observations{compared}; so those that may have "
        f"it are explained each by itself. Tell {' and '.join(tell)}, and measure which transport carried each"
    )


def _compared(observations: Sequence[Observation]) -> str:
    """How differently fast these moved, and what can be behind it; or how long they took, where few tell bytes."""
    told = [(one.bytes, one.ms) for one in observations if one.bytes and one.ms]
    if len(told) < 2:
        whole = [one.ms for one in observations if one.ms]
        ratio = max(whole, default=0.0) / min(whole, default=1.0)
        return f"; the longest took {ratio:.3g} times as long as the shortest" if len(whole) > 1 else ""
    sizes, times = ([each[part] for each in told] for part in (0, 1))
    rates = [size / ms / 1e6 for size, ms in told]
    same = (
        f"the same bytes took {max(times) / min(times):.3g} times as long, at" if len(set(sizes)) == 1 else "they move"
    )
    return (
        f"; {same} {min(rates):.3g} to {max(rates):.3g} GB/s: one direction can fall back to TCP alone, and the first "
        "request of a pair has its set-up in it"
    )


def _contradiction(observations: Sequence[Observation]) -> UsageError:
    return UsageError(
        f"no α, γ and β explain these observations within {100 * TOLERANCES[-1]:g} %{_compared(observations)}; give "
        "those of one path together (one direction, one transport, not the first request), and each other by itself"
    )
