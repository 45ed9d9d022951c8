"""The largest pool that fits: half of the free memory for both sides together, moved at its ends and in its middle."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvxfer import _native as native
from kvxfer.backend.probe import probe_all
from kvxfer.measure.host import usable_bytes

MINUTE = 60_000_000_000
PIECE = 65_537


def arrays(offsets: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(offsets), np.uint32), np.asarray(offsets, np.uint64)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [found.name for found in probe_all() if found.available])
def test_the_largest_pool_that_fits(backend: str) -> None:
    sides = [native.open_context(backend, bytes(32), {}) for _ in range(2)]
    size = usable_bytes() // 4 + 1
    with ThreadPoolExecutor(2) as pool:
        a, b = sides
        regions = list(pool.map(lambda side: side.allocate(size), sides))
        endpoint = b.listen("127.0.0.1", 0)
        accepted = pool.submit(b.accept, MINUTE)
        peers = [a.connect(endpoint, MINUTE), accepted.result()]
        for peer, other, region in zip(peers, reversed(sides), reversed(regions), strict=True):
            peer.import_keys(other.export_keys([region]))

        here = [0, size // 2, size - PIECE]
        there = [size - PIECE, 0, size // 2]
        lengths, starts = np.full(3, PIECE, np.uint64), np.zeros(1, np.uint32)
        planned = [
            pool.submit(side.prepare, peer, *arrays(local), *arrays(remote), lengths, starts, MINUTE)
            for side, peer, local, remote in ((a, peers[0], here, there), (b, peers[1], there, here))
        ]
        plan = planned[0].result()
        planned[1].result()

        for number, offset in enumerate(here):
            ctypes.memset(regions[0].address + offset, 65 + number, PIECE)
        a.post(plan, native.Op.push, [], 1)
        events: list[native.Event] = []
        while not any(event.kind == native.EventKind.confirmed for event in events):
            events = a.poll(1, MINUTE)
            assert events, "the push was not confirmed"
        if a.capabilities.moves_data:
            for number, offset in enumerate(there):
                assert ctypes.string_at(regions[1].address + offset, PIECE) == bytes([65 + number]) * PIECE
    for side in sides:
        side.close()
