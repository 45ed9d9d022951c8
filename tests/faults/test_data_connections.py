"""What can happen to the data connections on their way, at every kind of place in what they carry.

A run through it ends with the right status and within its deadlines, or, when nothing was lost, with a result that is
verified byte by byte. A network does such things to TCP; to the Unix sockets of one host only what sits between does,
such as a proxy between containers, but there too nothing may hang, be left or be taken for good.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from two_process.processes import Place

from .matrix import Service, chains, ended_well
from .spoiling import DELAY_S, Shuffle, Spoil
from .zygote import Zygote

pytestmark = pytest.mark.slow

AT_ONCE = 6
CHAIN = 6

PLACES = (0, None, -1)
"""Before the first byte of a part, in the middle, before the last."""

FEWER = {"drop": (0,), "delay": (0,), "truncate": (0,), "reset": (0,), "duplicate": (None,)}
"""Between processes over a Unix socket: test_relay_in_process.py tries all of them."""

GREETINGS = [("token", True), ("hello", True), ("answer", False)]
PLANS = [(name, up) for name in ("prepare", "payload of prepare") for up in (True, False)]
POOLS = [(name, up) for name in ("pool_wanted", "pool") for up in (True, False)]
CHUNKS = [("header", True), ("payload", True)]
NOTICES = {
    ("tcp", "push"): [("arm", False), ("confirm", False), ("release", False)],
    ("tcp", "pull"): [("arm", True), ("request", False), ("delivered", False), ("release", False)],
    ("shm", "push"): [("arm", False), ("written", True), ("confirm", False), ("release", False)],
    ("shm", "pull"): [("arm", True), ("delivered", False), ("release", False)],
}

QUIETLY = Shuffle(0, 0, 0)
"""Changes nothing that passes but its pieces."""

ALONE = {"tcp": ("--backend-option", "connections=1"), "shm": ()}
"""One data connection, so that what a fault does to it is seen by the next request at the latest."""

STATUSES = {"drop": (5,), "delay": (0,), "truncate": (5,), "reset": (5,), "duplicate": (5,)}


def allowed(rule: Spoil) -> Sequence[int]:
    """The exit statuses that are right."""
    if rule.action == "kill":
        return (5,)
    if rule.action == "strip":
        return (3,)  # as a descriptor that this process has no room for
    if rule.action == "duplicate" and rule.part == "answer":
        return 0, 2, 5  # may look like another version's; a byte more on a connection on which nothing else comes back
    if rule.action == "duplicate" and rule.part in ("hello", "prepare", "payload of prepare"):
        return 2, 5  # may look like another version's, or like another plan
    if rule.action == "duplicate" and rule.part in ("header", "payload"):
        return 4, 5  # wrong bytes, or no header where the next one belongs: whichever is seen first
    return STATUSES[rule.action]


def parts(backend: str, op: str) -> list[tuple[str, bool]]:
    """All that passes, but for the farewell."""
    more = CHUNKS if backend == "tcp" else POOLS
    return GREETINGS + PLANS + NOTICES[backend, op] + more


def rules(backend: str, op: str) -> list[Spoil]:
    """Every fault at every place of every part. What is the same for both operations is tried with a push only."""
    found = []
    for part, up in parts(backend, op):
        if op == "push" or (part, up) in NOTICES[backend, op] + CHUNKS:
            places = {action: PLACES if backend == "tcp" else FEWER[action] for action in STATUSES}
            found += [Spoil(action, part, up, offset) for action in STATUSES for offset in places[action]]
            if backend == "shm":
                found.append(Spoil("kill", part, up))
            if part == "pool":
                found.append(Spoil("strip", part, up))
    return found


def through(zygote: Zygote, backend: str, op: str, some: Sequence[Spoil]) -> list[str]:
    """Runs through relays, against one serve, and an undisturbed one at last. Returns what went wrong."""
    wrong = []
    place = Place()
    try:
        service = Service(zygote, place, backend, "data connections")
        try:
            for rule in some:
                status, err = service.spoiled(rule, "--op", op, *ALONE[backend])
                if not ended_well(status, err, allowed(rule)):
                    wrong.append(f"{op}, {rule}: ended with {status}: {err}")
            service.whole_run()
        finally:
            service.close()
    except AssertionError as error:
        wrong.append(f"{op}, {some[0]} and those after it: {error}")
    finally:
        place.close()
    return wrong


@pytest.mark.parametrize(("backend", "op"), NOTICES)
def test_one_fault_anywhere(zygote: Zygote, backend: str, op: str) -> None:
    pieces = list(chains(rules(backend, op), CHAIN))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda some: through(zygote, backend, op, some), pieces)
        wrong = [line for lines in found for line in lines]
    print(f"{backend}, {op}: {sum(map(len, pieces))} faults")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("backend", "op"), NOTICES)
def test_nothing_else_passes(zygote: Zygote, place: Place, backend: str, op: str) -> None:
    """Otherwise there would be places where no fault is tried."""
    service = Service(zygote, place, backend, "data connections")
    try:
        assert service.spoiled(QUIETLY, "--op", op, *ALONE[backend]) == (0, "")
        assert {part for part in service.parts() if part[0] != "bye"} == set(parts(backend, op))
    finally:
        service.close()


@pytest.mark.parametrize("op", ["push", "pull"])
@pytest.mark.parametrize(
    ("notices_s", "data_s"), [(0, 0.005), (0.005, 0), (0.003, 0.003)], ids=["data-late", "notices-late", "both"]
)
def test_connections_that_overtake_each_other(
    zygote: Zygote, place: Place, op: str, notices_s: float, data_s: float
) -> None:
    """In pieces of any size, and in any order between connections: within one, TCP keeps it."""
    service = Service(zygote, place, "tcp", "data connections")
    options = ("--op", op, "--tokens", "64", "--inflight", "3")
    many = ("--backend-option", "connections=4", "--backend-option", "chunk_kib=4")
    try:
        for seed in range(2):
            rule = Shuffle(seed, notices_s, data_s)
            assert service.spoiled(rule, *options, *many, seconds=60) == (0, "")
    finally:
        service.close()


@pytest.mark.parametrize(("backend", "part"), [("tcp", "payload"), ("shm", "written")])
def test_a_delay_is_part_of_the_time(zygote: Zygote, place: Place, backend: str, part: str) -> None:
    """So the relay is on the way, and at the place that it says."""
    assert DELAY_S < 3
    service = Service(zygote, place, backend, "data connections")
    path = place.directory / "result.json"
    try:
        rule = Spoil("delay", part, offset=-1)
        assert service.spoiled(rule, "--json", str(path), *ALONE[backend]) == (0, "")
    finally:
        service.close()
    (row,) = json.loads(path.read_text())["results"]
    assert row["setup"]["first_ns"]["samples"][0] >= DELAY_S * 1e9
    assert row["verified"] == "full"


def test_a_relay_is_not_taken_for_the_peer(zygote: Zygote, place: Place) -> None:
    """cma moves data to and from the process that the kernel names: never into one that only passes notices on."""
    service = Service(zygote, place, "cma", "data connections")
    try:
        status, err = service.spoiled(QUIETLY)
    finally:
        service.close()
    assert status in (2, 3, 5), err
    assert err.startswith("kvxfer bench: error: "), err
    assert len(err.splitlines()) <= 2, err
