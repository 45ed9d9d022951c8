"""Fixtures of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moving import MIB, Moving, connected


@pytest.fixture(params=[64, 16], ids=lambda kib: f"{kib}KiB")
def piece(request: pytest.FixtureRequest) -> int:
    """Bytes of a piece."""
    size: int = request.param << 10
    return size


@pytest.fixture(
    params=[("tcp", {}), ("shm", {}), ("shm", {"threads": 1}), ("cma", {}), ("cma", {"threads": 1})],
    ids=lambda param: "-".join([param[0], *(f"{value}{name}" for name, value in param[1].items())]),
)
def scattered(request: pytest.FixtureRequest, piece: int) -> Iterator[Moving]:
    backend, options = request.param
    moving = connected(backend, piece, 256 * MIB, options=options)
    yield moving
    moving.prefill.close()
    moving.decode.close()
