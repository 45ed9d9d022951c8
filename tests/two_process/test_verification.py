"""The verification is proven from outside: what a relay between the two processes spoils is found, wherever it lies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from .processes import HEAD_DIM, KV_HEADS, LAYERS, Done, Place, free_port
from .relay import Chunk, Relay, Tamper

TOKENS, BLOCKS = 32, 2  # so few that a request is one chunk
PIECE = 16 * KV_HEADS * 2 * HEAD_DIM * 2  # bytes of a block in one region, which is one descriptor
WHOLE = BLOCKS * LAYERS * PIECE

HELD_S = 0.2


def through(place: Place, tamper: Tamper, *arguments: str) -> Done:
    """A bench whose data connections go through a relay."""
    port = free_port()
    with Relay(port, tamper) as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        done = place.bench("--peer", server.address, "--tokens", str(TOKENS), *arguments)
    place.left_alone(server)
    return done


def flipping(position: int, first: int, last: int | None = None) -> Tamper:
    """One bit of the byte at that position of a request is turned over, in requests first…last (None: all later)."""

    def tamper(chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        assert chunk.total == WHOLE
        if chunk.tag < first or (last is not None and chunk.tag > last):
            yield payload
            return
        at = position - chunk.start
        if 0 <= at < len(payload):
            payload = payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]
        yield payload

    return tamper


def exchanging(one: int, other: int, size: int) -> Tamper:
    """Two pieces of the first request, of equal length, in each other's place."""

    def tamper(chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        assert (chunk.start, chunk.bytes, chunk.total) == (0, WHOLE, WHOLE)
        if chunk.tag == 1:
            pieces = bytearray(payload)
            pieces[one : one + size], pieces[other : other + size] = (
                payload[other : other + size],
                payload[one : one + size],
            )
            payload = bytes(pieces)
        yield payload

    return tamper


def place_of(position: int) -> str:
    """How an error names the place of a byte of a request, which moves region by region, block by block."""
    piece, within = divmod(position, PIECE)
    region, block = divmod(piece, BLOCKS)
    return f"region {region} (layer {region}), block {block} of the request, word {within // 8}"


def test_an_honest_relay_is_no_error(place: Place) -> None:
    seen = []

    def tamper(chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        seen.append(chunk)
        yield payload

    done = through(place, tamper, "--op", "both")
    assert done.status == 0, done
    assert {chunk.total for chunk in seen} == {WHOLE}


OPS = ("push", pytest.param("pull", marks=pytest.mark.slow))
"""Payload goes the same way in both, from prefill to decode; the receiving side is the one that compares."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "position",
    [0, 3 * PIECE, 3 * PIECE + PIECE // 2 + 3, 4 * PIECE - 1, WHOLE - 1],
    ids=["first", "first-of-a-piece", "middle", "last-of-a-piece", "last"],
)
def test_a_flipped_byte_is_found(place: Place, op: str, position: int) -> None:
    done = through(place, flipping(position, first=1, last=1), "--op", op)
    done.failed(4, place_of(position))


def test_a_path_that_goes_bad_later_is_found(place: Place) -> None:
    """The first request arrives right; the last one is compared byte by byte as well."""
    position = 3 * PIECE + 100
    done = through(place, flipping(position, first=2))
    done.failed(4, place_of(position))


def test_every_sample_carries_an_epoch(place: Place) -> None:
    """Spoiled in the midst of the run, in the word that is compared for every sample."""
    done = through(place, flipping(4 * PIECE + 2, first=3, last=3))
    done.failed(4, "1 pieces", "did not carry their request's epoch")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (2 * PIECE, 5 * PIECE, PIECE),  # two descriptors
        (2 * PIECE + PIECE // 2, 5 * PIECE + PIECE // 2, PIECE // 2),  # halves of them, without their epochs
        (2 * PIECE + 512, 2 * PIECE + 1024, 512),  # two tokens of one block
        (2 * PIECE + 8, 2 * PIECE + 16, 8),  # two words
    ],
    ids=["descriptors", "halves", "tokens", "words"],
)
def test_exchanged_pieces_are_found(place: Place, op: str, one: int, other: int, size: int) -> None:
    done = through(place, exchanging(one, other, size), "--op", op)
    done.failed(4, place_of(one))


def test_a_request_in_place_of_another_is_found(place: Place) -> None:
    """The payload of an earlier request once more: all bytes are right, but old."""
    earlier: dict[tuple[int, int], bytes] = {}

    def tamper(chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        earlier[chunk.tag, chunk.start] = payload
        yield earlier[1, chunk.start] if chunk.tag == 4 else payload

    done = through(place, tamper)
    done.failed(4, f"{BLOCKS * LAYERS} pieces", "did not carry their request's epoch")


def test_without_verification_nothing_is_found(place: Place) -> None:
    """So it is the verification that finds it above. The result says that nothing was compared."""
    done = through(place, flipping(100, first=1), "--verify", "off")
    assert done.status == 0, done
    assert "unverified" in done.out


class LastByteHeld:
    """Holds the last byte of every request back; counts what has passed on all lanes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed: dict[int, int] = {}

    def __call__(self, chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        with self._lock:
            passed = self._passed[chunk.tag] = self._passed.get(chunk.tag, 0) + len(payload)
        if passed < chunk.total:
            yield payload
            return
        yield payload[:-1]
        time.sleep(HELD_S)
        yield payload[-1:]


@pytest.mark.parametrize(
    ("op", "tokens"),
    [
        ("push", "2048"),
        ("pull", "70"),
        *(pytest.param(op, tokens, marks=pytest.mark.slow) for op, tokens in (("push", "70"), ("pull", "2048"))),
    ],
)
def test_a_transfer_is_over_when_the_last_byte_has_arrived(place: Place, op: str, tokens: str) -> None:
    """And not when the sender is rid of it: confirmed takes as long as the relay waits, post returns at once."""
    port = free_port()
    with Relay(port, LastByteHeld()) as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        result = place.measure("--peer", server.address, "--op", op, "--tokens", tokens, "--max-seconds", "0.8")
    (row,) = result["results"]
    held = round(HELD_S * 1e9)
    assert row["min_ns"] >= held
    assert row["setup"]["first_ns"]["samples"][0] >= held
    assert min(row["handover"]["samples_ns"]) >= held
    assert max(row["post_ns"]) < held / 2
    assert statistics.median(row["post_ns"]) < held / 20
    assert row["verified"] == "full"
