"""Too little of something: address space, files, processes and threads, locked memory. A clear error, nothing left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from two_process.processes import QUICK, Done, Place

from .test_steps import BACKENDS

pytestmark = pytest.mark.slow

AT_ONCE = 4
MIB = 1 << 20

SMALL = ("--tokens", "16", *QUICK)
GLIBC_GAVE_UP = "cannot allocate memory for thread-local data: ABORT"
"""The C library ends the process itself then, whatever runs in it."""

IMPORTS = "import numpy, zmq, msgspec, typer, rich.console"


def set_limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, value))


def least(which: int, values: Sequence[int]) -> int:
    """The least of these with which Python can import what kvxfer needs; below, nobody can tell an error."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    for value in values:
        limit = partial(set_limit, which, value)
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], preexec_fn=limit, env=environment, capture_output=True, check=False
        )
        if done.returncode == 0:
            return value
    raise AssertionError(f"not even {values[-1]} is enough to import")


def with_limit(which: int, backend: str, value: int) -> tuple[int, Done, str]:
    """A bench, with its own second process, under a limit: the value, how it ended, and what it left."""
    place = Place()
    try:
        done = place.bench(*SMALL, "--backend", backend, preexec_fn=partial(set_limit, which, value))
        place.left_alone()
        place.close()
    except AssertionError as error:
        place.close()
        return value, Done(-1, "", "", 0), str(error)
    return value, done, ""


def outcomes(which: int, values: Sequence[int], backend: str) -> list[int]:
    """The exit statuses: 0, or with one line that says why 3 (or 5 where UCX names another reason)."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(partial(with_limit, which, backend), values))
    for value, done, left in results:
        assert not left, f"limit {value}: {left}"
        if done.status == 127 and GLIBC_GAVE_UP in done.err:
            continue
        # UCX says of an endpoint for which it got no file that it is not connected.
        assert done.status in ((0, 3, 5) if backend == "ucx" else (0, 3)), f"limit {value}: {done}"
        if done.status != 0:
            done.failed(done.status)
    return [done.status for _, done, _ in results]


@pytest.mark.parametrize("backend", BACKENDS)
def test_address_space(backend: str) -> None:
    """From what the imports take to what a run takes, step by step: allocation is refused in one place after another.

    The prefill side and the decode side are separate processes with the same limit; each has other allocations.
    """
    floor = least(resource.RLIMIT_AS, range(40 * MIB, 2000 * MIB, 10 * MIB))
    step = (4 if backend == BACKENDS[0] else 32) * MIB
    statuses = outcomes(resource.RLIMIT_AS, range(floor + 4 * MIB, floor + 164 * MIB, step), backend)
    assert statuses[0] == 3
    assert 3 in statuses[1:]


ENOUGH_FILES = 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_files(backend: str) -> None:
    values = range(5, 24) if backend == BACKENDS[0] else (*range(8, 30, 3), ENOUGH_FILES)
    statuses = outcomes(resource.RLIMIT_NOFILE, values, backend)
    assert statuses[0] == 3
    assert statuses[-1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_locked_memory(place: Place, backend: str) -> None:
    assert (
        place.bench(*SMALL, "--backend", backend, preexec_fn=partial(set_limit, resource.RLIMIT_MEMLOCK, 0)).status == 0
    )


UNPRIVILEGED = 54_321
"""A user with no other processes. The limit does not bind root; the files of this one can be read all the same."""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root and setpriv only")
def test_processes_and_threads() -> None:
    def run(value: int) -> tuple[int, Done]:
        place = Place()
        place.directory.chmod(0o755)
        place.tmp.chmod(0o777)
        user = f"{UNPRIVILEGED + value}"
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        python = [sys.executable, "-m", "kvxfer.bench", "--model", place.model, *SMALL]
        try:
            limit = partial(set_limit, resource.RLIMIT_NPROC, value)
            done = place.start_command([*command, *python], preexec_fn=limit).wait()
            place.left_alone()
        finally:
            place.close()
        return value, done

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for value, done in pool.map(run, range(1, 20)):
            assert done.status in (0, 3), f"{value} processes: {done}"
            if done.status == 3:
                done.failed(3)


@pytest.mark.parametrize(
    ("which", "unit", "values"),
    [(resource.RLIMIT_AS, 8 * MIB, range(1, 12)), (resource.RLIMIT_NOFILE, 1, range(8, 22))],
    ids=["address space", "files"],
)
def test_serve_with_little(which: int, unit: int, values: Sequence[int]) -> None:
    """It does not start, or it tells its clients; a worker that cannot be started is not its end."""
    floor = least(which, range(40 * MIB, 2000 * MIB, 10 * MIB)) if which == resource.RLIMIT_AS else 0

    def run(limit: Callable[[], None]) -> list[Done]:
        place = Place()
        try:
            try:
                server = place.serve(preexec_fn=limit)
            except AssertionError:
                (ended,) = place.ended()
                return [ended]
            done = [place.bench("--peer", server.address, *SMALL) for _ in range(2)]
            place.left_alone(server)
            assert server.process.poll() is None
            return done
        finally:
            place.close()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        limits = [partial(set_limit, which, floor + unit * value) for value in values]
        for limit, results in zip(limits, pool.map(run, limits), strict=True):
            for done in results:
                assert done.status in (0, 3), f"{limit}: {done}"
                if done.status == 3:
                    done.failed(3)
