"""What prefill does to decode when both run in one engine: the stall of a prompt, of a chunk, and of a whole load.

The load is simulated request by request, as a sequence sees it that decodes all the time:

- Without chunks decode steps follow each other until a prompt has arrived during one; then every waiting prompt is
  prefilled, and the sequence's next token comes only after that. The stall lies between two tokens.
- With chunks every decode step takes up to a chunk's tokens of the oldest waiting prompts along, and lasts so much
  longer: what the last of one prompt leaves of a step the next ones have that wait as it begins.

A stall is time beyond the decode step between two tokens; its percentiles are over all pairs of successive tokens.
The work of a chunk is added to the step's, as if neither hid in the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
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
    of them full) takes; from 1 on the load is more than this can take, and what grows without end is None.
    stalled is the share of pairs of tokens with a stall between them. first_tokens are those of the load's requests,
    None where these wait ever longer. A load without timestamps is drawn several times: the figures are of all draws
    together, and itl_p99_range_ms has the least and the most of each draw's own p99; None for one alone.
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
        _Engine(source.covers, between_ms, assumptions, step_ms, requests, rate / instances / 1e3)
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
        first_tokens=first_tokens([draw.first_ms for draw in draws]) if busy < 1 else None,
        itl_p99_range_ms=(min(each), max(each)) if len(each) > 1 else None,
    )


def _longest_ms(source: PrefillSource, cached: float, tokens: int, chunk: int) -> float:
    """The last full chunk of a prompt attends to most; a prompt that is no longer than one is its own."""
    if tokens - cached <= chunk:
        return source.between_ms(cached, tokens)
    return source.between_ms(tokens - chunk, tokens)


class _Run(NamedTuple):
    """The steps that the rest of a prompt takes from the beginning of one on: `full` ones with nothing else, which take
    lead_ms, and one in which it computes for last_ms and leaves `left` tokens to others.
    """

    full: int
    lead_ms: float
    last_ms: float
    left: float


@dataclass(frozen=True)
class _Steps:
    """Steps with the last tokens of a prompt, by their stall; full ones with none, those of whole chunk n beyond those
    of n - 1 (`begun`); steps without a prompt; and ms to first tokens.
    """

    last: Counter[float]
    begun: Counter[int]
    free: int
    first_ms: Sequence[float]


@dataclass(frozen=True)
class _Engine:
    """One engine and the requests that it gets, (arrival in ms, prompt) by arrival, `per_ms` of them on average."""

    covers: Callable[[float], bool]
    between_ms: Callable[[float, float], float]
    assumptions: Assumptions
    step_ms: float
    requests: Sequence[tuple[float, int]]
    per_ms: float

    def whole(self) -> _Simulated:
        times = {prompt: self.between_ms(start, prompt) for prompt, start in self._starts.items()}
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
        """Only steps in which a prompt ends are looked at one by one. Full ones take what the chunk of a prompt takes
        that begins at the multiple of `chunk` before, so that prompts of all lengths share their times.
        """
        steps = self._steps(chunk)
        stalls, running = Counter(steps.last), 0
        for number in range(max(steps.begun, default=0)):
            running += steps.begun[number]
            stalls[self.between_ms(number * chunk, (number + 1) * chunk)] += running
        stalls[0.0] += steps.free
        full_ms = {
            prompt: self.between_ms(start, prompt) + (prompt - start) / chunk * self.step_ms
            for prompt, start in self._starts.items()
        }
        return _Simulated(self._busy(full_ms), stalls, steps.first_ms)

    def _run(self, start: float, prompt: int, chunk: int) -> _Run:
        full = math.ceil((prompt - start) / chunk) - 1
        last = start + full * chunk
        lead_ms = self.between_ms(start, last) + full * self.step_ms if full else 0.0
        return _Run(full, lead_ms, self.between_ms(last, prompt), chunk - (prompt - last))

    def _steps(self, chunk: int) -> _Steps:
        """The requests one after another."""
        step_ms, starts, between_ms = self.step_ms, self._starts, self.between_ms
        runs = {prompt: self._run(start, prompt, chunk) for prompt, start in starts.items()}
        last: list[float] = []
        first: list[float] = []
        waiting: list[float] = []
        begun = Counter[int]()
        clock = at = self.requests[0][0]  # at is the last step that is laid out, which `waiting` ones end in
        free, stall, room = 0, 0.0, 0.0
        for arrival, prompt in self.requests:
            start = starts[prompt]
            joins = room > 0 and arrival <= at
            if joins and prompt - start <= room:
                stall += between_ms(start, prompt)
                room -= prompt - start
                waiting.append(arrival)
                continue
            joins = joins and self.covers(start + room)
            run = runs[prompt]
            if joins:
                stall += between_ms(start, start + room)
                start += room
                run = self._run(start, prompt, chunk)
            if waiting:
                clock = at + step_ms + stall
                last.append(stall)
                first += [clock - one for one in waiting]
            if arrival > clock:
                steps = math.ceil((arrival - clock) / step_ms)
                free += steps
                clock += steps * step_ms
            if run.full:
                number = int(start // chunk)
                begun[number] += 1
                begun[number + run.full] -= 1
            at, stall, room, waiting = clock + run.lead_ms, run.last_ms, run.left, [arrival]
        clock = at + step_ms + stall
        first += [clock - one for one in waiting]
        return _Steps(Counter([*last, stall]), begun, free + self._free_after(clock), first)

    def _free_after(self, clock: float) -> int:
        """Decode steps after the last request, until at their mean rate the next one would come."""
        until = self.requests[0][0] + len(self.requests) / self.per_ms
        return max(0, math.floor((until - clock) / self.step_ms))

    @cached_property
    def _counted(self) -> Counter[int]:
        return Counter(prompt for _, prompt in self.requests)

    @cached_property
    def _starts(self) -> dict[int, float]:
        """Behind what the prefix cache holds."""
        return {prompt: self.assumptions.cached_tokens(prompt) for prompt in self._counted}

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
