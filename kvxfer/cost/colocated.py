"""What prefill does to decode when both run in one engine: the stall of a prompt, of a chunk, and of a whole load.

The load is simulated request by request, as a sequence sees it that decodes all the time:

- Without chunks decode steps follow each other until a prompt has arrived during one; then every waiting prompt is
  prefilled, and the sequence's next token comes only after that. The stall lies between two tokens.
- With chunks every decode step takes a chunk of the oldest waiting prompt along, and lasts so much longer. The step of
  a prompt's last chunk takes the next ones along too, where they wait as it begins and fit into what is left of it.

A stall is time beyond the decode step between two tokens; its percentiles are over all pairs of successive tokens.
A prompt that does not fit into what is left of a step begins with the next one, so that long queues of prompts of more
than half a chunk look worse than they are; the work of a chunk is added to the step's, as if neither hid in the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.first_token import FirstTokens, first_tokens, first_tokens_record
from kvxfer.cost.load import Load
from kvxfer.cost.prefill_source import PrefillSource

WORST_PERCENT = 99.0


@dataclass(frozen=True)
class Mode:
    """One way to run prefill and decode together, and what the load does to it.

    chunk_tokens is None for whole prompts. busy is the share of time that prefill (with chunks: their steps, were all
    prompts there at once) takes; from 1 on the load is more than this can take, and what grows without end is None.
    stalled is the share of pairs of tokens with a stall between them. first_tokens are those of the load's requests,
    None where these wait ever longer. A load without timestamps is drawn several times: the figures are of all draws
    together, those of first_tokens of the first, and itl_p99_range_ms has the least and the most of each draw's own
    p99; None for one alone.
    """

    chunk_tokens: int | None
    busy: float
    stalled: float | None
    stall_mean_ms: float | None
    stall_p99_ms: float | None
    stall_max_ms: float | None
    itl_p99_ms: float | None
    first_tokens: FirstTokens | None = None
    itl_p99_range_ms: tuple[float, float] | None = None

    @property
    def overloaded(self) -> bool:
        return self.busy >= 1

    def as_record(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["first_tokens"]
        return fields | {"overloaded": self.overloaded} | first_tokens_record(self.first_tokens)


def stall_rows(
    sources: Sequence[PrefillSource], tokens: Sequence[int], chunks: Sequence[int], assumptions: Assumptions
) -> list[dict[str, Any]]:
    """How long decode stands still for one prompt, by length and source: whole, and for the longest of its chunks.

    A chunk that a source does not cover is left out.
    """
    return [
        {
            "tokens": count,
            "basis": source.basis,
            "prompt_ms": source.between_ms(assumptions.cached_tokens(count), count),
            "chunks": [
                {"chunk_tokens": chunk, "stall_ms": _longest_ms(source, assumptions.cached_tokens(count), count, chunk)}
                for chunk in chunks
                if source.covers(min(chunk, count)) and source.covers(count - chunk)
            ],
        }
        for count in tokens
        for source in sources
    ]


def simulate(
    source: PrefillSource,
    load: Load,
    instances: int,
    step_ms: float,
    chunks: Sequence[int],
    assumptions: Assumptions,
) -> list[Mode]:
    """What one of `instances` engines does under its part of the load: with whole prompts, then with each chunk size.

    The load needs a rate. Chunk sizes that the source does not cover are left out.
    """
    rate = load.requests_per_s
    assert rate is not None
    between_ms = cache(source.between_ms)  # every draw has the same chunks
    engines = [
        _Engine(between_ms, assumptions, step_ms, requests, rate / instances / 1e3)
        for requests in load.draws(instances)
    ]
    modes = [_mode(None, step_ms, [engine.whole() for engine in engines])]
    unknown = chunks_not_known(source, load, chunks)
    for chunk in chunks:
        if chunk not in unknown:
            modes.append(_mode(chunk, step_ms, [engine.chunked(chunk) for engine in engines]))
    return modes


def chunks_not_known(source: PrefillSource, load: Load, chunks: Sequence[int]) -> list[int]:
    """The sizes whose prefill the source does not know; a chunk is no longer than the longest prompt."""
    longest = load.percentile(100)
    return [chunk for chunk in chunks if not source.covers(min(chunk, longest))]


@dataclass(frozen=True)
class _Simulated:
    """Of one draw: how busy the engine is, the stalls between successive tokens, and ms to each first token."""

    busy: float
    stalls: Counter[float]
    first_ms: Sequence[float]


def _mode(chunk: int | None, step_ms: float, draws: Sequence[_Simulated]) -> Mode:
    busy = sum(draw.busy for draw in draws) / len(draws)
    if busy >= 1 and chunk is None:
        return Mode(chunk, busy, None, None, None, None, None)
    stalls: Counter[float] = Counter()
    for draw in draws:
        stalls.update(draw.stalls)
    tokens = sum(stalls.values())
    worst = _percentile(stalls, WORST_PERCENT)
    each = [step_ms + _percentile(draw.stalls, WORST_PERCENT) for draw in draws]
    return Mode(
        chunk_tokens=chunk,
        busy=busy,
        stalled=1 - stalls[0.0] / tokens,
        stall_mean_ms=sum(stall * count for stall, count in stalls.items()) / tokens,
        stall_p99_ms=worst,
        stall_max_ms=max(stall for stall, count in stalls.items() if count),
        itl_p99_ms=step_ms + worst,
        first_tokens=first_tokens(draws[0].first_ms) if busy < 1 else None,
        itl_p99_range_ms=(min(each), max(each)) if len(each) > 1 else None,
    )


def _longest_ms(source: PrefillSource, cached: float, tokens: int, chunk: int) -> float:
    """The last full chunk of a prompt attends to most; a prompt that is no longer than one is its own."""
    if tokens - cached <= chunk:
        return source.between_ms(cached, tokens)
    return source.between_ms(tokens - chunk, tokens)


@dataclass(frozen=True)
class _Parts:
    """A prompt of so many tokens to compute, chunk by chunk.

    first_ms is up to the first multiple of the chunk size (0: it begins at one), inner are the numbers of whole chunks,
    and last_ms is what remains, beside which there are `left` tokens in the same step for others.
    """

    tokens: float
    first_ms: float
    inner: range
    last_ms: float
    left: float


class _Cut(NamedTuple):
    """A prompt of so many tokens to compute: ms of the steps before its last one, of its part of that, and of all of it
    where it joins the last step of another. `left` tokens of its own last step are others'.
    """

    tokens: float
    lead_ms: float
    last_ms: float
    left: float
    joined_ms: float


@dataclass(frozen=True)
class _Steps:
    """The prompts that begin steps of their own, the stalls of their last ones, steps without, ms to first tokens."""

    own: Counter[int]
    last: Counter[float]
    free: int
    first_ms: Sequence[float]


@dataclass(frozen=True)
class _Engine:
    """One engine and the requests that it gets, (arrival in ms, prompt) by arrival, `per_ms` of them on average."""

    between_ms: Callable[[float, float], float]
    assumptions: Assumptions
    step_ms: float
    requests: Sequence[tuple[float, int]]
    per_ms: float

    def whole(self) -> _Simulated:
        times = {prompt: self.between_ms(self._cached(prompt), prompt) for prompt in self._counted}
        stalls: Counter[float] = Counter()
        requests, step_ms = self.requests, self.step_ms
        clock, index = requests[0][0], 0
        first: list[float] = []
        while index < len(requests):
            steps = max(1, math.ceil((requests[index][0] - clock) / step_ms))
            stalls[0.0] += steps - 1
            clock += steps * step_ms
            stall = 0.0
            while index < len(requests) and requests[index][0] <= clock + stall:
                stall += times[requests[index][1]]
                first.append(clock + stall - requests[index][0])
                index += 1
            stalls[stall] += 1
            clock += stall
        stalls[0.0] += self._free_after(clock)
        return _Simulated(self._busy(times), stalls, first)

    def chunked(self, chunk: int) -> _Simulated:
        """Chunks begin at multiples of `chunk`, so that prompts of all lengths share the times of all but their ends.

        Which of these there are follows from the prompts that begin a step of their own; only their last steps, which
        others may join, are looked at one by one.
        """
        parts = {prompt: self._parts(prompt, chunk) for prompt in self._counted}
        inner = max(part.inner.stop for part in parts.values())
        each = [self.between_ms(number * chunk, (number + 1) * chunk) for number in range(inner)]
        sums = [0.0, *accumulate(each)]
        cuts = {prompt: self._cut(part, sums) for prompt, part in parts.items()}
        steps = self._steps(cuts)
        stalls, begun = Counter(steps.last), Counter[int]()  # begun: inner chunks more than of the number before
        for prompt, count in steps.own.items():
            part = parts[prompt]
            begun[part.inner.start] += count
            begun[part.inner.stop] -= count
            if part.first_ms:
                stalls[part.first_ms] += count
        running = 0
        for number, stall in enumerate(each):
            running += begun[number]
            stalls[stall] += running
        stalls[0.0] += steps.free
        return _Simulated(self._full_ms(cuts) / len(self.requests) * self.per_ms, stalls, steps.first_ms)

    def _cut(self, part: _Parts, sums: Sequence[float]) -> _Cut:
        before_ms = part.first_ms + sums[part.inner.stop] - sums[part.inner.start]
        steps = len(part.inner) + (part.first_ms > 0)
        return _Cut(part.tokens, before_ms + steps * self.step_ms, part.last_ms, part.left, before_ms + part.last_ms)

    def _full_ms(self, cuts: Mapping[int, _Cut]) -> float:
        """What all steps with a chunk would take were all prompts there at once."""
        total, room = 0.0, 0.0
        for _, prompt in self.requests:
            tokens, lead_ms, last_ms, left, joined_ms = cuts[prompt]
            if tokens <= room:
                total += joined_ms
                room -= tokens
            else:
                total += lead_ms + self.step_ms + last_ms
                room = left
        return total

    def _steps(self, cuts: Mapping[int, _Cut]) -> _Steps:
        """The requests one after another."""
        step_ms = self.step_ms
        own: list[int] = []
        last: list[float] = []
        first: list[float] = []
        waiting: list[float] = []
        clock = begun = self.requests[0][0]  # begun is the last step of a prompt, which `waiting` ones take part in
        free, stall, room = 0, 0.0, 0.0
        for arrival, prompt in self.requests:
            tokens, lead_ms, last_ms, left, joined_ms = cuts[prompt]
            if tokens <= room and arrival <= begun:
                stall += joined_ms
                room -= tokens
                waiting.append(arrival)
                continue
            if waiting:
                clock = begun + step_ms + stall
                last.append(stall)
                first += [clock - one for one in waiting]
            if arrival > clock:
                steps = math.ceil((arrival - clock) / step_ms)
                free += steps
                clock += steps * step_ms
            own.append(prompt)
            begun, stall, room, waiting = clock + lead_ms, last_ms, left, [arrival]
        clock = begun + step_ms + stall
        first += [clock - one for one in waiting]
        return _Steps(Counter(own), Counter([*last, stall]), free + self._free_after(clock), first)

    def _free_after(self, clock: float) -> int:
        """Decode steps after the last request, until at their mean rate the next one would come."""
        until = self.requests[0][0] + len(self.requests) / self.per_ms
        return max(0, math.floor((until - clock) / self.step_ms))

    def _parts(self, prompt: int, chunk: int) -> _Parts:
        start = self._cached(prompt)
        first, last = math.ceil(start / chunk), (prompt - 1) // chunk
        if first > last:
            return _Parts(prompt - start, 0.0, range(0), self.between_ms(start, prompt), chunk - (prompt - start))
        first_ms = self.between_ms(start, first * chunk) if start < first * chunk else 0.0
        last_ms = self.between_ms(last * chunk, prompt)
        return _Parts(prompt - start, first_ms, range(first, last), last_ms, chunk - (prompt - last * chunk))

    @cached_property
    def _counted(self) -> Counter[int]:
        return Counter(prompt for _, prompt in self.requests)

    def _cached(self, prompt: int) -> float:
        return self.assumptions.cached_tokens(prompt)

    def _busy(self, taken: Mapping[int, float]) -> float:
        """The share of time that the requests take, by the ms of one of each length."""
        total = sum(taken[prompt] * count for prompt, count in self._counted.items())
        return total / len(self.requests) * self.per_ms


def _percentile(stalls: Counter[float], percent: float) -> float:
    """The least stall that so many % of the pairs of tokens do not exceed."""
    within, wanted = 0, percent / 100 * sum(stalls.values())
    for stall in sorted(stalls):
        within += stalls[stall]
        if within >= wanted:
            return stall
    return 0.0
