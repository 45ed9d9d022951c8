"""What a split costs the load: every request's cache crosses a path, that is a line rate or was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from kvxfer.cache.layout import Side
from kvxfer.cache.leaving import Weight
from kvxfer.cache.sends import Cut
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.first_token import FirstTokens, OnThePath, Replay, crossed, first_tokens_record
from kvxfer.cost.fitted import Fitted
from kvxfer.cost.load import Load
from kvxfer.cost.measured import Measured
from kvxfer.cost.pipeline import SAME, Carrier, Link
from kvxfer.cost.pipelined import Crossing, MeasuredLink, Pipelined, Pipelining
from kvxfer.cost.prefill_source import PrefillSource, prompt_ms
from kvxfer.cost.ratio import line_rate_ms
from kvxfer.result.file import ONE_HOST_SCOPES
from kvxfer.wording import told_beside

LARGEST_TOKENS = 100_000_000

Sides = tuple[int, int]
"""Of prefill and of decode."""

STANDING_FOR_ALL = 100
"""Prompt lengths that the transfer of a load is computed for."""

SIDES: tuple[Side, Side] = ("prefill", "decode")

NOTHING_MOVED = "null"
"""The backend that moves no bytes."""


@dataclass(frozen=True)
class Busy:
    """The share of time that the load's sends hold the path of one engine, on the side where that is more.

    side is None where both sides' paths are as busy. other is the share of the other side's; None where its engines are
    not said.
    """

    share: float
    side: Side | None
    other: float | None = None

    @property
    def both_overloaded(self) -> bool:
        """Whether more engines of one side alone would not help."""
        return self.share >= 1 and (self.side is None or (self.other is not None and self.other >= 1))

    def __str__(self) -> str:
        whose = "each engine of either side" if self.side is None else f"each {self.side} engine"
        return f"{told_beside(100 * self.share, 100)}% of the time that the path of {whose} has"


@dataclass(frozen=True)
class PathCost:
    """What one request pays on a path, and how busy the load keeps it.

    reached is the share of the load's prompts that a measurement reaches, those that the other figures are of. gbit is
    the line rate, or what was measured on the longest prompt. percent is the share of the transfers in the prefill of
    the same prompts. exposed_ms is what pipelining leaves of the longest measured prompt's transfer; without it all of
    it waits. setup_ms is what the first request of a pair of running engines waits for beside its transfer. busy is the
    share of time that the path of one engine is held by the load's sends, those of prompts that no measurement reaches
    extrapolated. pipelined is what a model says that pipelining leaves exposed, where that was asked for. first_tokens
    are those of the load's requests. None where not known.
    """

    dtype: str
    path: str
    measured: bool
    reached: float | None
    gbit: float
    percent: float
    median_ms: float | None
    p99_ms: float | None
    exposed_ms: float | None
    setup_ms: float | None
    busy: Busy | None
    pipelined: Pipelined | None = None
    first_tokens: FirstTokens | None = None

    @property
    def overloaded(self) -> bool:
        """Whether the load is more than the path can carry."""
        return self.busy is not None and self.busy.share >= 1

    def as_record(self) -> dict[str, Any]:
        fields, busy = asdict(self), self.busy
        del fields["first_tokens"]
        fields["busy"] = None if busy is None else busy.share
        fields["busy_side"] = None if busy is None else busy.side
        return fields | first_tokens_record(self.first_tokens)


@dataclass(frozen=True)
class Traffic:
    """One cache under one load: bytes and descriptors by prompt length, the prefill that they are set against.

    on_links tells them on each link that is assumed, and link_sides whose that is. tokens are the prompt lengths that
    are told one by one. engines are those of each side, as far as said. pipelining is None where it was not asked for.
    replays are requests that were prefilled, of each draw of the load.
    """

    dtype: str
    sizes: Callable[[int], int]
    pieces: Callable[[int], int]
    on_links: Callable[[int], Sequence[Weight]]
    link_sides: Sequence[frozenset[Side]]
    tokens: Sequence[int]
    load: Load
    source: PrefillSource
    assumptions: Assumptions
    engines: Mapping[Side, int]
    pipelining: Pipelining | None = None
    replays: Sequence[Replay] = ()

    @cached_property
    def prompts(self) -> dict[int, int]:
        """Those that stand for the load, and how many requests each."""
        return self.load.standing(STANDING_FOR_ALL)

    def prefill_ms(self, prompts: Mapping[int, int]) -> float:
        return sum(count * prompt_ms(self.source, self.assumptions, prompt) for prompt, count in prompts.items())

    def together(self, tokens: int) -> Sequence[Weight]:
        """All that moves of a prompt, as one send."""
        return [(self.sizes(tokens), self.pieces(tokens))]

    def busy(
        self, carrier: Carrier, pipelined: Pipelined | None, whole: Callable[[int], Sequence[Weight]]
    ) -> Busy | None:
        """What keeps the path of one engine busy; None without a rate.

        Every engine of either side has a path of its own, of whose links the busiest counts; where neither side's
        number is said, one engine. `whole` tells what each link carries of a prompt that is not pipelined.
        """
        rate = self.load.requests_per_s
        if rate is None:
            return None
        held_ns = {tokens: self._held_ns(carrier, pipelined, whole, tokens) for tokens in self.prompts}

        def of_one(side: Side) -> float:
            held = sum(count * held_ns[tokens][side] for tokens, count in self.prompts.items())
            mean_s = held / len(self.load.prompts) / 1e9
            return rate / self.engines.get(side, 1) * mean_s

        said: Sequence[Side] = [*self.engines] or SIDES
        shares = {side: of_one(side) for side in said}
        side = max(said, key=lambda one: shares[one])
        most, least = shares[side], min(shares.values())
        alike = most <= least * (1 + SAME)
        return Busy(most, None if alike and len(said) > 1 else side, least if len(said) > 1 else None)

    def _held_ns(
        self, carrier: Carrier, pipelined: Pipelined | None, whole: Callable[[int], Sequence[Weight]], tokens: int
    ) -> dict[Side, float]:
        """How long a prompt holds the busiest link of an engine of each side."""
        held = [sum(carrier.holds_ns(*send) for send in link) for link in self._links(tokens, pipelined, whole)]
        return {
            side: max((ns for ns, sides in zip(held, self.link_sides, strict=False) if side in sides), default=0.0)
            for side in SIDES
        }

    def _links(
        self, tokens: int, pipelined: Pipelined | None, whole: Callable[[int], Sequence[Weight]]
    ) -> list[list[Weight]]:
        """What each link carries of a prompt, send by send; none where nothing moves."""
        if self.pipelining is None or pipelined is None:
            return [[(size, pieces)] if size else [] for size, pieces in whole(tokens)]
        links, _ = self.pipelining.sends(tokens, Cut(pipelined.layers_per_send, pipelined.chunk_tokens))
        return [[(send.bytes, send.descriptors) for send in sends] for sends in links]

    def first_tokens(
        self,
        carrier: Carrier,
        busy: Busy | None,
        pipelined: Pipelined | None,
        whole: Callable[[int], Sequence[Weight]],
        transfers_ms: Mapping[int, float],
    ) -> FirstTokens | None:
        """By what some prompts' transfers take, or what pipelining leaves of them; None where the path is too narrow.

        The next request of the same engine of either side waits for its own links only. What sends hide that are
        assumed to cost nothing does not count.
        """
        if busy is None or busy.share >= 1:
            return None
        waits_ms = transfers_ms
        if self.pipelining is not None and pipelined is not None:
            if carrier.reach is not None or not self.assumptions.sends_cost_nothing:
                crossing = Crossing(carrier, prompts={}, median=None, p99=None, listed=[])
                cut = Cut(pipelined.layers_per_send, pipelined.chunk_tokens)
                waits_ms = {tokens: self.pipelining.exposed_ms(crossing, tokens, cut) for tokens in transfers_ms}
            else:
                pipelined = None
        path = {}
        for tokens, ms in waits_ms.items():
            held_ns = self._held_ns(carrier, pipelined, whole, tokens)
            path[tokens] = OnThePath(ms, *(min(ms, held_ns[side] / 1e6) for side in SIDES))
        return crossed(self.replays, path)

    def pipelined(self, carrier: Carrier, reaches: Callable[[int], bool]) -> Pipelined | None:
        """What a carrier leaves exposed of the prompts that are reached; None where that was not asked for."""
        if self.pipelining is None:
            return None
        median, p99 = self.load.percentile(50), self.load.percentile(99)
        return self.pipelining.of(
            Crossing(
                carrier=carrier,
                prompts={prompt: count for prompt, count in self.prompts.items() if reaches(prompt)},
                median=median if reaches(median) else None,
                p99=p99 if reaches(p99) else None,
                listed=[tokens for tokens in self.tokens if reaches(tokens)],
            )
        )


def line_rate_paths(traffic: Traffic) -> list[PathCost]:
    """One for each line rate that is assumed."""
    prompts, load, assumptions = traffic.prompts, traffic.load, traffic.assumptions
    told = {*prompts, *(load.percentile(percent) for percent in (0, 50, 99, 100))}
    on_links = {prompt: traffic.on_links(prompt) for prompt in told}
    prefill = traffic.prefill_ms(prompts)
    paths = []
    for gbit in assumptions.link_gbit:
        times = {prompt: line_rate_ms(weights, gbit, assumptions) for prompt, weights in on_links.items()}
        each_send_ms, per_piece_ns = assumptions.send_ms, assumptions.gamma_us * 1e3
        carrier = Link((assumptions.fixed_ms - each_send_ms) * 1e6, each_send_ms * 1e6, gbit / 8, per_piece_ns)
        pipelined = traffic.pipelined(carrier, lambda _: True)
        busy = traffic.busy(carrier, pipelined, traffic.on_links)
        paths.append(
            PathCost(
                dtype=traffic.dtype,
                path=f"{gbit:g} Gb/s line rate",
                measured=False,
                reached=None,
                gbit=gbit,
                percent=sum(count * times[prompt] for prompt, count in prompts.items()) / prefill * 100,
                median_ms=times[load.percentile(50)],
                p99_ms=times[load.percentile(99)],
                exposed_ms=None,
                setup_ms=None,
                busy=busy,
                pipelined=pipelined,
                first_tokens=traffic.first_tokens(carrier, busy, pipelined, traffic.on_links, times),
            )
        )
    return paths


class Path(Protocol):
    """What was measured between two hosts by one backend and op; it knows the times of some prompts."""

    @property
    def named(self) -> str: ...

    def reaches(self, tokens: int) -> bool: ...

    def transfer_ms(self, tokens: int) -> float:
        """Of a prompt that it reaches."""

    def gbit(self, tokens: int) -> float:
        """Of the longest prompt that was measured, or of this one, which it reaches."""

    @property
    def longest(self) -> Measured | None:
        """The row of the longest prompt that was measured."""

    def setup_ms(self, tokens: int) -> float | None:
        """What the first request of a pair waits for beside a transfer: of that row, or of this prompt, reached."""

    @property
    def carrier(self) -> Carrier:
        """What carries a request."""

    @property
    def sends(self) -> Carrier | None:
        """What carries sends that are a part of one; None where that is not known."""


@dataclass(frozen=True)
class MeasuredPath:
    """Rows of rising prompt length, of one cache of these sizes, between two hosts by one backend and op."""

    rows: Sequence[Measured]
    sizes: Callable[[int], int]

    @property
    def named(self) -> str:
        first, last = self.rows[0], self.rows[-1]
        lengths = f"{last.tokens:,}" if first is last else f"{first.tokens:,} … {last.tokens:,}"
        return f"{last.backend} {last.op}, measured at {lengths} tokens"

    def reaches(self, tokens: int) -> bool:
        return self.rows[0].tokens <= tokens <= self.rows[-1].tokens

    def transfer_ms(self, tokens: int) -> float:
        """A line is drawn between the bytes of two lengths, of which whole blocks move."""
        return self.carrier.holds_ns(self.sizes(tokens), 0) / 1e6

    def gbit(self, tokens: int) -> float:
        return self.longest.bytes * 8 / (self.longest.transfer_ms or 0.0) / 1e6

    @property
    def longest(self) -> Measured:
        return self.rows[-1]

    def setup_ms(self, tokens: int) -> float | None:
        cold_ms = self.longest.cold_pair_ms
        return None if cold_ms is None else max(0.0, cold_ms - (self.longest.transfer_ms or 0.0))

    @property
    def carrier(self) -> MeasuredLink:
        """Of a single size others take their share."""
        return MeasuredLink(sorted(self._sizes.items()) if self._tells_smaller else [(0, 0.0), *self._sizes.items()])

    @property
    def sends(self) -> Carrier | None:
        """As the longest row's own pipelining found them, or else the line between several sizes."""
        return self.longest.sends or (self.carrier if self._tells_smaller else None)

    @property
    def _tells_smaller(self) -> bool:
        return len(self._sizes) > 1

    @cached_property
    def _sizes(self) -> dict[int, float]:
        """ns by bytes; several lengths may fill the same blocks."""
        return {row.bytes: (row.transfer_ms or 0.0) * 1e6 for row in self.rows}


@dataclass(frozen=True)
class FittedPath:
    """A cost model that was fitted between two hosts, of one cache. longest, a row of that run, tells pipelining."""

    fitted: Fitted
    sizes: Callable[[int], int]
    pieces: Callable[[int], int]
    longest: Measured | None = None

    @property
    def named(self) -> str:
        one = self.fitted
        return f"{one.backend} {one.op}, fitted on {one.reach}"

    def reaches(self, tokens: int) -> bool:
        return self.fitted.reach.has(self.sizes(tokens), self.pieces(tokens))

    def transfer_ms(self, tokens: int) -> float:
        return self.fitted.fitted.predict_ns(self.pieces(tokens), self.sizes(tokens)) / 1e6

    def gbit(self, tokens: int) -> float:
        return self.sizes(tokens) * 8 / self.transfer_ms(tokens) / 1e6

    def setup_ms(self, tokens: int) -> float | None:
        cold = self.fitted.predict_cold(self.sizes(tokens), self.pieces(tokens))
        return None if cold is None else max(0.0, cold.ms - self.transfer_ms(tokens))

    @property
    def carrier(self) -> Carrier:
        return self.fitted

    @property
    def sends(self) -> Carrier:
        return self.fitted


def path_cost(path: Path, traffic: Traffic, exposed: Mapping[str, float | None]) -> PathCost | None:
    """Of the prompts that the path reaches; None where it reaches none.

    `exposed` tells the ms that pipelining left of a measured row by its id.
    """
    reached = {prompt: count for prompt, count in traffic.prompts.items() if path.reaches(prompt)}
    ends = traffic.load.percentile(0), traffic.load.percentile(100)
    farthest = max((*reached, *filter(path.reaches, ends)), default=0)
    if not reached or not path.transfer_ms(farthest):
        return None
    share = sum(reached.values()) / len(traffic.load.prompts)
    median, p99 = traffic.load.percentile(50), traffic.load.percentile(99)
    longest = path.longest
    sends = path.sends
    pipelined = None if sends is None else traffic.pipelined(sends, path.reaches)
    carrier = path.carrier if pipelined is None or sends is None else sends
    busy = traffic.busy(carrier, pipelined, traffic.together)
    times = {tokens: path.transfer_ms(tokens) for tokens in (*reached, *ends)} if all(map(path.reaches, ends)) else {}
    return PathCost(
        dtype=traffic.dtype,
        path=path.named + (f", {told_beside(100 * share, 100)}% of the prompts" if share < 1 else ""),
        measured=True,
        reached=share,
        gbit=path.gbit(farthest),
        percent=sum(count * path.transfer_ms(prompt) for prompt, count in reached.items())
        / traffic.prefill_ms(reached)
        * 100,
        median_ms=path.transfer_ms(median) if path.reaches(median) else None,
        p99_ms=path.transfer_ms(p99) if path.reaches(p99) else None,
        exposed_ms=None if longest is None else exposed.get(longest.of),
        setup_ms=path.setup_ms(farthest),
        busy=busy,
        pipelined=pipelined,
        first_tokens=traffic.first_tokens(carrier, busy, pipelined, traffic.together, times),
    )


def paths_between_hosts(
    measured: Sequence[Measured],
    model: str,
    dtype: str,
    ranks: tuple[Sides, Sides],
    moved: Callable[[int], int],
    pieces: Callable[[int], int],
) -> list[MeasuredPath]:
    """One for each backend and op that moved exactly this cache, one request at a time, between as many ranks.

    `ranks` are (prefill, decode) of TP and of PP. As many bytes between other ranks, or in other pieces (of another
    fragmentation, in other blocks), are another transfer.
    """
    by_name: dict[tuple[str, str], dict[int, Measured]] = {}
    for row in measured:
        if (row.model, row.dtype, row.inflight) != (model, dtype, 1) or not 0 < row.tokens <= LARGEST_TOKENS:
            continue
        if (row.tp, row.pp) != ranks or row.descriptors not in (None, pieces(row.tokens)):
            continue
        if row.scope in ONE_HOST_SCOPES or row.backend == NOTHING_MOVED or not row.transfer_ms:
            continue
        if row.bytes == moved(row.tokens):
            by_name.setdefault((row.backend, row.op), {})[row.tokens] = row
    return [MeasuredPath([rows[tokens] for tokens in sorted(rows)], moved) for rows in by_name.values()]


def fitted_paths(models: Sequence[Fitted], traffic: Traffic, rows: Sequence[MeasuredPath]) -> list[FittedPath]:
    """One for each cost model between two hosts; with the longest row of the same backend and op, if there is one."""
    longest = {(path.longest.backend, path.longest.op): path.longest for path in rows}
    return [
        FittedPath(one, traffic.sizes, traffic.pieces, longest.get((one.backend, one.op)))
        for one in models
        if one.scope not in ONE_HOST_SCOPES
    ]


def farther_reaching(
    rows: Sequence[MeasuredPath], fitted: Sequence[FittedPath], prompts: Mapping[int, int]
) -> list[Path]:
    """Of each backend and op the rows that were measured, or its cost model where that reaches more of the prompts."""

    def reached(path: Path) -> int:
        return sum(count for prompt, count in prompts.items() if path.reaches(prompt))

    found: dict[tuple[str, str], Path] = {(path.longest.backend, path.longest.op): path for path in rows}
    for path in fitted:
        key = path.fitted.backend, path.fitted.op
        if key not in found or reached(path) > reached(found[key]):
            found[key] = path
    return list(found.values())
