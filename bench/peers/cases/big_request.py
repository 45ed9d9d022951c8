"""A request of 8192 tokens of Llama-3.1-70B over tcp, against what a link test gets out of the same link."""

from __future__ import annotations

from goals import faster, fastest
from offer import LINK
from run import Run

ORDER = 1
NAME = "big-request"
TOKENS = 8192
QUICK_TOKENS = 128


def measure(run: Run) -> None:
    tokens = QUICK_TOKENS if run.quick else TOKENS
    chosen = [one for one in run.offers if one.module == "iperf3" or one.is_backend("tcp")]
    for op in ("push", "pull"):
        found = run.compare(f"70B, {tokens} tokens, {op}", run.of_70b(op, tokens), chosen, per_round=1)
        links = fastest([row for row in found.rows if row.offer.kind == LINK])
        what = f"tcp, 70B bf16, {tokens} tokens, {op} ÷ iperf3's best"
        run.goals.append(faster(what, 1.2, found.row("kvxfer-tcp"), links))
