"""The options --pipeline and --compute, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from kvxfer.cache.sends import Cut, sweep
from kvxfer.errors import UsageError
from kvxfer.options import parse_float, split_list
from kvxfer.wording import quoted

if TYPE_CHECKING:
    from kvxfer.measure.request import ComputeKind

LONGEST_MS = 3_600_000.0
MOST_SENDS = 4096
"""Of a request: what both sides say of each goes over one connection."""

KINDS: tuple[ComputeKind, ...] = ("timed", "spin", "layers")


def parse_pipeline(text: str, layers: int, tokens: Sequence[int]) -> tuple[Cut, ...] | None:
    """The cuts that `--pipeline` asks for of a model with so many layers; None: off. Raises UsageError."""
    word = text.strip().lower()
    if word == "off":
        return None
    if word in ("sweep", "all"):
        return tuple(Cut(count) for count in (sweep(layers) if word == "sweep" else range(1, layers + 1)))
    words = split_list(text, "--pipeline")
    return tuple(dict.fromkeys(_cut(one, layers, tokens, "give off, sweep, all") for one in words))


def parse_one_cut(text: str, layers: int, longest: int) -> Cut | Literal["best"] | None:
    """The cut that plan's `--pipeline` asks for of prompts up to so many tokens; None: off. Raises UsageError."""
    word = text.strip().lower()
    if word == "off":
        return None
    return "best" if word == "best" else _cut(word, layers, [longest], "plan looks at one cut; give off, best")


def _cut(word: str, layers: int, tokens: Sequence[int], others: str) -> Cut:
    """`others` says what else the option may be."""
    found = re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", word.lower())
    if found is None or not 1 <= int(found[1]) <= layers or (found[2] is not None and int(found[2]) < 1):
        raise UsageError(
            f"--pipeline {quoted(word)} is not allowed: {others}, or layers per send from 1 to {layers} (the model's), "
            "with xTOKENS for chunks of the prompt, such as 4 or 4x2048"
        )
    cut = Cut(int(found[1]), None if found[2] is None else int(found[2]))
    most = max(
        -(-layers // cut.layers) * (1 if cut.chunk_tokens is None else -(-count // cut.chunk_tokens))
        for count in tokens
    )
    if most > MOST_SENDS:
        raise UsageError(
            f"--pipeline {cut} cuts a prompt of {max(tokens)} tokens into {most:,} sends, and a request has at most "
            f"{MOST_SENDS:,}; give more layers or longer chunks"
        )
    return cut


def chunk_notices(
    cuts: Sequence[Cut], tokens: Sequence[int], cached: Callable[[int], float] = lambda _: 0.0
) -> list[str]:
    """A sentence about each cut whose chunks do not cut what is not `cached` of some of these prompts."""
    notices = []
    for cut in cuts:
        size = cut.chunk_tokens
        short = [count for count in tokens if size is not None and round(count - cached(count)) <= size]
        if short:
            lengths = f"{min(short):,}" if min(short) == max(short) else f"{min(short):,} … {max(short):,}"
            prompts = f"prompts of {lengths} token{'s' * (max(short) > 1)}"
            whole = f"{prompts} are no longer than a chunk"
            rest = f"what is computed of {prompts} is no longer than a chunk, and they"
            told = f"{rest} leave" if any(map(cached, short)) else f"{whole}, and leave"
            notices.append(f"--pipeline {cut}: {told} as by --pipeline {cut.layers}")
    return notices


def hit_notices(cuts: Sequence[Cut], kind: ComputeKind) -> list[str]:
    """What bench does of prefill's prefix cache, which shortens the time of the compute alone."""
    if kind == "layers":
        return ["--compute layers computes whole prompts, those tokens too that --prefix-hit-prefill has cached"]
    chunked = [str(cut) for cut in cuts if cut.chunk_tokens is not None]
    if not chunked:
        return []
    told = "chunks are of whole prompts, what --prefix-hit-prefill has cached among them, each with its share of the"
    return [f"--pipeline {', '.join(chunked)}: {told} compute; plan has chunks of what is computed"]


def parse_compute(text: str) -> tuple[ComputeKind, float | None]:
    """Kind and ms per layer (None: from the assumed prefill) of `--compute`. Raises UsageError."""
    word, colon, ms = text.strip().lower().partition(":")
    kind = next((one for one in KINDS if one == word), None)
    if kind is None:
        raise UsageError(
            f"--compute {quoted(text)} is not known: give timed or spin, with :MS for the time of a layer, such as "
            "timed:2.5, or layers"
        )
    if kind == "layers" and colon:
        raise UsageError("--compute layers takes no time: real layers are computed; give timed:MS or spin:MS for that")
    return kind, parse_float(ms, f"--compute {kind}:", 0, LONGEST_MS) if colon else None
