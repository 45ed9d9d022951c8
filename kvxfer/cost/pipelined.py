"""What stays exposed of a load's transfers when layers leave as they are computed: predicted, for a path of a plan.

The compute of a prompt is shared out evenly over the layers; bytes and descriptors are those of each layer's own cache.
Every prompt is cut alike, as an engine would: the best cut is the one of the sweep that leaves least exposed of the
load as a whole.
Where every rank has a link of its own, each carries what its rank sends or receives, and the last one to end decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from kvxfer.cache.leaving import Leaves
from kvxfer.cache.sends import Cut, chunk_lengths, sweep
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.pipeline import Carrier, Ready, Span, best_layers, break_even_tokens, computed_sends, exposed_ns
from kvxfer.cost.prefill_source import PrefillSource, on_the_line, prompt_ms


@dataclass(frozen=True)
class PipelinedPrompt:
    """One prompt length: its transfer after the whole prefill, and what is exposed of it when layers leave early."""

    tokens: int
    serial_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Pipelined:
    """The cut of every prompt, and what it leaves exposed.

    percent is the share of the load's exposed time in the prefill of the same prompts, serial_percent that of serial
    over the same sends, which need not be what whole requests were measured to take; median_ms and p99_ms are of the
    median and the p99 prompt, None where the path does not reach them. break_even_tokens is the shortest prompt from
    which on the cut is no slower than serial: None where there is none, or the cut is serial or by chunks. reach is
    what was measured of the path (None: it is assumed), and extrapolated are the sends beyond it, None where there are
    none; break_even_extrapolated says whether the prompt of break_even_tokens has such.
    """

    cut: str
    layers_per_send: int
    chunk_tokens: int | None
    percent: float
    serial_percent: float
    median_ms: float | None
    p99_ms: float | None
    break_even_tokens: int | None
    reach: Span | None
    extrapolated: Span | None
    break_even_extrapolated: bool
    prompts: Sequence[PipelinedPrompt]


@dataclass(frozen=True)
class Crossing:
    """One cache on one path, and what carries it.

    prompts stand for the load, so many requests each, those that the path reaches; listed are those that are told one
    by one.
    """

    carrier: Carrier
    prompts: Mapping[int, int]
    median: int | None
    p99: int | None
    listed: Sequence[int]

    @property
    def every(self) -> set[int]:
        """All prompts that anything is said of."""
        return {*self.prompts, *self.listed} | {one for one in (self.median, self.p99) if one is not None}


@dataclass(frozen=True)
class Pipelining:
    """How a plan's prompts are to be cut (`cut` None: by the best of the sweep), and the compute they hide behind.

    `known` are prompts whose prefill the source knows, at least one. `leaves` says what each send weighs on each link.
    """

    cut: Cut | None
    known: Sequence[int]
    layers: int
    block_size: int
    source: PrefillSource
    assumptions: Assumptions
    leaves: Leaves

    def of(self, crossing: Crossing) -> Pipelined:
        """What is left exposed on a path."""
        cut = self.cut or self._best(crossing)
        outside = [send for tokens in crossing.every for send in self._outside(crossing, tokens, cut)]
        break_even = self._break_even(crossing, cut)
        prefill_ms = sum(count * self._prefill_ms(tokens) for tokens, count in crossing.prompts.items())

        def exposed(tokens: int | None) -> float | None:
            return None if tokens is None else self.exposed_ms(crossing, tokens, cut)

        return Pipelined(
            cut=str(cut),
            layers_per_send=cut.layers,
            chunk_tokens=cut.chunk_tokens,
            percent=self._exposed_of_all(crossing, cut) / prefill_ms * 100,
            serial_percent=self._exposed_of_all(crossing, Cut(self.layers)) / prefill_ms * 100,
            median_ms=exposed(crossing.median),
            p99_ms=exposed(crossing.p99),
            break_even_tokens=break_even,
            reach=crossing.carrier.reach,
            extrapolated=_span(outside) if outside else None,
            break_even_extrapolated=break_even is not None
            and any(self._outside(crossing, break_even, one) for one in (cut, Cut(self.layers))),
            prompts=[
                PipelinedPrompt(
                    tokens,
                    self.exposed_ms(crossing, tokens, Cut(self.layers)),
                    self.exposed_ms(crossing, tokens, cut),
                )
                for tokens in crossing.listed
            ],
        )

    def exposed_ms(self, crossing: Crossing, tokens: int, cut: Cut) -> float:
        """Of one prompt, until the last link has carried all of its own. Nothing where nothing moves."""
        links, compute_ns = self.sends(tokens, cut)
        return max((exposed_ns(sends, crossing.carrier, compute_ns) for sends in links), default=0.0) / 1e6

    def sends(self, tokens: int, cut: Cut) -> tuple[list[list[Ready]], float]:
        """What leaves of a prompt over each link, and the ns of its compute."""
        known = self._known_sends
        if (tokens, cut) not in known:
            ends, times = self._chunks(tokens, cut)
            leaving = self.leaves(tokens, ends, cut.layers)
            links = [computed_sends(list(zip(times, link, strict=True)), leaving.after) for link in leaving.links]
            known[tokens, cut] = links, sum(times)
        return known[tokens, cut]

    @cached_property
    def _known_sends(self) -> dict[tuple[int, Cut], tuple[list[list[Ready]], float]]:
        """The same on every path of a plan."""
        return {}

    def _outside(self, crossing: Crossing, tokens: int, cut: Cut) -> list[Ready]:
        """The sends of a prompt whose like was not measured."""
        reach = crossing.carrier.reach
        if reach is None:
            return []
        links, _ = self.sends(tokens, cut)
        return [send for sends in links for send in sends if not reach.has(send.bytes, send.descriptors)]

    def _best(self, crossing: Crossing) -> Cut:
        """The one of the sweep that leaves least exposed of the load; all layers, which is serial, is one of these."""

        def exposed(layers: int) -> float:
            return self._exposed_of_all(crossing, Cut(layers))

        return Cut(best_layers(exposed, self.layers, sweep(self.layers)))

    def _exposed_of_all(self, crossing: Crossing, cut: Cut) -> float:
        """Of all prompts that stand for the load."""
        return sum(count * self.exposed_ms(crossing, tokens, cut) for tokens, count in crossing.prompts.items())

    def _break_even(self, crossing: Crossing, cut: Cut) -> int | None:
        """Of a cut by layers; chunks become more with the prompt."""
        if cut.chunk_tokens is not None or cut.layers == self.layers:
            return None

        def exposed(tokens: int, layers: int) -> float:
            return self.exposed_ms(crossing, tokens, Cut(layers))

        return break_even_tokens(exposed, cut.layers, self.layers, self.block_size)

    def _chunks(self, tokens: int, cut: Cut) -> tuple[list[float], list[float]]:
        """Of each chunk of what prefill computes: the tokens of the prompt at its end, and ns of all layers."""
        computed = tokens - self.assumptions.cached_tokens(tokens)
        lengths = chunk_lengths(max(1, round(computed)), cut.chunk_tokens)
        whole = self._prefill_ms(tokens) * 1e6
        if len(lengths) == 1:
            return [tokens], [whole]
        rounded = sum(lengths)
        done = [0, *accumulate(lengths)]
        marks = [tokens - computed + computed * part / rounded for part in done[:-1]] + [float(tokens)]
        if all(map(self.source.covers, marks)):
            return marks[1:], [self.source.between_ms(start, end) * 1e6 for start, end in pairwise(marks)]
        return marks[1:], [whole * length / rounded for length in lengths]

    def _prefill_ms(self, tokens: int) -> float:
        """Where the prefill's time is not known, which break-even may ask for, at the rate of the nearest known one."""
        ends = self.assumptions.cached_tokens(tokens), tokens
        known = tokens if all(map(self.source.covers, ends)) else min(self.known, key=lambda one: abs(one - tokens))
        return prompt_ms(self.source, self.assumptions, known) * tokens / known


def _span(sends: Sequence[Ready]) -> Span:
    sizes, counts = [send.bytes for send in sends], [send.descriptors for send in sends]
    return Span((min(sizes), max(sizes)), (min(counts), max(counts)))


@dataclass(frozen=True)
class MeasuredLink:
    """Transfers of rising (bytes, ns), two or more: between them, and below, a line. All of it keeps the next waiting.

    Which part of a transfer's fixed time a later send would hide is not known of single requests.
    """

    points: Sequence[tuple[float, float]]
    latency_ns: float = 0.0

    @property
    def reach(self) -> Span:
        """Descriptors are not looked at."""
        return Span((self.points[0][0], self.points[-1][0]))

    def holds_ns(self, size: float, descriptors: float) -> float:
        """Descriptors count as the bytes that came with them. Below the first point at least in proportion to it.

        Times that fall with the size are noise: beyond the points they fall no further.
        """
        (first_size, first_ns), (last_size, last_ns) = self.points[0], self.points[-1]
        on_line = on_the_line(self.points, size)
        if size < first_size:
            return min(first_ns, max(on_line, first_ns * size / first_size))
        return on_line if size <= last_size else max(on_line, last_ns)
