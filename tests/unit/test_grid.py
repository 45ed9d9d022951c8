"""The grid of a cost model: requests that tell its unknowns apart, within the longest one asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.wire import run_count
from kvxfer.cost.points import Role
from kvxfer.errors import UsageError
from kvxfer.measure import fitting
from kvxfer.measure.grid import INFLIGHT, design
from kvxfer.measure.request import Effort, Row
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model


def longest(model: str = "8b", tokens: int = 4096, block_size: int = 16, dtype: str = "bf16") -> Row:
    return Row(CacheSpec(load_model(model), resolve_dtype(dtype), block_size), "tcp", "push", tokens, inflight=8)


def of_role(grid: list[tuple[Role, Row]], role: Role) -> list[Row]:
    return [row for own, row in grid if own == role]


def descriptors(row: Row) -> int:
    """Of a cache whose layers all keep every block."""
    return run_count(row.blocks[0], row.fragmentation) * row.shape.layers


def runs(row: Row) -> tuple[int, ...]:
    """Of each group of layers."""
    return tuple(run_count(blocks, row.fragmentation) for blocks in row.blocks)


def test_the_unknowns_can_be_told_apart() -> None:
    """Time, descriptors and bytes as columns, each request's share: none is nearly a sum of the others."""
    rows = of_role(design(longest()), "fit")
    table = np.array([[1.0, descriptors(row), row.bytes] for row in rows])
    table /= np.linalg.norm(table / table[:, 2:], axis=0) * table[:, 2:]
    assert np.linalg.cond(table) < 10
    sizes = sorted({row.bytes for row in rows})
    assert sizes[-1] == longest().bytes
    assert sizes[0] == longest().bytes // 4096  # one token


def test_held_out_are_other_lengths_and_other_fragmentations() -> None:
    grid = design(longest())
    fitted, held_out = of_role(grid, "fit"), of_role(grid, "held_out")
    assert len(held_out) == 6
    assert not {row.tokens for row in fitted} & {row.tokens for row in held_out}
    assert {row.fragmentation for row in fitted} == {0, 1}
    assert {0.25, 0.5, 0.75} < {row.fragmentation for row in held_out}
    assert max(row.bytes for row in held_out) < longest().bytes
    assert {row.inflight for row in fitted + held_out} == {1}
    assert {row.inflight for row in of_role(grid, "inflight")} == {INFLIGHT}


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 10_000),
    block_size=st.sampled_from([1, 2, 16, 64, 100]),
    model=st.sampled_from(["8b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"]),
)
def test_every_request_is_one_and_none_is_there_twice(tokens: int, block_size: int, model: str) -> None:
    row = longest(model, tokens, block_size)
    grid = design(row)
    for _, one in grid:
        one.check()
        assert one.tokens <= tokens
        assert one.bytes > 0
        assert (one.backend, one.op, one.seed) == (row.backend, row.op, row.seed)
    known = [(tuple(one.blocks), one.spec.block_size, one.inflight, runs(one)) for _, one in grid]
    assert len(set(known)) == len(known)


def test_what_is_held_out_is_not_fitted_under_another_fragmentation() -> None:
    """Two blocks are one run with a fragmentation of 0.25 as with 0."""
    grid = design(longest(tokens=256))
    two_blocks = [role for role, row in grid if row.blocks == [2] and row.spec.block_size == 16 and runs(row) == (1,)]
    assert two_blocks == ["fit"]


@pytest.mark.parametrize("tokens", [16, 100])
def test_a_short_prompt_has_a_smaller_grid(tokens: int) -> None:
    assert 0 < len(of_role(design(longest(tokens=tokens)), "fit")) < len(of_role(design(longest()), "fit"))


def test_a_grid_that_tells_too_little_is_refused_after_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens; to measure it for all of --fit-seconds would be in vain."""
    started = []

    def sample(session: object, one: fitting.Sampled, hosts: object, effort: object) -> str:
        started.append(one)
        one.descriptors = descriptors(one.row)
        one.processes.append(fitting.Process(1e6, {}, noisy=False))
        return "tcp"

    monkeypatch.setattr(fitting, "_sample", sample)
    request = SimpleNamespace(effort=Effort(), require_transport="")
    row = longest(tokens=16)
    with pytest.raises(UsageError, match="here are 4, 2 too few; give a longer --tokens"):
        fitting._measure(None, row, None, 60.0, request, lambda step: None)  # type: ignore[arg-type]
    assert len(started) == len(design(row))
