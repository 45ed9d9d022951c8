"""A request of 16 tokens over tcp: what our threads, notices and queues add to a bare ping-pong of the same bytes."""

from __future__ import annotations

from goals import Goal, Unanswered, fastest, speed_ratios
from run import Run

ORDER = 6
NAME = "small-request"
TOKENS = 16
PER_ROUND = 50


def measure(run: Run) -> None:
    chosen = [one for one in run.offers if one.module == "bare_sockets" or one.is_backend("tcp")]
    found = run.compare("70B, 16 tokens, push", run.of_70b("push", TOKENS), chosen, PER_ROUND)
    ours, bare = found.row("kvxfer-tcp"), fastest([row for row in found.rows if row.offer.module == "bare_sockets"])
    what = "a 16-token request over tcp, confirmed ÷ bare ping-pong of the same bytes"
    if ours is None or bare is None:
        run.goals.append(Unanswered(what, "no bare sockets (or no tcp) here"))
        return
    run.goals.append(Goal(what, 1.3, False, speed_ratios(bare, ours), note=f"kvxfer-tcp ÷ {bare.offer.name}"))
