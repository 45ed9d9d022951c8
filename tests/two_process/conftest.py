"""A place for the processes of a test, in which nothing may be left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Place


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()
