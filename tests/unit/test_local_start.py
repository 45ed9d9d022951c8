"""A second process that cannot start."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer.errors import UnavailableError
from kvxfer.measure import local


def test_it_says_what_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable=shutil.which("false")))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with pytest.raises(UnavailableError, match=rf"ended with status 1; .* files .*\(`ulimit -n` is {files}\)"):  # noqa: SIM117
        with local.local_server():
            pass
