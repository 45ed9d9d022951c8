"""What can happen to the packets of data connections, at each of them: of every backend whose bytes cross a network.

UCX makes its connections itself, to addresses that it learns on the way, so that no relay of streams is ever on them.
Here the link itself does it, between two hosts. TCP makes good for some of it: then the run succeeds, and every byte is
right. For the rest nothing does: then the run ends within its deadlines, and says why. Either way the same serve takes
the next client.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from requirements import need
from two_process.processes import Place

from kvxfer import _native

from .matrix import WITHIN_S, Service, chains, ended_well
from .packets import DESTROYING, HOLD_S, REPAIRED, Link, Rule, link
from .zygote import Zygote

pytestmark = pytest.mark.slow

AT_ONCE = 4
CHAIN = 3, 8
"""Faults that one serve takes, one after another: at least, where there are so many, and at most."""

APART = 1 if "KVXFER_EVERY_FAULT" in os.environ else 293
"""Every so many-th of all faults is tried, unless all are asked for."""

OPS = ("push", "pull")

ONE_CONNECTION = {"tcp": ("--backend-option", "connections=1"), "ucx": ()}
"""So that what a fault does to it is seen by the next request at the latest."""

LARGE = 4096  # bytes of a segment of payload, which no notice has

LONGEST_PATTERN = 7  # of segments that come again and again

PLAN = 120  # bytes of a segment that tells of a plan; what comes before is the wire-up, the same for either op

FAREWELL = 3
"""The last so many segments of a direction at most are no longer needed: those that end its connections."""


Sizes = dict[bool, list[int]]
"""Payload bytes of the segments of a run, upwards and downwards."""


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    status: int | None
    err: str
    result: dict[str, Any]
    struck: bool
    sizes: Sizes

    @property
    def row(self) -> dict[str, Any]:
        (row,) = self.result["results"]
        assert isinstance(row, dict)
        return row

    def succeeded(self) -> bool:
        return ended_well(self.status, self.err, (0,)) and self.row["verified"] == "full"


@dataclass(frozen=True)
class Case:
    op: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.op}, {self.rule}"


class ServiceOnLink(Service):
    """A serve on one host, and its benches on the other. A pool has room for few requests, so that few are prepared."""

    options_of_serve = ("--max-gib", "0.0001")

    def __init__(self, zygote: Zygote, place: Place, backend: str, over: Link) -> None:
        self._link = over
        self.host = over.decode.address
        super().__init__(zygote, place, backend, "link", keyed=True)

    def _start(self, function: str, *arguments: Any) -> Any:
        host = self._link.decode if function == "serve" else self._link.prefill
        return super()._start("on_host", host.namespace, function, arguments)

    def run(self, op: str, rule: Rule | None) -> Ended:
        """A run over a link with that rule. Nothing of it is left."""
        self._link.begin(rule, self._port)
        path = self._place.directory / "result.json"
        path.unlink(missing_ok=True)
        bench, _ = self.bench(None, more=("--op", op, "--json", str(path), *ONE_CONNECTION[self._backend]))
        status, err = bench.wait(WITHIN_S), bench.err
        bench.close()
        self._link.mend()
        self.settle()
        result = json.loads(path.read_text()) if path.exists() else {}
        return Ended(status, err, result, self._link.struck, self._link.sizes)


@contextlib.contextmanager
def served(zygote: Zygote, backend: str) -> Iterator[tuple[ServiceOnLink, Link]]:
    """Nothing of it is left. Raises AssertionError."""
    place = Place()
    try:
        with link() as over:
            service = ServiceOnLink(zygote, place, backend, over)
            try:
                yield service, over
            finally:
                service.close()
    finally:
        place.close()


def recorded(zygote: Zygote, backend: str, op: str) -> Sizes:
    """The segments of a clean run; after a look whether they cross this link, where a wait is part of the time."""
    with served(zygote, backend) as (service, over):
        clean = service.run(op, None)
        assert clean.succeeded(), clean
        assert clean.row["transport"] == f"tcp/{over.prefill.interface}"
        first = next(number for number, size in enumerate(clean.sizes[True]) if size >= LARGE)
        held = service.run(op, Rule("hold", first))
        assert held.succeeded(), held
        assert held.row["setup"]["first_ns"]["samples"][0] >= HOLD_S * 1e9
    return clean.sizes


def steps(op: str, sizes: Sequence[int]) -> list[int]:
    """The numbers of the segments but for those that only repeat what came before."""
    begin = sizes.index(PLAN) if op == "pull" else 0
    return [number for number in range(begin, len(sizes)) if not repeats(sizes[: number + 1])]


def repeats(sizes: Sequence[int]) -> bool:
    """Whether they end with a pattern for the second time in a row; for the third, if it is of one or two."""
    for period in range(1, LONGEST_PATTERN + 1):
        length = period * (3 if period <= 2 else 2)
        end = sizes[-length:]
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False


def cases(op: str, sizes: Sizes) -> list[Case]:
    """Each fault at every step, of either direction."""
    return [
        Case(op, Rule(action, nth, up))
        for action in REPAIRED + DESTROYING
        for up in (True, False)
        for nth in steps(op, sizes[up])
    ]


def through(zygote: Zygote, backend: str, sizes: dict[str, Sizes], some: Sequence[Case]) -> list[str]:
    """Runs over a link that does this, against one serve, and an undisturbed one at last. Returns what went wrong."""
    wrong = []
    corrupted = 0
    try:
        with served(zygote, backend) as (service, over):
            for case in some:
                ended = service.run(case.op, case.rule)
                corrupted += ended.struck and case.rule.action == "corrupt"
                count = len(sizes[case.op][case.rule.up])
                if not is_right(case.rule, ended, count):
                    wrong.append(f"{backend}, {case} of {count}: {ended}")
            assert service.run(some[0].op, None).succeeded()
            noticed = sum(host.tcp_counter("InCsumErrors") for host in (over.prefill, over.decode))
            assert noticed >= corrupted
    except AssertionError as error:
        wrong.append(f"{backend}, {some[0]} and those after it: {error}")
    return wrong


def is_right(rule: Rule, ended: Ended, count: int) -> bool:
    """`count`: how many segments this direction has in a clean run."""
    if not ended.struck or rule.action in REPAIRED:
        return ended.succeeded()
    return ended_well(ended.status, ended.err, (5,)) or (rule.nth >= count - FAREWELL and ended.succeeded())


@pytest.mark.parametrize("backend", ONE_CONNECTION)
def test_one_fault_at_every_segment(zygote: Zygote, backend: str) -> None:
    need("netns")
    need("tun")
    if not _native.probe(backend).available:
        pytest.skip(_native.probe(backend).why_not)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sizes = dict(zip(OPS, pool.map(lambda op: recorded(zygote, backend, op), OPS), strict=True))
        every = [case for op in OPS for case in cases(op, sizes[op])]
        chosen = every[::APART]
        pieces = chains(chosen, min(max(CHAIN[0], len(chosen) // AT_ONCE), CHAIN[1]))
        found = pool.map(lambda some: through(zygote, backend, sizes, some), pieces)
        wrong = [line for lines in found for line in lines]
    print(f"{backend}: {len(chosen)} of {len(every)} faults")
    assert not wrong, "\n".join(wrong)
