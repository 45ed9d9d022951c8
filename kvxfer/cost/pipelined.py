"""What stays exposed of a load's transfers when layers leave as they are computed: predicted, for a path of a plan.

The compute of a prompt is shared out evenly over the layers, and so are its bytes and descriptors. Every prompt is cut
alike, as an engine would: the best cut is the one that leaves least exposed of the load as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvxfer.cache.sends import Cut, chunk_lengths, sweep
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.pipeline import SAME, Carrier, by_chunks, exposed_ns, first_that_pays
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

    percent is the share of the load's exposed time in the prefill of the same prompts; median_ms and p99_ms are of
    those prompts, None where the path does not reach them. break_even_tokens is the shortest prompt at which the cut is
    no slower than serial: None where there is none, or the cut is serial or by chunks.
    """

    cut: str
    layers_per_send: int
    chunk_tokens: int | None
    percent: float
    median_ms: float | None
    p99_ms: float | None
    break_even_tokens: int | None
    prompts: Sequence[PipelinedPrompt]


@dataclass(frozen=True)
class Crossing:
    """One cache on one path: its bytes and descriptors by prompt length, and what carries them.

    prompts stand for the load, those that the path reaches; listed are those that are told one by one.
    """

    carrier: Carrier
    sizes: Callable[[int], int]
    pieces: Callable[[int], int]
    prompts: Sequence[int]
    median: int | None
    p99: int | None
    listed: Sequence[int]


@dataclass(frozen=True)
class Pipelining:
    """How a plan's prompts are to be cut (`cut` None: the best number of layers), and the compute they hide behind.

    `known` are prompts whose prefill the source knows, at least one.
    """

    cut: Cut | None
    known: Sequence[int]
    layers: int
    block_size: int
    source: PrefillSource
    assumptions: Assumptions

    def of(self, crossing: Crossing) -> Pipelined:
        """What is left exposed on a path."""
        cut = self.cut or self._best(crossing)

        def exposed(tokens: int | None) -> float | None:
            return None if tokens is None else self.exposed_ms(crossing, tokens, cut)

        whole = sum(self._exposed_of_all(crossing, cut))
        return Pipelined(
            cut=str(cut),
            layers_per_send=cut.layers,
            chunk_tokens=cut.chunk_tokens,
            percent=whole / sum(map(self._prefill_ms, crossing.prompts)) * 100,
            median_ms=exposed(crossing.median),
            p99_ms=exposed(crossing.p99),
            break_even_tokens=self._break_even(crossing, cut),
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
        """Of one prompt. Nothing where nothing moves."""
        size = crossing.sizes(tokens)
        if not size:
            return 0.0
        chunks = self._chunks(tokens, cut)
        sends = by_chunks(size, crossing.pieces(tokens), chunks, self.layers, cut.layers)
        return exposed_ns(sends, crossing.carrier, sum(ns for ns, _ in chunks)) / 1e6

    def _best(self, crossing: Crossing) -> Cut:
        """The number of layers that leaves least exposed of the load; all of them, which is serial, is one of these."""
        cuts = [Cut(layers) for layers in reversed(sweep(self.layers))]  # of equal ones that with the fewest sends
        best, least = cuts[0], sum(self._exposed_of_all(crossing, cuts[0]))
        for cut in cuts[1:]:
            exposed = sum(self._exposed_of_all(crossing, cut))
            if exposed < least * (1 - SAME):
                best, least = cut, exposed
        return best

    def _exposed_of_all(self, crossing: Crossing, cut: Cut) -> list[float]:
        """Of every prompt that stands for the load; equal ones are looked at once."""
        known = {tokens: self.exposed_ms(crossing, tokens, cut) for tokens in set(crossing.prompts)}
        return [known[tokens] for tokens in crossing.prompts]

    def _break_even(self, crossing: Crossing, cut: Cut) -> int | None:
        """Of a cut by layers; chunks become more with the prompt."""
        if cut.chunk_tokens is not None or cut.layers == self.layers:
            return None

        def pays(tokens: int) -> bool:
            serial = self.exposed_ms(crossing, tokens, Cut(self.layers))
            return self.exposed_ms(crossing, tokens, cut) <= serial * (1 + SAME)

        return first_that_pays(pays, self.block_size)

    def _chunks(self, tokens: int, cut: Cut) -> list[tuple[float, float]]:
        """Of each chunk of what prefill computes: ns of all layers, and its share of what moves."""
        computed = tokens - self.assumptions.cached_tokens(tokens)
        lengths = chunk_lengths(max(1, round(computed)), cut.chunk_tokens)
        if len(lengths) == 1:
            return [(self._prefill_ms(tokens) * 1e6, 1.0)]
        starts = [
            tokens - computed + computed * sum(lengths[:count]) / sum(lengths) for count in range(len(lengths) + 1)
        ]
        whole = self._prefill_ms(tokens) * 1e6
        shares = [length / sum(lengths) for length in lengths]
        if all(map(self.source.covers, starts)):
            return [
                (self.source.between_ms(start, end) * 1e6, share)
                for (start, end), share in zip(pairwise(starts), shares, strict=True)
            ]
        return [(whole * share, share) for share in shares]

    def _prefill_ms(self, tokens: int) -> float:
        """Where the prefill's time is not known, which break-even may ask for, at the rate of the nearest known one."""
        ends = self.assumptions.cached_tokens(tokens), tokens
        known = tokens if all(map(self.source.covers, ends)) else min(self.known, key=lambda one: abs(one - tokens))
        return prompt_ms(self.source, self.assumptions, known) * tokens / known


@dataclass(frozen=True)
class MeasuredLink:
    """Transfers of rising (bytes, ns), two or more: between them, and below, a line. All of it keeps the next waiting.

    Which part of a transfer's fixed time a later send would hide is not known of single requests.
    """

    points: Sequence[tuple[float, float]]
    latency_ns: float = 0.0

    def holds_ns(self, size: float, descriptors: float) -> float:
        """Descriptors count as the bytes that came with them. Below the first point at least in proportion to it."""
        first_size, first_ns = self.points[0]
        on_line = on_the_line(self.points, size)
        return on_line if size >= first_size else max(on_line, first_ns * size / first_size)
