"""What a network can do to the data connections, at every kind of place in what they carry.

A run through it ends with the right status and within its deadlines, or, when nothing was lost, with a result that is
verified byte by byte. Only backends whose data goes over TCP: between processes of one host there is no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from two_process.processes import Place

from .matrix import Service, chains
from .spoiling import DELAY_S, Shuffle, Spoil
from .zygote import Zygote

pytestmark = pytest.mark.slow

AT_ONCE = 12

PLACES = (0, None, -1)
"""Before the first byte of a part, in the middle, before the last."""

GREETINGS = [("token", True), ("hello", True), ("answer", False)]
PLANS = [(name, up) for name in ("prepare", "payload of prepare") for up in (True, False)]
CHUNKS = [("header", True), ("payload", True)]
NOTICES = {
    "push": [("arm", False), ("confirm", False), ("release", False)],
    "pull": [("arm", True), ("request", False), ("delivered", False), ("release", False)],
}

ALONE = ("--backend-option", "connections=1")
"""One data connection, so that what a fault does to it is seen by the next request at the latest."""

STATUSES = {"drop": (5,), "delay": (0,), "truncate": (5,), "reset": (5,), "duplicate": (5,)}


def allowed(rule: Spoil) -> Sequence[int]:
    """The exit statuses that are right."""
    if rule.action == "duplicate" and rule.part == "answer":
        return 0, 2, 5  # may look like another version's; a byte more on a connection on which nothing else comes back
    if rule.action == "duplicate" and rule.part in ("hello", "prepare", "payload of prepare"):
        return 2, 5  # may look like another version's, or like another plan
    if rule.action == "duplicate" and rule.part in ("header", "payload"):
        return 4, 5  # wrong bytes, or no header where the next one belongs: whichever is seen first
    return STATUSES[rule.action]


def rules(op: str) -> list[Spoil]:
    parts = NOTICES[op] + CHUNKS + (GREETINGS + PLANS if op == "push" else [])
    return [Spoil(action, part, up, offset) for part, up in parts for offset in PLACES for action in STATUSES]


def through(zygote: Zygote, op: str, some: Sequence[Spoil]) -> list[str]:
    """Runs through relays, against one serve, and an undisturbed one at last. Returns what went wrong."""
    wrong = []
    place = Place()
    try:
        service = Service(zygote, place, "tcp", "data connections")
        try:
            for rule in some:
                status, err = service.spoiled(rule, "--op", op, *ALONE)
                lines = [line for line in err.splitlines() if not line.startswith("kvxfer bench: error: ")]
                if status not in allowed(rule) or lines or len(err.splitlines()) != (status != 0):
                    wrong.append(f"{op}, {rule}: ended with {status}: {err}")
            service.whole_run()
        finally:
            service.close()
    except AssertionError as error:
        wrong.append(f"{op}, {some[0]} and those after it: {error}")
    finally:
        place.close()
    return wrong


@pytest.mark.parametrize("op", list(NOTICES))
def test_one_fault_anywhere(zygote: Zygote, op: str) -> None:
    pieces = list(chains(rules(op), 10))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [line for lines in pool.map(lambda some: through(zygote, op, some), pieces) for line in lines]
    print(f"{op}: {sum(map(len, pieces))} faults")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", list(NOTICES))
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


def test_a_delay_is_part_of_the_time(zygote: Zygote, place: Place) -> None:
    """So the relay is on the way, and at the place that it says."""
    assert DELAY_S < 3
    service = Service(zygote, place, "tcp", "data connections")
    path = place.directory / "result.json"
    try:
        rule = Spoil("delay", "payload", offset=-1)
        assert service.spoiled(rule, "--json", str(path), *ALONE) == (0, "")
    finally:
        service.close()
    (row,) = json.loads(path.read_text())["results"]
    assert row["setup"]["first_ns"]["samples"][0] >= DELAY_S * 1e9
    assert row["verified"] == "full"
