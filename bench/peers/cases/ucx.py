"""kvxfer over UCX beside a bare loop of UCP's calls, UCX's own test and NIXL: over tcp, and within this host's memory
with pools of kvxfer's (which go by cma) and of UCX's own allocation (which the other side maps).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from environment import MissingError
from goals import Unanswered, faster, fastest
from offer import Offer
from rounds import Comparison, Measured
from run import KIB, Run
from ucx_library import WAYS, UcxLibrary, Way

from cases.descriptors import own_cost

ORDER = 4
NAME = "ucx"
HOLLOW = Path(__file__).parent.parent / "native" / "hollow_ucp.cpp"
BARE = 0.97
NIXL = {"push": ("write", 1.4), "pull": ("read", 2.0)}
AROUND_UCX_NS = 200.0
PER_ROUND = 2
OTHERS = ("bare_ucp", "nixl", "ucx_perftest")


def measure(run: Run) -> None:
    offer = run.offered("kvxfer-ucx")
    if offer is None:
        run.goals.append(Unanswered("UCX", "it is not available here"))
        return
    for op, (done_by, bound) in NIXL.items():
        over_tcp, in_memory = (_compared(run, offer, transport, op) for transport in ("tcp", "memory"))
        ours = over_tcp.row("kvxfer-ucx-tcp")
        what = f"ucx over tcp, {op} ÷ NIXL's {done_by} over tcp"
        run.goals.append(faster(what, bound, ours, over_tcp.row("nixl-tcp")))
        for way in [one for one in WAYS if op in one.ops]:
            found = over_tcp if way.transport == "tcp" else in_memory
            what = f"ucx, {way.name}, {op} ÷ a bare loop of UCP's calls"
            run.goals.append(faster(what, BARE, found.row(f"kvxfer-ucx-{way.name}"), _bare(found, way)))
    _around_ucx(run, offer)


def _compared(run: Run, ucx: Offer, transport: str, op: str) -> Comparison:
    ours = [_by(ucx, way) for way in WAYS if way.transport == transport]
    others = [one for one in run.offers if one.module in OTHERS and one.transport == transport]
    title = f"UCX {'over tcp' if transport == 'tcp' else 'in memory'}, 64 KiB pieces, {op}"
    # How fast memory is copied depends on where its pages lie, which is a matter of chance: 10 % between two pairs.
    return run.compare(title, run.megabytes(op, 64 * KIB), [*ours, *others], PER_ROUND, anew=transport == "memory")


def _by(ucx: Offer, way: Way) -> Offer:
    return replace(
        ucx,
        name=f"kvxfer-ucx-{way.name}",
        transport=way.transport,
        ops=way.ops,
        environ=way.environ,
        options=ucx.options | {"options": way.kvxfer_options},
    )


def _bare(found: Comparison, way: Way) -> Measured | None:
    """The faster of the one that waits and the one that polls."""
    return fastest([row for row in found.rows if row.offer.name.startswith(f"bare-ucx-{way.name}")])


def _around_ucx(run: Run, offer: Offer) -> None:
    """With a UCX whose puts do nothing."""
    what = "own CPU per descriptor around UCX's calls"
    try:
        hollow = UcxLibrary.of_kvxfer().compiled(run.environment, HOLLOW)
    except MissingError as error:
        run.goals.append(Unanswered(what, str(error)))
        return
    run.goals.append(own_cost(run, what, AROUND_UCX_NS, replace(offer, environ={"KVXFER_UCX_LIBRARY": str(hollow)})))
