"""256 MiB in 64 KiB pieces: every contender there is, over tcp and within this host's memory."""

from __future__ import annotations

from goals import faster, fastest
from offer import MOVES
from rounds import Comparison
from run import KIB, Run

ORDER = 2
NAME = "scattered"
BOUNDS = {"push": 2.5, "pull": 3.0}
DONE_BY = {"push": "write", "pull": "read"}


def everyone(run: Run, op: str) -> Comparison:
    """Not the bare loops over UCX, which are for the case ucx."""
    chosen = [one for one in run.offers if one.module != "bare_ucp"]
    return run.compare(f"64 KiB pieces, {op}", run.megabytes(op, 64 * KIB), chosen)


def measure(run: Run) -> None:
    for op, bound in BOUNDS.items():
        found = everyone(run, op)
        engines = [
            row for row in found.rows if row.offer.kind == MOVES and row.offer.transport == "tcp" and not row.offer.ours
        ]
        what = f"tcp {op} ÷ the best engine's tcp {DONE_BY[op]}, 64 KiB pieces"
        run.goals.append(faster(what, bound, found.row("kvxfer-tcp"), fastest(engines)))
