"""One boot of the guest for all cases in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from requirements import need

from .guest.cases import Ran
from .machine import run_inside
from .packages import BUILD

GUEST = Path(__file__).with_name("guest") / "cases.py"

DEADLINE_S = 1200
"""For the guest: several times what it takes on two CPUs that have other work."""


@pytest.fixture(scope="session")
def exchange() -> Path:
    """The folder in which the guest left what became of its cases. Times in it mean nothing: its CPU is emulated."""
    need("rdma")
    folder = BUILD / "exchange"
    shutil.rmtree(folder, ignore_errors=True)
    _make_keys(folder / "keys")
    ended = run_inside([sys.executable, str(GUEST), str(folder)], folder, DEADLINE_S)
    assert ended.status == 0, f"the cases were not all run:\n{ended.console}"
    return folder


@pytest.fixture(scope="session")
def ran(exchange: Path) -> Callable[[str], Ran]:
    """What became of a case, by its name."""
    return lambda name: Ran(**json.loads((exchange / f"{name}.json").read_text()))


def _make_keys(folder: Path) -> None:
    """Outside, where an interpreter starts ten times as fast."""
    allowed = folder / "allowed"
    allowed.mkdir(parents=True)
    for name in ("prefill", "decode"):
        subprocess.run([sys.executable, "-m", "kvxfer.cli", "keys", name, "--dir", str(folder)], check=True)
    shutil.copy(folder / "prefill.key", allowed)
