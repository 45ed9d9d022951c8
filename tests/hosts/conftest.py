"""Two hosts on a link, and what runs on them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from requirements import need

from .commands import Bench, Files, Server, make_files, serving
from .two_hosts import Hosts, Shape, two_hosts

QUICK = ("--tokens", "64", "--max-seconds", "0.2", "--min-samples", "1")
"""A bench that only has to work."""


@pytest.fixture(scope="session", autouse=True)
def _ended_by_sigterm() -> Iterator[None]:
    """What a CI system sends when time is up ends this run as Ctrl-C does: namespaces and processes are removed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A slow link: what is cut in the middle lasts long enough."""
    need("netns")
    with two_hosts(Shape(mbit=200)) as made:
        yield made


@pytest.fixture
def server(hosts: Hosts, files: Files, tmp_path: Path) -> Iterator[Server]:
    """On the decode host's own address."""
    with serving(hosts, files, tmp_path / "serve.log") as made:
        yield made


@pytest.fixture
def bench(hosts: Hosts, files: Files, tmp_path: Path) -> Callable[..., Bench]:
    """Start a quick bench on the prefill host; of an option given twice the later one holds."""
    numbers = itertools.count()

    def start(*options: str) -> Bench:
        return Bench(hosts.prefill, files, tmp_path / f"result{next(numbers)}.json", *QUICK, *options)

    return start
