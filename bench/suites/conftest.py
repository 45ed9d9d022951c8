"""Fixtures of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moving import MIB, Moving, connected


@pytest.fixture(params=[64, 16], ids=lambda kib: f"{kib}KiB")
def scattered(request: pytest.FixtureRequest) -> Iterator[Moving]:
    moving = connected("tcp", request.param << 10, 256 * MIB)
    yield moving
    moving.prefill.close()
    moving.decode.close()
