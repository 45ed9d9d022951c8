"""A serve of one user and a bench of another on one host: what each backend of one host makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
from two_process.processes import QUICK, Done, Place, Server

from kvxfer.backend.probe import MEASURES_NOTHING, probe_all

OTHER = 54321
AS_OTHER = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
AS_OTHER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # to read a checkout, wherever it lies


def can_be_another() -> bool:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*AS_OTHER, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_be_another(), reason="only root, with setpriv (util-linux), becomes another")


def bench(place: Place, server: Server, *words: str) -> Done:
    place.directory.chmod(0o755)
    place.tmp.chmod(0o777)
    command = [sys.executable, "-m", "kvxfer.bench", "--model", place.model, "--tokens", "70", *QUICK]
    return place.start_command([*AS_OTHER, *command, "--peer", server.address, *words]).wait()


def backends(done: Done) -> Sequence[tuple[str, str, str]]:
    assert done.status == 0, done
    return [(row["backend"], row["status"], row["verified"]) for row in json.loads(done.out)["results"]]


def test_shm_crosses_users(place: Place) -> None:
    """Its descriptors come over the socket, to whoever said the token."""
    server = place.serve()
    done = bench(place, server, "--backend", "shm", "--json", "-")
    assert backends(done) == [("shm", "ok", "full")]


def test_cma_is_refused_by_the_kernel(place: Place) -> None:
    server = place.serve()
    bench(place, server, "--backend", "cma", "--quiet").failed(3, "both processes must belong to one user")
    place.left_alone(server)


def test_of_all_backends_cma_is_left_out(place: Place) -> None:
    server = place.serve()
    done = bench(place, server, "--backend", "all", "--json", "-")
    others = [one.name for one in probe_all() if one.available and one.name not in ("cma", *MEASURES_NOTHING)]
    assert len(others) >= 2
    assert backends(done) == [(name, "ok", "full") for name in others]
