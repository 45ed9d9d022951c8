"""What of a transfer stays exposed when its segments leave as they are computed; from bytes, descriptors and a link.

A link carries one send after another. Each holds it for `occupancy + per_descriptor · descriptors + bytes / bandwidth`
and is usable `latency` later, a time in which the next one is already on its way. So a send waits for its compute, then
for those before it; what is left of the last one when compute ends is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from kvxfer.cache.leaving import Weight
from kvxfer.wording import told_requests

LONGEST_PROMPT = 100_000_000
SAME = 1e-9
"""Relative difference below which two predicted times are the same."""


@dataclass(frozen=True)
class Span:
    """Transfers by the least and the most of their bytes and descriptors; None: of any number."""

    bytes: tuple[float, float]
    descriptors: tuple[float, float] | None = None

    def has(self, size: float, descriptors: float) -> bool:
        if self.descriptors is not None and not self.descriptors[0] <= descriptors <= self.descriptors[1]:
            return False
        return self.bytes[0] <= size <= self.bytes[1]

    def __str__(self) -> str:
        return told_requests(self.bytes, self.descriptors)


class Carrier(Protocol):
    """What carries one send after another."""

    @property
    def latency_ns(self) -> float:
        """From a send's end to when it is usable, with the next one on its way already."""

    @property
    def reach(self) -> Span | None:
        """What was measured of it, beyond which it is extrapolated; None: it is assumed, of every size alike."""

    def holds_ns(self, size: float, descriptors: float) -> float:
        """How long a send of so many bytes keeps the next one waiting."""


@dataclass(frozen=True)
class Link:
    """α as `latency_ns` (hidden by what follows) and `occupancy_ns` (not hidden), γ in ns per descriptor, β in GB/s.

    reach: the sends that it was measured with; None: it is assumed.
    """

    latency_ns: float
    occupancy_ns: float
    gbyte_s: float
    per_descriptor_ns: float = 0.0
    reach: Span | None = None

    def holds_ns(self, size: float, descriptors: float) -> float:
        return self.occupancy_ns + self.per_descriptor_ns * descriptors + size / self.gbyte_s

    def alone_ns(self, size: float, descriptors: float) -> float:
        """A send with nothing beside it."""
        return self.latency_ns + self.holds_ns(size, descriptors)


@dataclass(frozen=True)
class Ready:
    """A send of so many bytes and descriptors that is computed `at_ns` after the request's start."""

    at_ns: float
    bytes: float
    descriptors: float = 0.0


def usable_ns(sends: Sequence[Ready], link: Carrier) -> list[float]:
    """When each send is usable, from the request's start; they go in the order given."""
    free, found = 0.0, []
    for send in sends:
        free = max(free, send.at_ns) + link.holds_ns(send.bytes, send.descriptors)
        found.append(free + link.latency_ns)
    return found


def exposed_ns(sends: Sequence[Ready], link: Carrier, compute_ns: float) -> float:
    """How much later than the end of compute the last byte, which is the last send's, is usable; never below zero."""
    return max(0.0, usable_ns(sends, link)[-1] - compute_ns) if sends else 0.0


def computed_sends(chunks: Sequence[tuple[float, Sequence[Weight]]], after: Sequence[int]) -> list[Ready]:
    """The sends over one link of a prompt that is computed chunk by chunk, and there layer by layer.

    `chunks` are (ns of all layers, what each send weighs). They leave `after` so many layers of a chunk, the last of
    them after all. The compute of a chunk is shared out evenly over the layers; pipeline stages have theirs one after
    another. What has no bytes is not sent.
    """
    begin, found = 0.0, []
    for ns, weights in chunks:
        for layers, (size, descriptors) in zip(after, weights, strict=True):
            if size:
                found.append(Ready(begin + ns * layers / after[-1], size, descriptors))
        begin += ns
    return found


def best_layers(exposed: Callable[[int], float], layers: int, choices: Iterable[int]) -> int:
    """Layers per send with the least exposed time, by `exposed`; all layers at once is always among the choices.

    Of several that are the same, the one with the fewest sends.
    """
    best, least = layers, exposed(layers)
    for together in sorted(choices, reverse=True):
        found = exposed(together)
        if found < least * (1 - SAME):
            best, least = together, found
    return best


def fit_link(size: float, alone: Sequence[tuple[int, float]], part: tuple[float, float]) -> Link:
    """The link that explains transfers without compute.

    `alone`: (sends, ns) of the same bytes cut into different numbers of sends; `part`: (bytes, ns) of one send of fewer
    bytes. Sends cost their occupancy, bytes their bandwidth, and what is left of a single send is latency. Pieces are
    not told from bytes: those of one request grow with them.
    """
    slopes = [
        (later - earlier) / (many - few)
        for i, (few, earlier) in enumerate(alone)
        for many, later in alone[i + 1 :]
        if many != few
    ]
    occupancy = max(0.0, median(slopes)) if slopes else 0.0
    whole = max(1.0, median(ns - count * occupancy for count, ns in alone))  # latency and all bytes
    part_bytes, part_ns = part
    rest = whole - (part_ns - occupancy)  # the bytes that the part has not
    if part_bytes >= size or rest <= 0:
        return Link(0.0, occupancy, size / whole)
    bandwidth = (size - part_bytes) / rest
    latency = whole - size / bandwidth
    if latency < 0:
        return Link(0.0, occupancy, size / whole)
    return Link(latency, occupancy, bandwidth)


def break_even_tokens(exposed: Callable[[int, int], float], together: int, layers: int, step: int) -> int | None:
    """The shortest prompt, in multiples of `step` tokens, from which on sends of `together` layers pay; None: none.

    They pay where no more is exposed than of all layers at once, by `exposed` of (tokens, layers per send). Where sends
    of some sizes were measured to be slower than others they may pay of short prompts, lose, and pay again: lengths are
    looked at from the longest down, and what counts is the longest at which they lose.
    """

    def pays(tokens: int) -> bool:
        return exposed(tokens, together) <= exposed(tokens, layers) * (1 + SAME)

    lengths = _lengths(step)
    last = next((at for at in reversed(range(len(lengths))) if not pays(lengths[at])), None)
    if last is None:
        return step
    if last == len(lengths) - 1:
        return None
    low, high = lengths[last], lengths[last + 1]
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _lengths(step: int) -> list[int]:
    """Multiples of `step` up to the longest prompt: 1, 2, 3, 4, 6, 8, 12 … of them."""
    counts = [1]
    while counts[-1] * step * 2 <= LONGEST_PROMPT:
        counts += [counts[-1] * 3 // 2, counts[-1] * 2]
    return [count * step for count in dict.fromkeys(counts)]


def longest(holds: Callable[[int], bool]) -> int:
    """The longest prompt of which it holds, where it holds of all shorter ones; 0: of none, LONGEST_PROMPT: of any."""
    if holds(LONGEST_PROMPT):
        return LONGEST_PROMPT
    low, high = 0, LONGEST_PROMPT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
