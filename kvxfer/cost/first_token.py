"""Time to first token of a load: how long requests wait for an engine of prefill, are prefilled, and cross a path.

One engine is replayed, first come first served, on its part of the requests, as colocated engines are. In a split the
transfers of one prefill engine wait for each other as well; those of several engines to one of decode do not, here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvxfer.cost.prefill_source import on_the_line

WORST_PERCENT = 99.0
LEAST_REQUESTS = 100
"""Of fewer the p99 is the longest."""


@dataclass(frozen=True)
class FirstTokens:
    """Milliseconds from a request's arrival to its first token; p99_ms is None of too few requests."""

    mean_ms: float
    p99_ms: float | None


@dataclass(frozen=True)
class Prefilled:
    """A prompt in tokens: when it arrived at an engine, and when its prefill began and was done, in ms of one clock."""

    tokens: int
    arrived_ms: float
    begun_ms: float
    done_ms: float

    @property
    def wait_ms(self) -> float:
        """For the engine."""
        return self.begun_ms - self.arrived_ms


@dataclass(frozen=True)
class OnThePath:
    """What a prompt's first token waits for a path, and how long of that it keeps the next one off it, in ms.

    The rest is latency: the next one is on its way already.
    """

    waits_ms: float
    holds_ms: float


def first_tokens(times_ms: Sequence[float]) -> FirstTokens:
    """Of one request or more."""
    ordered = sorted(times_ms)
    enough = len(ordered) >= LEAST_REQUESTS
    worst = ordered[math.ceil(WORST_PERCENT / 100 * len(ordered)) - 1] if enough else None
    return FirstTokens(sum(ordered) / len(ordered), worst)


def first_tokens_record(found: FirstTokens | None) -> dict[str, float | None]:
    """The fields of the result file; null where not known."""
    if found is None:
        return {"first_token_mean_ms": None, "first_token_p99_ms": None}
    return {"first_token_mean_ms": found.mean_ms, "first_token_p99_ms": found.p99_ms}


def prefilled(requests: Sequence[tuple[float, int]], takes_ms: Mapping[int, float]) -> list[Prefilled]:
    """What one engine makes of its requests, (arrival in ms, prompt) by arrival; `takes_ms` is the prefill of each."""
    free, found = 0.0, []
    for arrived, tokens in requests:
        begun = max(free, arrived)
        free = begun + takes_ms[tokens]
        found.append(Prefilled(tokens, arrived, begun, free))
    return found


def crossed(queue: Sequence[Prefilled], path: Mapping[int, OnThePath]) -> FirstTokens | None:
    """Of requests that cross a path one after another; None without any.

    `path` tells it of some prompts, the shortest and the longest among them; between them a line is drawn.
    """
    if not queue or not path:
        return None
    lengths = sorted(path)
    waits = [(tokens, path[tokens].waits_ms) for tokens in lengths]
    holds = [(tokens, path[tokens].holds_ms) for tokens in lengths]
    of_prompt = {
        tokens: (on_the_line(waits, tokens), on_the_line(holds, tokens)) for tokens in {one.tokens for one in queue}
    }
    free, times = 0.0, []
    for one in queue:
        waits_ms, holds_ms = of_prompt[one.tokens]
        begun = max(free, one.done_ms)
        free = begun + holds_ms
        times.append(begun + waits_ms - one.arrived_ms)
    return first_tokens(times)
