"""The guest itself: its device carries RDMA, its server survives the cases, and a machine that fails is told of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from requirements import need

from .guest.cases import Ran
from .initramfs import MODULES, in_order
from .machine import MachineError, run_inside
from .packages import BUILD, Kernel

pytestmark = pytest.mark.slow


def test_the_device_carries_rdma(ran: Callable[[str], Ran]) -> None:
    """By verbs alone, without kvxfer: 100 writes of 64 KiB, in packets of 4 KiB."""
    perftest = ran("perftest")
    assert perftest.status == 0, perftest
    assert perftest.sent >= 100 * 16
    assert perftest.received >= 100 * 16


def test_what_tcp_carries_is_not_in_the_counters(ran: Callable[[str], Ran]) -> None:
    """So that a counter which rises proves something."""
    tcp = ran("tcp")
    assert tcp.status == 0, tcp.err
    (row,) = tcp.document["results"]
    assert row["transport"] == "tcp/lo"
    assert row["verified"] == "full"
    assert (tcp.sent, tcp.received) == (0, 0)


def test_the_server_survives_the_cases(ran: Callable[[str], Ran], exchange: Path) -> None:
    assert json.loads((exchange / "serve.json").read_text()) == {"alive": True, "status": 130}
    assert "Traceback" not in (exchange / "serve.log").read_text()


def test_modules_come_after_what_they_depend_on() -> None:
    need("rdma")
    names = [path.stem for path in in_order(Kernel().modules)]
    assert set(MODULES) <= set(names)
    for earlier, later in (("ib_core", "rdma_rxe"), ("9pnet", "9p"), ("rdma_cm", "rdma_ucm"), ("virtio", "virtio_pci")):
        assert names.index(earlier) < names.index(later)


def test_a_machine_that_takes_too_long_is_ended() -> None:
    need("rdma")
    began = time.monotonic()
    with pytest.raises(MachineError, match="not off within 1 s"):
        run_inside(["true"], BUILD / "ended", 1)
    assert time.monotonic() - began < 30


def test_a_machine_that_does_not_start_is_told_of(tmp_path: Path) -> None:
    need("rdma")
    image = tmp_path / "boot" / "vmlinuz-none"
    image.parent.mkdir()
    image.write_text("no kernel")
    (tmp_path / "lib").symlink_to(Kernel().folder / "lib")
    with pytest.raises(MachineError, match="QEMU ended with status 1"):
        run_inside(["true"], BUILD / "ended", 60, Kernel(tmp_path))
