"""Every process and connection of a run killed, stopped and cut at every step of the protocol, for every backend."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from two_process.processes import Place

from kvxfer import _native
from kvxfer.backend.probe import MEASURES_NOTHING

from .matrix import VICTIMS, WITHOUT_RELAY, Case, Service, Steps, chain, chains
from .zygote import Zygote

pytestmark = pytest.mark.slow

BACKENDS = [name for name, _ in _native.backends() if name not in MEASURES_NOTHING and _native.probe(name).available]

AT_ONCE = 5
"""Chains of cases: most of them wait most of the time."""

CHAIN = 8

STEPS_APART = 1 if "KVXFER_EVERY_FAULT" in os.environ else 20
"""Every so many-th step is tried with a fault, unless all are asked for. Each fault begins one step later than the one
before, so that every step is hit for every backend."""


def faults(backend: str, steps: Steps, relayed: bool) -> list[list[Case]]:
    """Each victim with each signal, at every step of which it can know; a list for each pair of them."""
    victims = [one for one in VICTIMS if relayed or one != "data connections"]
    pairs = [(victim, number) for victim in victims for number in (signal.SIGSTOP, signal.SIGKILL)]
    pairs += [("bench", signal.SIGINT), ("serve", signal.SIGINT)]
    return [
        [Case(backend, *pair, step) for step in range(number % STEPS_APART, len(steps.labels), STEPS_APART)]
        for number, pair in enumerate(pairs)
    ]


def recorded(zygote: Zygote, place: Place, backend: str) -> tuple[Steps, bool]:
    """The steps of a clean run, and whether its data connections can be relayed. A second one has the same steps."""
    relayed = backend not in WITHOUT_RELAY
    service = Service(zygote, place, backend, "data connections" if relayed else "bench")
    try:
        first, second = service.whole_run(), service.whole_run()
        relayed = relayed and service.parts() != []
    finally:
        service.close()
    assert first == second
    assert len(first) > 40
    assert (first[0], first[-1]) == ("to serve: Hello", "to serve: Bye")
    return Steps(first), relayed


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_fault_at_every_step(zygote: Zygote, place: Place, backend: str) -> None:
    steps, relayed = recorded(zygote, place, backend)
    assert relayed or backend not in ("tcp", "shm")
    pieces = [piece for cases in faults(backend, steps, relayed) for piece in chains(cases, CHAIN)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [line for lines in pool.map(lambda cases: chain(zygote, cases, steps), pieces) for line in lines]
    print(f"{backend}: {sum(map(len, pieces))} cases, {len(steps.labels)} steps")
    assert not wrong, "\n".join(wrong)
