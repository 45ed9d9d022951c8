"""What can happen to the control connection on its way, at every message of a run and of the handshake before it.

A run through it ends with the right status and within its deadlines, and serve takes the next one. What carries the
data has no part in it, so one backend does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from two_process.processes import Place

from .matrix import Service, ended_well
from .spoiling import Shuffle, Spoil
from .zmtp import GREETING, SEALED
from .zygote import Zygote

pytestmark = pytest.mark.slow

BACKEND = "tcp"

AT_ONCE = 6
CHAIN = 3

EVERY = "KVXFER_EVERY_FAULT" in os.environ

APART = 1 if EVERY else 28
"""Every so many-th message is tried with a fault. Each fault begins one message later than the one before."""

SEALED_APART = 6
"""And of those that CURVE has sealed, which all look alike, first so many-th at all."""

PLACES = (0, None, -1)
"""Before the first byte of a message, in the middle, before the last; one of them in turn, unless all are asked for."""

ACTIONS = ("drop", "delay", "truncate", "reset", "duplicate")

WATCHED = Spoil("delay", "nothing of that name")
"""Changes nothing that passes."""

HEARTBEAT = "Heartbeat"

COMMANDS = ("READY", "HELLO", "WELCOME", "INITIATE")
"""Of the handshake; all but the first with keys."""


@dataclass(frozen=True)
class Step:
    """A message, and how many of its name and direction there were before."""

    name: str
    up: bool
    nth: int


def steps(parts: Sequence[tuple[str, bool]]) -> list[Step]:
    """Of a run, those up first; but for what only repeats the two before."""
    new = [at for at, part in enumerate(parts) if at < 2 or parts[at - 2] != part]
    found = [Step(*parts[at], parts[:at].count(parts[at])) for at in new]
    return sorted(found, key=lambda step: not step.up)  # the two directions of a handshake are in no order


def rules(some: Sequence[Step]) -> Iterator[Spoil]:
    for number, action in enumerate(ACTIONS):
        for turn, step in enumerate(some[number % APART :: APART]):
            for place in PLACES if EVERY else (PLACES[turn % len(PLACES)],):
                yield Spoil(action, step.name, step.up, place, step.nth)


def allowed(rule: Spoil) -> Sequence[int]:
    """The exit statuses that are right."""
    if rule.action == "delay" or rule.part == "Bye":
        return (0,)  # who has said goodbye needs nobody any more
    if rule.part in GREETING or rule.part in COMMANDS:
        # ZeroMQ connects again, but does not say again what it has said; a silence it does not break.
        return {"drop": (5,), "duplicate": (0, 2, 5)}.get(rule.action, (0, 5) if rule.part == "READY" else (0,))
    if rule.action == "duplicate" and rule.part == "Dismissed" and rule.offset == -1:
        return (0,)  # all of it was there
    if rule.action == "duplicate" and rule.part != SEALED:
        return 2, 5  # as malformed: whoever sees it first tells
    return (5,)


def through(zygote: Zygote, keyed: bool, some: Sequence[Spoil]) -> list[str]:
    """Runs through relays, against one serve, and an undisturbed one at last. Returns what went wrong."""
    wrong = []
    place = Place()
    try:
        service = Service(zygote, place, BACKEND, "control connection", keyed)
        try:
            for rule in some:
                status, err = service.spoiled(rule)
                happened = service.parts().count((rule.part, rule.up)) > rule.nth
                if not happened or not ended_well(status, err, allowed(rule)):
                    wrong.append(f"{rule}{'' if happened else ' did not happen'}: ended with {status}: {err}")
            service.whole_run()
        finally:
            service.close()
    except AssertionError as error:
        wrong.append(f"{some[0]} and those after it: {error}")
    finally:
        place.close()
    return wrong


def recorded(zygote: Zygote, place: Place, keyed: bool) -> list[tuple[str, bool]]:
    """What passes in an undisturbed run, but for heartbeats, which come at any time."""
    service = Service(zygote, place, BACKEND, "control connection", keyed)
    try:
        assert service.spoiled(WATCHED) == (0, "")
        return [part for part in service.parts() if part[0] != HEARTBEAT]
    finally:
        service.close()


def fail_where_wrong(zygote: Zygote, keyed: bool, some: Sequence[Step]) -> None:
    faults = list(rules(some))
    chains = -(-len(faults) // CHAIN)  # with every kind of fault in each: those that are waited for are of one kind
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda first: through(zygote, keyed, faults[first::chains]), range(chains))
        wrong = [line for lines in found for line in lines]
    print(f"{len(faults)} faults, {len(some)} messages{' with keys' if keyed else ''}")
    assert not wrong, "\n".join(wrong)


def test_every_fault_at_every_message(zygote: Zygote, place: Place) -> None:
    messages = steps(recorded(zygote, place, keyed=False))
    assert messages == steps(recorded(zygote, place, keyed=False))
    assert [step.name for step in messages if step.up][-2:] == ["Dismiss", "Bye"]
    assert len(messages) > 40
    fail_where_wrong(zygote, False, messages)


def test_the_same_with_keys(zygote: Zygote, place: Place) -> None:
    """The relay cannot know which of the sealed messages it has: one before the last of a run without heartbeats."""
    plain = recorded(zygote, place, keyed=False)
    sealed = recorded(zygote, place, keyed=True)
    handshake = [part for part in sealed if part[0] != SEALED]
    assert {name for name, _ in handshake} == {*GREETING, *COMMANDS}
    messages = [part for part in plain if part not in handshake]
    later = [
        Step(SEALED, up, nth)
        for up in (True, False)
        for nth in range(0, [way for _, way in messages].count(up) - 1, SEALED_APART)
    ]
    fail_where_wrong(zygote, True, steps(handshake) + later)


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keys"])
def test_pieces_of_any_size(zygote: Zygote, place: Place, keyed: bool) -> None:
    """Messages that TCP cuts anywhere, and those of a while that come at once."""
    service = Service(zygote, place, BACKEND, "control connection", keyed)
    try:
        assert service.spoiled(Shuffle(seed=0, notices_s=0.01, data_s=0), seconds=60) == (0, "")
    finally:
        service.close()
