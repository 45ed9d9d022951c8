"""The requests that a service is offered: prompt lengths, output lengths, when they arrive."""

from __future__ import annotations

import math
import operator
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

DRAWN = 10_000
"""Requests of a simulated load without timestamps."""

DRAWS = 5
"""Times that such a load is drawn: how far its percentiles are from one to the next is how sure they are."""

AT_ONCE_S = 1e-6
"""Requests that all come within so long have no rate."""

SEED = 20_250_101
"""Of what is drawn: the same load is simulated the same way every time."""


@dataclass(frozen=True)
class Load:
    """Requests in the order they arrive; `source` says where they come from, for a reader.

    prompts are tokens. outputs are tokens too, one for each request or one for all; empty when not known. arrivals_s
    are seconds from the first request on, empty when not known. rate is requests per second, None when not known; where
    it is given beside arrivals, they are stretched to it.
    """

    prompts: Sequence[int]
    source: str
    outputs: Sequence[float] = ()
    arrivals_s: Sequence[float] = ()
    rate: float | None = None

    def percentile(self, percent: float) -> int:
        """The shortest prompt that at least `percent` % of the prompts do not exceed."""
        return self._ordered[max(0, math.ceil(percent / 100 * len(self.prompts)) - 1)]

    @cached_property
    def mean_prompt(self) -> float:
        return sum(self.prompts) / len(self.prompts)

    @property
    def mean_output(self) -> float | None:
        return sum(self.outputs) / len(self.outputs) if self.outputs else None

    @cached_property
    def mean_decoding(self) -> float:
        """Tokens of a sequence, mean of those that decode at any moment, of whose answers half is there.

        Long answers are more of these than of the requests.
        """
        if len(self.outputs) != len(self.prompts) or not self.mean_output:
            return self.mean_prompt + (self.mean_output or 0) / 2
        halves = ((prompt + output / 2) * output for prompt, output in zip(self.prompts, self.outputs, strict=True))
        return sum(halves) / sum(self.outputs)

    @property
    def traced_rate(self) -> float | None:
        """Requests per second of the arrivals; None without any, or when all come at once."""
        span = self.arrivals_s[-1] - self.arrivals_s[0] if self.arrivals_s else 0.0
        return (len(self.arrivals_s) - 1) / span if span > AT_ONCE_S else None

    @property
    def requests_per_s(self) -> float | None:
        return self.traced_rate if self.rate is None else self.rate

    @cached_property
    def burstiness(self) -> float | None:
        """Coefficient of variation of the times between arrivals: 1 for independent ones, more for bursts."""
        if not self.traced_rate:
            return None
        gaps = array("d", map(operator.sub, islice(self.arrivals_s, 1, None), self.arrivals_s))
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    def standing(self, most: int) -> dict[int, int]:
        """Prompt lengths that stand for all, by rising length, and how many requests each.

        Where there are more than `most` lengths, neighbours stand together under their mean: so many that their share
        of the requests and that of the tokens are little, so that a few long prompts weigh what they do.
        """
        counted = Counter(self.prompts)
        if len(counted) <= most:
            return dict(sorted(counted.items()))
        share, group = 0.0, Counter[int]()
        found: Counter[int] = Counter()
        for prompt in sorted(counted):
            times = counted[prompt]
            own = times / len(self.prompts) * (1 + prompt / self.mean_prompt)
            if group and share + own > 4 / most:
                found[_mean(group)] += group.total()
                share, group = 0.0, Counter()
            share += own
            group[prompt] = times
        found[_mean(group)] += group.total()
        return dict(found)

    @cached_property
    def _ordered(self) -> list[int]:
        return sorted(self.prompts)

    def draws(self, instances: int = 1) -> list[list[tuple[float, int]]]:
        """What one of `instances` may get: a trace's requests, or else several that are drawn; needs a rate."""
        return [self.requests(instances, number) for number in range(1 if self.traced_rate else DRAWS)]

    def requests(self, instances: int = 1, number: int = 0) -> list[tuple[float, int]]:
        """Arrival in ms and prompt length of what one of `instances` gets; needs a rate.

        Those of a trace in turn. Without arrivals DRAWN requests come independently of each other (Poisson), their
        lengths drawn from the prompts; of each number always the same ones.
        """
        rate = self.requests_per_s
        assert rate is not None
        if self.traced_rate:
            stretch = self.traced_rate / rate * 1e3
            return [
                (arrival * stretch, prompt)
                for arrival, prompt in zip(self.arrivals_s[::instances], self.prompts[::instances], strict=True)
            ]
        mean_ms = instances / rate * 1e3
        return [(clock * mean_ms, prompt) for clock, prompt in self._drawn(number)]

    def _drawn(self, number: int) -> list[tuple[float, int]]:
        """Requests that are 1 apart in the mean, the same ones whoever gets them."""
        if number not in self._known_draws:
            draw, clock, drawn = random.Random(SEED + number).random, 0.0, []
            for _ in range(DRAWN):
                clock -= math.log(1.0 - draw())
                drawn.append((clock, self.prompts[int(draw() * len(self.prompts))]))
            self._known_draws[number] = drawn
        return self._known_draws[number]

    @cached_property
    def _known_draws(self) -> dict[int, list[tuple[float, int]]]:
        return {}

    def as_record(self) -> dict[str, Any]:
        """The result file's `plan.load`."""
        arrivals = "trace" if self.traced_rate else None if self.rate is None else "poisson"
        return {
            "source": self.source,
            "requests": len(self.prompts),
            "prompt_tokens": {
                "mean": self.mean_prompt,
                **{f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)},
                "max": max(self.prompts),
            },
            "output_tokens": self.mean_output,
            "requests_per_s": self.requests_per_s,
            "arrivals": arrivals,
            "burstiness": self.burstiness,
        }


def _mean(counted: Counter[int]) -> int:
    return round(sum(prompt * times for prompt, times in counted.items()) / counted.total())
