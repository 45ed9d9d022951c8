"""Where the time of a prefill comes from, always named: assumed arithmetic, the user's measurement, or layers computed.

Every source answers one question, how long the tokens from `start` to `end` of a prompt take when the earlier ones are
in the cache. A whole prompt is 0 … N, one with a prefix-cache hit h·N … N, and a chunk of it k·C … (k+1)·C.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.prefill import attention_flop, attention_formula, linear_flop, prefill_ms
from kvxfer.errors import UsageError
from kvxfer.model.shape import ModelShape
from kvxfer.wording import digits

GIVEN = "given"
"""The basis of what the user measured."""

LAYERS = "layers"
"""The basis of real layers that were computed here."""


class PrefillSource(Protocol):
    """`basis` names it in tables: seed, full, given or layers."""

    @property
    def basis(self) -> str: ...

    def named(self) -> str:
        """What it is and where it comes from, as a reader of a figure should see it."""

    def covers(self, tokens: float) -> bool:
        """Whether it knows the time of a prompt of that length."""

    def between_ms(self, start: float, end: float) -> float:
        """Milliseconds for tokens start … end of a prompt. Raises UsageError outside what it covers."""


@dataclass(frozen=True)
class AssumedPrefill:
    """2 · params FLOP per token, and with `attention` the attention of that shape, at the rate that is assumed."""

    basis: str
    params: float
    attention: ModelShape | None
    gpus: int
    eff_tflops: float

    def named(self) -> str:
        terms = "" if self.attention is None else attention_formula(self.attention)
        formula = f"2·{self.params / 1e9:.4g}e9·N" + (f" + {terms}" if terms else "")
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        formula = formula if self.attention is None else f"({formula})"
        return f"assumed: {formula} FLOP on {gpus} at {self.eff_tflops:g} TFLOP/s each"

    def covers(self, tokens: float) -> bool:
        return True

    def between_ms(self, start: float, end: float) -> float:
        flop = linear_flop(self.params, end - start)
        if self.attention is not None:
            flop += attention_flop(self.attention, end, start)
        return prefill_ms(flop, self.gpus, self.eff_tflops)


@dataclass(frozen=True)
class PrefillRate:
    """A throughput that the user measured, the same at every length."""

    tokens_per_s: float
    basis: str = GIVEN

    def named(self) -> str:
        return f"given: {digits(self.tokens_per_s, 6)} tokens/s (--prefill-tokens-per-s)"

    def covers(self, tokens: float) -> bool:
        return True

    def between_ms(self, start: float, end: float) -> float:
        return (end - start) / self.tokens_per_s * 1e3


@dataclass(frozen=True)
class PrefillTimes:
    """Times that the user measured of whole prompts: (tokens, ms) by rising length, a line drawn between two points.

    Outside the points there is no time, unless `extrapolate`: then the first one's rate holds below, and the slope of
    the last two (of a single point its rate) above.
    """

    points: Sequence[tuple[int, float]]
    file: str
    extrapolate: bool = False
    basis: str = GIVEN

    def named(self) -> str:
        beyond = ", extrapolated beyond" if self.extrapolate else ""
        return f"given: {len(self.points)} lengths of {self.range} tokens in {self.file} (--prefill-csv){beyond}"

    @property
    def range(self) -> str:
        return f"{self.points[0][0]:,} … {self.points[-1][0]:,}"

    def covers(self, tokens: float) -> bool:
        return self.extrapolate or tokens <= 0 or self.points[0][0] <= tokens <= self.points[-1][0]

    def between_ms(self, start: float, end: float) -> float:
        return self._whole_ms(end) - self._whole_ms(start)

    def _whole_ms(self, tokens: float) -> float:
        if tokens <= 0:
            return 0.0
        if not self.covers(tokens):
            raise UsageError(
                f"a prefill of {digits(tokens, 6)} token{'s' * (tokens != 1)} is outside the {self.range} tokens of "
                f"{self.file}; measure it too, ask for lengths within, or say --prefill-extrapolate"
            )
        return on_the_line([(0, 0.0), *self.points], tokens)


@dataclass(frozen=True)
class PrefillHere:
    """Real layers, computed here over prompts of just these lengths: ms by tokens, less what the prefix cache holds."""

    prompt_ms: Mapping[int, float]
    source: str
    basis: str = LAYERS

    def named(self) -> str:
        return f"measured here: {self.source}"

    def covers(self, tokens: float) -> bool:
        return tokens in self.prompt_ms

    def between_ms(self, start: float, end: float) -> float:
        """Of what was computed of a prompt that ends there; where that began it is not asked."""
        if int(end) not in self.prompt_ms:
            raise UsageError(f"the prefill of {digits(end, 6)} tokens was not measured here; name them with --tokens")
        return self.prompt_ms[int(end)]


def prefill_sources(
    shape: ModelShape, assumptions: Assumptions, *measured: PrefillSource | None
) -> list[PrefillSource]:
    """`seed` and `full`, as far as the parameters are known, and then what was measured; None: it was not.

    Raises UsageError when fewer parameters are assumed active than the embedding tables alone hold.
    """
    gpus, eff_tflops = assumptions.gpus, assumptions.eff_tflops
    sources: list[PrefillSource] = []
    if (seed := assumptions.seed_params(shape)) is not None:
        sources.append(AssumedPrefill("seed", seed[0], None, gpus, eff_tflops))
    if (full := assumptions.full_params(shape)) is not None:
        sources.append(AssumedPrefill("full", _without_embedding(shape, *full), shape, gpus, eff_tflops))
    return [*sources, *(one for one in measured if one is not None)]


def prompt_ms(source: PrefillSource, assumptions: Assumptions, tokens: int) -> float:
    """Milliseconds of what prefill computes of a prompt: all but what its prefix cache holds.

    Raises UsageError where that takes no time, beside which nothing can be set.
    """
    cached = assumptions.cached_tokens(tokens)
    milliseconds = source.between_ms(cached, tokens)
    if milliseconds <= 0:
        raise UsageError(
            f"the last {digits(tokens - cached, 6)} of {tokens:,} tokens take no time by {source.named()}; give times "
            "that rise with the length"
        )
    return milliseconds


def _without_embedding(shape: ModelShape, active: float, source: str) -> float:
    """Active parameters that work on every token of a prompt; where the tables are not known none are taken off."""
    working = active - (shape.params_embedding or 0)
    if working <= 0:
        raise UsageError(
            f"{source} {active:g} is not more than the embedding tables of {shape.name} alone "
            f"({shape.params_embedding:,}); give all active parameters, embedding included"
        )
    return working


def on_the_line(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` on the lines through points of rising x; the last line goes on. One point is its value."""
    if len(points) == 1:
        return points[0][1]
    above = min(max(1, bisect_left(points, at, key=lambda point: point[0])), len(points) - 1)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
