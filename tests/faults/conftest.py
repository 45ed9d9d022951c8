"""What the tests of faults share: a place for their processes, and a process to fork benches from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_process.conftest import place

from .zygote import Zygote

__all__ = ["place", "zygote"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as made:
        yield made
