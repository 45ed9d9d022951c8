"""How a request is cut for pipelining: chunks of its prompt, and of each chunk the layers that are sent together.

Compute goes through a prompt chunk by chunk, and through a chunk layer by layer. A send leaves after the last of its
layers, and its order among the others is that of compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvxfer.model.shape import blocks_of

if TYPE_CHECKING:  # which brings numpy, and plan has to answer at once
    from kvxfer.cache.plan import Segment


@dataclass(frozen=True)
class Cut:
    """`layers` of each chunk of `chunk_tokens` tokens leave together; None: the prompt is one chunk."""

    layers: int
    chunk_tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.layers}" + ("" if self.chunk_tokens is None else f"x{self.chunk_tokens}")


@dataclass(frozen=True)
class Send:
    """What leaves after `ready_after` layers, those of earlier chunks counted too: of each leg some of its segments."""

    ready_after: int
    segments: list[list[int]]


def chunk_lengths(tokens: int, chunk_tokens: int | None) -> list[int]:
    """Tokens of each chunk of a prompt; the last one may be shorter."""
    size = tokens if chunk_tokens is None else min(chunk_tokens, tokens)
    whole, rest = divmod(tokens, size)
    return [size] * whole + ([rest] if rest else [])


def chunk_ends(tokens: int, chunk_tokens: int | None, block_size: int, blocks: Sequence[int]) -> list[list[int]]:
    """For each chunk, how many of the `blocks` that move in each group are complete at its end."""
    return complete_blocks(accumulate(chunk_lengths(tokens, chunk_tokens)), tokens, block_size, blocks)


def complete_blocks(ends: Iterable[float], tokens: int, block_size: int, blocks: Sequence[int]) -> list[list[int]]:
    """How many of the `blocks` that move in each group are complete when so many of a prompt's tokens are computed.

    The blocks that move are a prompt's last ones. One that two chunks share is complete with the later one, and a
    state, which is one block, with the last.
    """
    every = blocks_of(tokens, block_size)
    found = []
    for end in ends:
        complete = every if end >= tokens else int(end // block_size)
        found.append([max(0, count - (every - complete)) for count in blocks])
    return found


def sends(legs: Sequence[Sequence[Segment]], layers: int, together: int) -> list[Send]:
    """The sends of a request with so many layers in all and `together` of them in a send; `legs` are a plan's segments.

    Where a chunk has no bytes of some layers, there is no send of them.
    """
    found: dict[tuple[int, int], list[list[int]]] = {}
    for leg, segments in enumerate(legs):
        for number, segment in enumerate(segments):
            key = segment.chunk, segment.layer // together
            found.setdefault(key, [[] for _ in legs])[leg].append(number)
    return [
        Send(chunk * layers + min((part + 1) * together, layers), of_legs)
        for (chunk, part), of_legs in sorted(found.items())
    ]


def send_ends(stages: Sequence[range], together: int) -> list[int]:
    """The layers that are computed when each send of a chunk leaves: `together` of them at a time, or all at its end.

    A stage sends its own layers, the last of them once it has computed these. All layers together wait for the whole
    chunk: that is serial.
    """
    layers = stages[-1].stop
    if together >= layers:
        return [layers]
    return [min(first + together, stage.stop) for stage in stages for first in range(stage.start, stage.stop, together)]


def sweep(layers: int) -> list[int]:
    """Layers per send that are worth comparing: the divisors of their number, the powers of two below it, all."""
    return [count for count in range(1, layers + 1) if layers % count == 0 or count & (count - 1) == 0]
