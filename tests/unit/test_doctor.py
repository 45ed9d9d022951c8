"""What `kvxfer doctor` prints."""

from __future__ import annotations

import pytest

from kvxfer.doctor import command


def test_each_backend_says_what_carries_it(capsys: pytest.CaptureFixture[str]) -> None:
    command(None)
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("backend ")}
    assert "available (built in): moves nothing" in lines["null"]
    assert "available (kernel Linux " in lines["tcp"]
    assert not [line for line in lines.values() if " )" in line]
