"""What happens outside the timed part: filling, poisoning and verifying 256 MiB, and planning 40,960 descriptors."""

from __future__ import annotations

import numpy as np
from moving import MIB, rate

from kvxfer import _native
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.tables import scatter

SIZE = 256 * MIB
BLOCK = 64 << 10
BLOCKS = SIZE // BLOCK


def test_fill(benchmark) -> None:
    memory = _native.Mapping(SIZE)
    pool = _native.PoolView([(memory.address, BLOCK)], BLOCKS)
    benchmark.pedantic(_native.fill, (pool, 1), rounds=20, warmup_rounds=2)
    rate(benchmark, SIZE)


def test_poison(benchmark) -> None:
    """A memset on all cores: the memory's write bandwidth, to hold fill against."""
    memory = _native.Mapping(SIZE)
    benchmark.pedantic(_native.poison, (memory.address, SIZE), rounds=20, warmup_rounds=2)
    rate(benchmark, SIZE)


def test_verify(benchmark) -> None:
    memory = _native.Mapping(SIZE)
    pool = _native.PoolView([(memory.address, BLOCK)], BLOCKS)
    _native.fill(pool, 1)
    table = np.random.default_rng(0).permutation(BLOCKS).astype(np.uint32)
    found = benchmark.pedantic(_native.verify, (pool, table, table, 1, 0, 1), rounds=20, warmup_rounds=2)
    assert found.wrong_words == 0
    rate(benchmark, SIZE)


def test_plan_of_70b_with_8192_tokens(benchmark) -> None:
    """Block tables and descriptors of one fully fragmented request."""

    def once() -> int:
        tables = scatter(512, 1, 1, 1.0, 0)
        return transfer_plan(tables.prefill[0], tables.decode[0], [BLOCK] * 80, 1).descriptors

    assert benchmark(once) == 40_960
