"""Changes to an input, by a seed: of its bytes, and of its values where it is JSON or msgpack."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

LONGEST = 1 << 14

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 1 << 16, 10_000, 10_001, 1 << 24, 1 << 31, 1 << 53, (1 << 63) - 1, 10**12)
VALUES: tuple[Any, ...] = (*NUMBERS, 0.5, -0.0, 1e308, True, False, None, "", "x", "full_attention", [], {}, [[]], [{}])

Codec = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]

CODECS: tuple[Codec, ...] = (
    (json.loads, lambda value: json.dumps(value).encode()),
    (msgspec.msgpack.decode, msgspec.msgpack.encode),
)


def mutated(data: bytes, rng: random.Random, most: int = LONGEST) -> bytes:
    """A different input, of at most so many bytes."""
    if rng.random() < 0.6:
        for decode, encode in CODECS:
            try:
                value = decode(data)
                if isinstance(value, dict | list) and value:
                    for _ in range(rng.choice((1, 1, 1, 2, 4))):
                        _change(value, rng)
                    return encode(value)[:most]
            except (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError):
                continue
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = _damaged(data, rng)
    return data[:most]


def _change(value: Any, rng: random.Random) -> None:
    """One place in it, at any depth."""
    holder = value
    while True:
        if not holder:
            return
        places = list(holder) if isinstance(holder, dict) else range(len(holder))
        place = rng.choice(places)
        if isinstance(holder[place], dict | list) and holder[place] and rng.random() < 0.7:
            holder = holder[place]
            continue
        break
    kind = rng.randrange(6)
    if kind == 0:
        del holder[place]
    elif kind == 1 and type(holder[place]) is int:
        holder[place] += rng.choice((-1, 1))
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice((place + "s", "layer_types", "sliding_window", "x")) if isinstance(place, str) else "x"] = (
            rng.choice(VALUES)
        )
    elif kind == 3 and isinstance(holder, list):
        holder.extend(holder[: rng.randrange(1 + len(holder))])
    else:
        holder[place] = rng.choice(VALUES)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    if kind == 3:
        piece = data[at : at + rng.randrange(1, 33)]
        return data[:at] + piece * rng.choice((2, 3, 100)) + data[at:]
    if kind == 4:
        return data[:at] + rng.choice((b"\xff" * 8, bytes(8), b"[" * 2000, b"9" * 5000, b"\xc1", b"\n")) + data[at:]
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
