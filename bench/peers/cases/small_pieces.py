"""The same bytes in 16 KiB pieces."""

from __future__ import annotations

from goals import faster
from offer import MOVES
from run import KIB, Run

ORDER = 3
NAME = "small-pieces"


def measure(run: Run) -> None:
    chosen = [offer for offer in run.offers if offer.kind == MOVES]
    found = run.compare("16 KiB pieces, push", run.megabytes("push", 16 * KIB), chosen)
    what = "tcp push ÷ NIXL's tcp write, 16 KiB pieces"
    run.goals.append(faster(what, 4.0, found.row("kvxfer-tcp"), found.row("nixl-tcp")))
