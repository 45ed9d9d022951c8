"""Two processes that move scattered pieces between a GPU's memory and the host's over ucx, push and pull, and compare
every byte: `python -m gpu.moves OPTIONS`, the backend's as JSON. Prints what became of each move, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from gpu.driver import Bytes, Driver
from kvxfer import _native as native

TOKEN = b"k" * 32
PIECE = 65536
PIECES = 64
PLACES = 2 * PIECES
SIZE = PLACES * PIECE
POISON = 0xDB
WITHIN_S = 60
WITHIN_NS = WITHIN_S * 10**9
WAYS = (("cuda", "cuda"), ("cuda", "host"), ("host", "cuda"))
"""From prefill's memory to decode's."""

SOURCE, TARGET = (np.random.default_rng(seed).permutation(PLACES)[:PIECES] for seed in (1, 2))
"""Of the pieces on either side, which of the places in its pool."""

T = TypeVar("T")


class Pool:
    """SIZE bytes of the host, or of the GPU."""

    def __init__(self, kind: str, driver: Driver) -> None:
        self._driver = driver if kind == "cuda" else None
        self._host = np.zeros(SIZE, np.uint8)
        self.address = driver.allocate(SIZE) if self._driver else self._host.ctypes.data

    def write(self, data: Bytes) -> None:
        if self._driver:
            self._driver.write(self.address, data)
        else:
            self._host[:] = data

    def read(self) -> Bytes:
        return self._driver.read(self.address, SIZE) if self._driver else self._host


class Side:
    """One end of a connection, with a pool of one kind."""

    def __init__(self, prefill: bool, kind: str, driver: Driver, other: Connection, options: dict[str, int]) -> None:
        self.pool = Pool(kind, driver)
        self.context = native.open_context("ucx", TOKEN, options)
        region = self.context.register_memory(self.pool.address, SIZE, native.MemoryKind[kind])
        endpoint = exchange(other, "" if prefill else self.context.listen("127.0.0.1", 0))
        self.peer = self.context.connect(endpoint, WITHIN_NS) if prefill else self.context.accept(WITHIN_NS)
        self.peer.import_keys(exchange(other, self.context.export_keys([region])))
        here, there = (SOURCE, TARGET) if prefill else (TARGET, SOURCE)
        one_region, lengths = np.zeros(PIECES, np.uint32), np.full(PIECES, PIECE, np.uint64)
        offsets = [(places * PIECE).astype(np.uint64) for places in (here, there)]
        segments = np.zeros(1, np.uint32)
        self.plan = self.context.prepare(
            self.peer, one_region, offsets[0], one_region, offsets[1], lengths, segments, WITHIN_NS
        )

    def move(self, op: native.Op, tag: int, initiates: bool) -> None:
        """Returns when every byte is in place."""
        if initiates:
            self.context.post(self.plan, op, [], tag)
        awaited = native.EventKind.confirmed if initiates else native.EventKind.delivered
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            for event in self.context.poll(16, 10**9):
                if event.kind in (native.EventKind.error, native.EventKind.peer_lost):
                    raise RuntimeError(f"the peer was lost: {self.peer.lost}")
                if event.kind == awaited and event.tag == tag:
                    return
        raise TimeoutError(f"{awaited} did not come")


def exchange(other: Connection, mine: T) -> T:
    """What the other process says in return."""
    other.send(mine)
    if not other.poll(WITHIN_S):
        raise TimeoutError("the other process says nothing")
    theirs: T = other.recv()
    return theirs


def arrived(data: Bytes) -> Bytes:
    """A poisoned pool into which the pieces of such a one have come."""
    pool = np.full((PLACES, PIECE), POISON, np.uint8)
    pool[TARGET] = data.reshape(PLACES, PIECE)[SOURCE]
    return pool.reshape(SIZE)


def move_both_ways(side: Side, prefill: bool, other: Connection) -> list[dict[str, object]]:
    """Of a push and a pull, what both sides found, prefill's first: bytes that are not what they should be, and what
    UCX says of itself.
    """
    moves: list[dict[str, object]] = []
    for tag, op in enumerate((native.Op.push, native.Op.pull), 1):
        data = np.random.default_rng(tag).integers(0, 256, SIZE, np.uint8)
        side.pool.write(data if prefill else np.full(SIZE, POISON, np.uint8))
        exchange(other, "filled")
        side.move(op, tag, initiates=(op == native.Op.push) == prefill)
        exchange(other, "moved")
        wrong = int(np.count_nonzero(side.pool.read() != (data if prefill else arrived(data))))
        found = {"wrong": wrong, "transport": side.peer.describe(), "details": side.context.details()}
        both = [found, exchange(other, found)]
        moves.append({"op": op.name, "sides": both if prefill else both[::-1]})
    side.context.close()
    return moves


def run(prefill: bool, other: Connection, options: dict[str, int]) -> list[dict[str, object]]:
    """One process: all moves of all ways."""
    driver = Driver()
    driver.enter()
    return [
        {"kinds": kinds} | move
        for kinds in WAYS
        for move in move_both_ways(Side(prefill, kinds[not prefill], driver, other, options), prefill, other)
    ]


def main() -> None:
    options = json.loads(sys.argv[1])
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    decode = processes.Process(target=run, args=(False, there, options), daemon=True)
    decode.start()
    there.close()  # so that its end is seen
    print(json.dumps(run(True, here, options)))
    decode.join(WITHIN_S)
    sys.exit(decode.exitcode)


if __name__ == "__main__":
    main()
