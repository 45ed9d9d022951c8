"""Too little memory in a cgroup: told before the run where that can be known, and else when the kernel has killed."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from two_process.processes import QUICK, Done, Place

from kvxfer.measure.host import CGROUPS

pytestmark = pytest.mark.slow

AT_ONCE = 3
MIB = 1 << 20

RUN = ("--model", "8b", "--tokens", "512", *QUICK)  # both pools together have 128 MiB
LIMITS = [size * MIB for size in (*range(160, 216, 8), 480)]
"""From what the processes alone take to more than a run takes."""


class Group:
    """A cgroup of either version with a limit of its memory; removed by close()."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._first_version = (path / "memory.limit_in_bytes").exists()

    @property
    def bounds_memory(self) -> bool:
        return self._first_version or (self.path / "memory.max").exists()

    def limit(self, size: int) -> None:
        (self.path / ("memory.limit_in_bytes" if self._first_version else "memory.max")).write_text(f"{size}")
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with contextlib.suppress(OSError):  # where swap is not counted there is most likely none
                (self.path / name).write_text(f"{size if self._first_version else 0}")

    def enter(self) -> None:
        """This process goes in."""
        (self.path / "cgroup.procs").write_text("0")

    def killed(self) -> int:
        """How many processes the kernel has ended here for want of memory."""
        text = (self.path / ("memory.oom_control" if self._first_version else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def close(self) -> None:
        self.path.rmdir()


def homes() -> Iterator[Path]:
    """Where a group may be made: below our own one first, of the second version beside it at the least."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield CGROUPS / "memory" / path.lstrip("/")
        elif not controllers:
            own = CGROUPS / path.lstrip("/")
            yield from (one for one in (own, *own.parents) if one.is_relative_to(CGROUPS))


def why_unfit(made: Group) -> str:
    """Why a group does not do, "" when it does."""
    if not made.bounds_memory:
        return "cannot bound memory"
    try:
        subprocess.run(["true"], preexec_fn=made.enter, check=True)
    except subprocess.SubprocessError:
        return "cannot be entered"
    return ""


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Skips the test where none can be made."""
    why = "no memory cgroup is mounted here"
    for home in homes():
        try:
            made = Group(home / f"kvxfer-test-{secrets.token_hex(4)}")
        except OSError as error:
            why = f"no cgroup can be made in {home}: {error.strerror}"
            continue
        with contextlib.closing(made):
            unfit = why_unfit(made)
            if not unfit:
                yield made
                return
        why = f"a cgroup made in {home} {unfit}"
    pytest.skip(why)


def run(limit: int, backend: str) -> tuple[Done, int]:
    """How a run ends under a limit, and how many processes the kernel has killed meanwhile."""
    place = Place()
    try:
        with group() as one:
            one.limit(limit)
            done = place.bench(*RUN, "--backend", backend, preexec_fn=one.enter)
            place.left_alone()
            return done, one.killed()
    finally:
        place.close()


def test_what_can_be_used_is_what_the_group_leaves() -> None:
    limit = 300 * MIB
    place = Place()
    try:
        with group() as one:
            one.limit(limit)
            done = place.bench("--model", "8b", "--tokens", "8192", preexec_fn=one.enter)
    finally:
        place.close()
    done.failed(3, "not enough memory", "2 GiB for both sides' pools", "--tokens")
    usable = re.search(r"where ([\d.]+) GiB can be used", done.err)
    assert usable is not None
    assert 0 < float(usable[1]) * 1024 < limit / MIB


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_less_and_less(backend: str) -> None:
    with group():
        pass  # where that cannot be done nothing else can
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda limit: run(limit, backend), LIMITS))
    for limit, (done, killed) in zip(LIMITS, found, strict=True):
        assert done.status in ((3, 5) if killed else (0, 3)), f"{limit // MIB} MiB, {killed} killed: {done}"
        if done.status:
            done.failed(done.status)
    print([(done.status, killed) for done, killed in found])
    assert found[0][0].status == 3
    assert any(killed for _, killed in found)
    assert found[-1][0].status == 0
