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
    """A prompt in tokens that arrived at an engine, and was prefilled, so many ms after the first one came."""

    tokens: int
    arrived_ms: float
    done_ms: float


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
        free = max(free, arrived) + takes_ms[tokens]
        found.append(Prefilled(tokens, arrived, free))
    return found


def crossed(queue: Sequence[Prefilled], path_ms: Mapping[int, float]) -> FirstTokens | None:
    """Of requests that cross a path one after another; None without any.

    `path_ms` tells of some prompts how long the first token waits for the path, which then is held; between them a
    line is drawn.
    """
    if not queue or not path_ms:
        return None
    points = sorted(path_ms.items())
    waits = {tokens: on_the_line(points, tokens) for tokens in {one.tokens for one in queue}}
    free, times = 0.0, []
    for one in queue:
        free = max(free, one.done_ms) + waits[one.tokens]
        times.append(free - one.arrived_ms)
    return first_tokens(times)
