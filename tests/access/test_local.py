"""A bench without --peer: nobody but its own two processes, and its user, can get at it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from two_process.processes import Place, wait_until


def test_the_control_socket_is_its_users_alone(place: Place) -> None:
    bench = place.start_bench("--max-seconds", "1", "--min-samples", "1000000")

    def sockets() -> list[Path]:
        return [path for path in place.tmp.rglob("*") if path.is_socket()]

    found: list[Path] = wait_until(sockets, 30, "the control socket")
    for path in found:
        entry = path.parent.stat()
        assert stat.S_IMODE(entry.st_mode) == 0o700, path
        assert entry.st_uid == os.geteuid()
        assert path.parent != place.tmp
    assert bench.wait().status == 0
    place.left_alone()
