"""What happens outside the timed part: filling, poisoning and verifying 256 MiB, and planning 40,960 descriptors."""

from __future__ import annotations

import numpy as np
import pytest
from moving import MIB, blocks_of, connected, rate

from kvxfer import _native
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.tables import scatter

SIZE = 256 * MIB
BLOCK = 64 << 10


def test_fill(benchmark) -> None:
    memory = _native.Mapping(SIZE)
    regions = _native.Regions([(memory.address, SIZE)])
    benchmark.pedantic(_native.fill, (regions, 1), rounds=20, warmup_rounds=2)
    rate(benchmark, SIZE)


def test_poison(benchmark) -> None:
    """A memset on all cores: the memory's write bandwidth, to hold fill against."""
    memory = _native.Mapping(SIZE)
    benchmark.pedantic(_native.poison, (memory.address, SIZE), rounds=20, warmup_rounds=2)
    rate(benchmark, SIZE)


@pytest.mark.parametrize("piece", [BLOCK, 1 << 10, 250], ids=["64KiB", "1KiB", "250B"])
def test_verify(benchmark, piece: int) -> None:
    """Blocks; a head's share of one token; and pieces that lie on no word boundary."""
    memory = _native.Mapping(SIZE)
    regions = _native.Regions([(memory.address, SIZE)])
    _native.fill(regions, 1)
    count = SIZE // piece
    offsets = np.random.default_rng(0).permutation(count).astype(np.uint64) * np.uint64(piece)
    zeros = np.zeros(count, np.uint32)
    some = connected("null", 1 << 12, 1 << 16)  # a leg has a peer and a plan, whatever its pieces
    leg = _native.Leg(some.peer, some.plans[0], zeros, offsets, zeros, offsets, np.full(count, piece, np.uint64))
    found = benchmark.pedantic(_native.verify, (regions, leg, 1, 0, 1), rounds=20, warmup_rounds=2)
    assert found.wrong_words == 0
    assert found.bytes_checked == count * piece
    rate(benchmark, SIZE)


def test_plan_of_70b_with_8192_tokens(benchmark) -> None:
    """Block tables and descriptors of one fully fragmented request."""
    slices = blocks_of(BLOCK, 80)

    def once() -> int:
        tables = scatter(512, 1, 1, 1.0, 0)
        return transfer_plan(slices, [tables.prefill[0]], [tables.decode[0]]).descriptors

    assert benchmark(once) == 40_960


def test_plan_of_a_million_descriptors(benchmark) -> None:
    """A prompt of 204,800 tokens; the goal is 100 ms."""
    slices = blocks_of(BLOCK, 80)
    tables = scatter(12_800, 1, 1, 1.0, 0)

    def once() -> int:
        return transfer_plan(slices, [tables.prefill[0]], [tables.decode[0]]).descriptors

    assert benchmark(once) == 1_024_000
