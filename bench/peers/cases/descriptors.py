"""What a descriptor costs in our own code, outside system calls and libraries: preparing and moving many tiny ones.

User time of one side's process, all its threads. Moving bytes over sockets is system time; what memory transports copy
is taken off as the time copy_pieces needs for the same pieces. The pieces are tiny so that this is little.
"""

from __future__ import annotations

from goals import Goal, Unanswered
from jobs import scattered
from offer import MOVES, Offer
from pair import started
from run import Run

ORDER = 5
NAME = "descriptors"
BOUND_NS = 100.0
DESCRIPTORS = 81_920
PIECE = 64
REGIONS = 80
REPEATS = 20
COPIES = 5
NULL = Offer("kvxfer-null", "kvxfer_backends", MOVES, "memory", "", options={"backend": "null"})


def measure(run: Run) -> None:
    for offer in [*[one for one in run.offers if one.ours], NULL]:
        what = f"own CPU per descriptor, {offer.name.removeprefix('kvxfer-')}"
        if "push" not in offer.ops:
            run.goals.append(Unanswered(what, "it does not push"))
        elif not offer.is_backend("ucx"):  # whose library's work is not ours: the case ucx tells them apart
            run.goals.append(own_cost(run, what, BOUND_NS, offer))


def own_cost(run: Run, what: str, bound_ns: float, offer: Offer) -> Goal:
    """Of a push, over preparing, posting and moving."""
    run.say(what)
    repeats = 1 if run.quick else REPEATS
    job = scattered("push", PIECE, REGIONS, DESCRIPTORS // REGIONS)
    with started(offer, job) as pair:
        pair.call("own_cpu", 1, 1)
        copying = max(pair.call("copying", COPIES)) if offer.transport == "memory" else 0
        rounds = [pair.call("own_cpu", repeats, 2 + turn * repeats) for turn in range(run.rounds)]
    costs = [max(0.0, (max(sides) / repeats - copying) / job.descriptors) for sides in rounds]
    note = "the side that pays more" + f", {copying / job.descriptors:.0f} ns of copying taken off" * (copying > 0)
    return Goal(what, bound_ns, False, costs, "ns", note)
