"""Choosing backends by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.backend import probe
from kvxfer.backend.probe import choose_backends, is_one_host, probe_all
from kvxfer.errors import UnavailableError, UsageError


def test_auto_is_the_first_that_moves_something() -> None:
    assert choose_backends("auto") == ["tcp"]
    assert [found.name for found in probe_all()] == ["tcp", "ucx", "shm", "cma", "null"]


def test_all_are_those_that_can_be_used_and_move_something() -> None:
    usable = [found.name for found in probe_all() if found.available and found.name != "null"]
    assert choose_backends("All") == usable
    assert usable[:3] == ["tcp", "ucx", "shm"]


def test_auto_is_ucx_where_it_reaches_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RDMA_DEVICES", tmp_path)
    assert choose_backends("auto") == ["tcp"]
    (tmp_path / "mlx5_0").mkdir()
    assert choose_backends("auto") == ["ucx"]


def test_backends_of_one_host_are_told() -> None:
    assert {found.name for found in probe_all() if is_one_host(found.name)} == {"shm", "cma"}


def test_several_in_the_order_given() -> None:
    assert choose_backends("null, TCP,null") == ["null", "tcp"]


@pytest.mark.parametrize("name", ["nccl", "tcp,Mooncake"])
def test_what_is_still_to_come_is_said(name: str) -> None:
    with pytest.raises(UnavailableError, match="is not in this version, which has tcp, ucx, shm, cma, null"):
        choose_backends(name)


@pytest.mark.parametrize("name", ["tpc", "tcp,", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--backend"):
        choose_backends(name)
