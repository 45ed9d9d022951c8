"""What serve holds stays the same over hundreds of runs: memory, descriptors, threads, children."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from two_process.processes import Place, children

from kvxfer.cache.spec import CacheSpec
from kvxfer.control.channel import Client
from kvxfer.measure.pair import Pair
from kvxfer.measure.request import Effort, Row, tables
from kvxfer.measure.session import open_session
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

from .matrix import held_by
from .test_steps import BACKENDS

pytestmark = pytest.mark.slow

RUNS = 500
"""One server sees all backends in turn: what a backend holds ends with its worker, what is left is in serve."""

WINDOW = 50
"""So many runs' medians are compared, after as many others: the very first ones import and fill caches."""

SLACK_KIB = 1024
"""The allocator's caches grow by half of that; after a thousand clients they grow no more."""


def private_kib(pid: int) -> int:
    """Memory that this process alone has."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(number) for number in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))


def run(address: str, row: Row, effort: Effort) -> None:
    """A client comes, sets a pair of workers up to its first verified transfer, and goes."""
    with open_session(Client(f"tcp://{address}", None, None)) as session:
        pair = Pair(session, 0, row, tables(row, 1), effort, "127.0.0.1")
        pair.set_up()
        assert pair.verified_bytes == row.bytes
        pair.end()


def test_nothing_grows_in_serve(place: Place) -> None:
    windows = (slice(WINDOW, 2 * WINDOW), slice(RUNS - WINDOW, RUNS))
    server = place.serve()
    spec = CacheSpec(load_model(place.model), resolve_dtype("bf16"), 16, 1, "nhd")
    effort = Effort()
    memory, held = [], []
    for number in range(RUNS):
        run(server.address, Row(spec, BACKENDS[number % len(BACKENDS)], "push", 16), effort)
        memory.append(private_kib(server.pid))
        held.append((*held_by(server.pid), len(children(server.pid))))
    assert server.err.count("the run is over: the client is done") >= RUNS - 1
    early, late = (statistics.median(memory[window]) for window in windows)
    print(f"{RUNS} runs of {', '.join(BACKENDS)}: {early} KiB, then {late}; {held[-1]} descriptors, threads, children")
    assert late - early < SLACK_KIB, f"serve grew by {late - early} KiB in {RUNS} runs"
    # What one run leaves open may be looked at a moment too soon; what stays open is there each time.
    first, last = (list(map(min, zip(*held[window], strict=True))) for window in windows)
    for early, late in zip(first, last, strict=True):
        assert late <= early, f"descriptors, threads and children: {first}, then {last}"
