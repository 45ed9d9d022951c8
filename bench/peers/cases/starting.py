"""Fresh pairs of processes: what setting up a pair costs, and the first request against the later ones."""

from __future__ import annotations

import numpy as np
from goals import Goal, Unanswered
from job import Job
from offer import Offer
from pair import started
from run import KIB, Run

ORDER = 7
NAME = "starting"
LATER = 10


def measure(run: Run) -> None:
    ours, nixl = run.offered("kvxfer-tcp"), run.offered("nixl-tcp")
    if ours is None:
        return
    _setup(run, ours, nixl)
    for name, job in (
        ("16 tokens of 70B", run.of_70b("push", 16)),
        ("64 KiB pieces", run.megabytes("push", 64 * KIB)),
    ):
        _first(run, ours, name, job)


def _setup(run: Run, ours: Offer, nixl: Offer | None) -> None:
    what = "setup of a pair: NIXL tcp ÷ kvxfer tcp"
    if nixl is None:
        run.goals.append(Unanswered(what, "no NIXL here"))
        return
    run.say(what)
    job = run.megabytes("push", 64 * KIB)
    taken = [[_setup_ns(offer, job) for offer in (nixl, ours)] for _ in range(run.rounds)]
    theirs, own = np.median(taken, axis=0) / 1e6
    note = f"{theirs:.0f} ÷ {own:.1f} ms; opened, registered, connected and prepared, memory apart"
    run.goals.append(Goal(what, 20.0, True, [them / us for them, us in taken], note=note))


def _setup_ns(offer: Offer, job: Job) -> int:
    with started(offer, job) as pair:
        return pair.setup_ns


def _first(run: Run, ours: Offer, name: str, job: Job) -> None:
    what = f"first ÷ steady request, tcp, {name}"
    run.say(what)
    ratios = []
    for _ in range(run.rounds):
        with started(ours, job) as pair:
            first = pair.move(1).ns[0]
            ratios.append(first / float(np.median(pair.move(LATER).ns)))
    run.goals.append(Goal(what, 3.0, False, ratios))
