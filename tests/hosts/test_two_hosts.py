"""The hosts themselves leave nothing behind, whatever ends them."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
from requirements import need

from .two_hosts import Shape, two_hosts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ended_by", [None, ValueError, KeyboardInterrupt])
def test_namespaces_and_processes_are_removed(ended_by: type[BaseException] | None) -> None:
    need("netns")
    raised = contextlib.nullcontext() if ended_by is None else pytest.raises(ended_by)
    with raised, two_hosts(Shape(mbit=1000)) as hosts:
        names = {host.namespace for host in hosts}
        assert names <= namespaces()
        process = hosts.decode.start("sleep", "1000")
        if ended_by is not None:
            raise ended_by
    assert not names & namespaces()
    assert process.returncode is not None


def test_hosts_that_could_not_be_made_are_removed() -> None:
    need("netns")
    before = namespaces()
    with pytest.raises(subprocess.CalledProcessError), two_hosts(Shape(mbit=-1)):
        pass
    assert namespaces() <= before


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
