"""Time to first token of a load: how long requests wait for an engine of prefill, are prefilled, and cross a path.

An engine takes its part of the requests one after another, as they come, and so does each end of a path: a transfer
keeps the next one of its prefill engine waiting from its beginning on as long as that engine's links carry it, and the
next one of its decode engine, whoever sends that, as long as this one's do. One that waits for decode's end keeps
nobody off prefill's meanwhile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, cycle
from typing import NamedTuple

from kvxfer.cost.prefill_source import on_the_line

WORST_PERCENT = 99.0
LEAST_REQUESTS = 100
"""Of fewer the p99 is the longest."""


@dataclass(frozen=True)
class FirstTokens:
    """Milliseconds from a request's arrival to its first token; p99_ms is None of too few requests.

    p99_range_ms has the least and the most of single draws of the load; None of one alone.
    """

    mean_ms: float
    p99_ms: float | None
    p99_range_ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Replay:
    """Requests, by arrival, that `engines` of prefill took in turn, and sent to `decode` engines in turn.

    Of each the prompt in tokens, when it came, how long it waited for its engine, and when its prefill was done, in ms.
    senders are the engines of prefill that send to these. Where they are more than were replayed, as many stretches of
    the time stand for them, each for one: those of a load that is drawn know nothing of each other.
    """

    tokens: Sequence[int]
    arrived_ms: Sequence[float]
    waits_ms: Sequence[float]
    done_ms: Sequence[float]
    engines: int = 1
    senders: int = 1
    decode: int = 1


class OnThePath(NamedTuple):
    """What a prompt's first token waits for a path, and how long of that it keeps the next one off either end, in ms.

    The rest is latency: the next one is on its way already.
    """

    waits_ms: float
    prefill_ms: float
    decode_ms: float


def first_tokens(draws: Sequence[Sequence[float]]) -> FirstTokens:
    """Of the times in ms of each draw of a load; each has one request or more."""
    times = list(chain.from_iterable(draws))
    mean = sum(times) / len(times)
    if min(map(len, draws)) < LEAST_REQUESTS:
        return FirstTokens(mean, None)
    each = [_worst(draw) for draw in draws]
    return FirstTokens(mean, _worst(times), (min(each), max(each)) if len(each) > 1 else None)


def _worst(times: Sequence[float]) -> float:
    """Looks for the few that are as long or longer, and does not sort the others."""
    return nlargest(len(times) - math.ceil(WORST_PERCENT / 100 * len(times)) + 1, times)[-1]


def first_tokens_record(found: FirstTokens | None) -> dict[str, float | tuple[float, float] | None]:
    """The fields of the result file; null where not known."""
    if found is None:
        return {"first_token_mean_ms": None, "first_token_p99_ms": None, "first_token_p99_range_ms": None}
    return {
        "first_token_mean_ms": found.mean_ms,
        "first_token_p99_ms": found.p99_ms,
        "first_token_p99_range_ms": found.p99_range_ms,
    }


def replayed(
    requests: Sequence[tuple[float, int]],
    takes_ms: Mapping[int, float],
    engines: int = 1,
    senders: int = 1,
    decode: int = 1,
) -> Replay:
    """Of requests, (arrival in ms, prompt) by arrival; `takes_ms` is the prefill of each prompt."""
    free, waits, done = [0.0] * engines, [], []
    for engine, (arrived, tokens) in zip(cycle(range(engines)), requests, strict=False):
        wait = max(0.0, free[engine] - arrived)
        free[engine] = arrived + wait + takes_ms[tokens]
        waits.append(wait)
        done.append(free[engine])
    arrivals, prompts = [arrived for arrived, _ in requests], [tokens for _, tokens in requests]
    return Replay(prompts, arrivals, waits, done, engines, senders, decode)


def crossed(draws: Sequence[Replay], path: Mapping[int, OnThePath]) -> FirstTokens | None:
    """Of requests that cross a path, of each draw of a load; None without any.

    `path` tells it of some prompts, the shortest and the longest among them; between them a line is drawn.
    """
    if not draws or not path:
        return None
    lengths = sorted(path)
    lines = [[(tokens, path[tokens][field]) for tokens in lengths] for field in range(len(OnThePath._fields))]
    prompts = {tokens for draw in draws for tokens in draw.tokens}
    waits_ms, prefill_ms, decode_ms = ({tokens: on_the_line(line, tokens) for tokens in prompts} for line in lines)
    times = []
    for draw in draws:
        begun = _begun(draw, prefill_ms)
        if draw.senders > 1 or any(decode_ms[tokens] > prefill_ms[tokens] for tokens in prompts):
            begun = _at_decode(draw, begun, decode_ms)
        usable = map(operator.add, begun, map(waits_ms.__getitem__, draw.tokens))
        times.append(list(map(operator.sub, usable, draw.arrived_ms)))
    return first_tokens(times)


def _begun(draw: Replay, held_ms: Mapping[int, float]) -> list[float]:
    """When each transfer begins at prefill's end of its path, which it holds so long."""
    free, begun = [0.0] * draw.engines, []
    for engine, done, tokens in zip(cycle(range(draw.engines)), draw.done_ms, draw.tokens, strict=False):
        at = done if done > free[engine] else free[engine]
        free[engine] = at + held_ms[tokens]
        begun.append(at)
    return begun


def _at_decode(draw: Replay, begun: list[float], held_ms: Mapping[int, float]) -> list[float]:
    """When each begins at decode's end too, by when it did at prefill's, in order of that."""
    engines, at = draw.decode, begun
    if draw.senders > draw.engines:
        # The transfers of all stretches meet in one, of each engine of decode after the other's.
        stretch = draw.arrived_ms[-1] * draw.engines / draw.senders
        at = [one % stretch + number % engines * stretch for number, one in enumerate(begun)]
        engines = 1
    tokens, free, found = draw.tokens, [0.0] * min(engines, len(begun)), begun.copy()
    for number in sorted(range(len(begun)), key=at.__getitem__):
        engine, comes = number % engines, at[number]
        if free[engine] > comes:
            found[number] += free[engine] - comes
            comes = free[engine]
        free[engine] = comes + held_ms[tokens[number]]
    return found
