"""Block tables: what fragmentation means, and that requests in flight share no block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.tables import Table, scatter
from kvxfer.cache.wire import run_count

SCATTERS = st.tuples(
    st.integers(1, 200),  # blocks
    st.integers(1, 5),  # slots
    st.integers(1, 3),  # generations
    st.floats(0, 1),  # fragmentation
    st.integers(0, 1 << 32),  # seed
)


def runs_however_merged(prefill: Table, decode: Table) -> int:
    """Pieces that are left when every pair of blocks that is adjacent on both sides is merged, in whatever order."""
    by_prefill = np.argsort(prefill)
    p, d = prefill[by_prefill].astype(np.int64), decode[by_prefill].astype(np.int64)
    joined = (np.diff(p) == 1) & (np.diff(d) == 1)
    return len(p) - int(joined.sum())


@given(SCATTERS)
@settings(max_examples=200, deadline=None)
def test_a_request_has_exactly_the_runs_of_its_fragmentation(case: tuple[int, int, int, float, int]) -> None:
    blocks, slots, generations, fragmentation, _ = case
    tables = scatter(*case)
    assert tables.prefill.shape == tables.decode.shape == (slots * generations, blocks)
    expected = 1 + round(fragmentation * (blocks - 1))
    assert run_count(blocks, fragmentation) == expected
    for prefill, decode in zip(tables.prefill, tables.decode, strict=True):
        assert runs_however_merged(prefill, decode) == expected


@given(SCATTERS)
@settings(max_examples=100, deadline=None)
def test_requests_of_a_generation_fill_the_pool_without_overlap(case: tuple[int, int, int, float, int]) -> None:
    blocks, slots, generations, _, _ = case
    tables = scatter(*case)
    assert tables.pool_blocks == slots * blocks
    for side in (tables.prefill, tables.decode):
        for generation in side.reshape(generations, -1):
            assert sorted(generation.tolist()) == list(range(slots * blocks))


def test_the_seed_decides() -> None:
    one, again, other = (scatter(64, 2, 1, 1.0, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.prefill, again.prefill)
    assert np.array_equal(one.decode, again.decode)
    assert not np.array_equal(one.prefill, other.prefill)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_smallest_requests_can_be_placed(blocks: int) -> None:
    for seed in range(50):
        tables = scatter(blocks, 1, 2, 1.0, seed)
        for prefill, decode in zip(tables.prefill, tables.decode, strict=True):
            assert runs_however_merged(prefill, decode) == blocks


def test_fully_fragmented_blocks_are_scattered_on_both_sides() -> None:
    tables = scatter(4096, 1, 1, 1.0, 0)
    for side in (tables.prefill, tables.decode):
        steps = np.diff(side[0].astype(np.int64))
        assert np.mean(steps == 1) < 0.01
        assert np.mean(np.abs(steps)) > 1000  # a third of the pool on average for a random order
