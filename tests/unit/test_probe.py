"""Choosing backends by name."""

from __future__ import annotations

import pytest

from kvxfer.backend.probe import choose_backends, probe_all
from kvxfer.errors import UnavailableError, UsageError


def test_auto_is_the_first_that_moves_something() -> None:
    assert choose_backends("auto") == ["tcp"]
    assert [found.name for found in probe_all()] == ["tcp", "null"]


def test_several_in_the_order_given() -> None:
    assert choose_backends("null, TCP,null") == ["null", "tcp"]


@pytest.mark.parametrize("name", ["ucx", "tcp,NCCL"])
def test_what_is_still_to_come_is_said(name: str) -> None:
    with pytest.raises(UnavailableError, match="is not in this version, which has tcp, null"):
        choose_backends(name)


@pytest.mark.parametrize("name", ["tpc", "tcp,", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--backend"):
        choose_backends(name)
