"""A run as tables and as a record for JSON."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from goals import Goal, Unanswered
from rich.console import Console
from rich.table import Table
from rounds import Comparison
from run import Run

from kvxfer import __version__
from kvxfer.measure.host import host_info

SCHEMA_VERSION = 1
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def record(run: Run) -> dict[str, Any]:
    """See README.md for what the fields mean."""
    answered = [goal.record() for goal in run.goals if isinstance(goal, Goal)]
    unanswered = [{"what": one.what, "why": one.why} for one in run.goals if isinstance(one, Unanswered)]
    return {
        "schema_version": SCHEMA_VERSION,
        "kvxfer_version": __version__,
        "created_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": msgspec.to_builtins(host_info()),
        "congestion_control": CONGESTION_CONTROL.read_text().strip(),
        "rounds": run.rounds,
        "quick": run.quick,
        "contenders": [{"name": one.name, "version": one.version, "kind": one.kind} for one in run.offers],
        "left_out": [{"name": one.name, "why": one.why} for one in run.environment.left_out],
        "comparisons": [one.record() for one in run.comparisons],
        "goals": answered,
        "unanswered": unanswered,
    }


def show(run: Run, console: Console) -> None:
    host = host_info()
    console.print(f"{host.cpu_model}, {host.cpus} CPUs, Linux {host.kernel}, load {host.load_average:.1f}; loopback")
    for comparison in run.comparisons:
        console.print(_comparison(comparison))
    for one in run.environment.left_out:
        console.print(f"left out: {one.name}: {one.why}", markup=False)
    if run.goals:
        console.print(_goals(run))


def _comparison(comparison: Comparison) -> Table:
    job = comparison.job
    title = f"{comparison.title}: {job.bytes / 1e6:,.0f} MB in {job.descriptors:,} pieces"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="")
    for column in ("contender", "moves"):
        table.add_column(column, no_wrap=True)
    for column in ("p50 ms", "± IQR", "GB/s", "first ms", "CPU s/GiB\ninitiator", "CPU s/GiB\ntarget"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in sorted(comparison.rows, key=lambda one: one.median_ns):
        table.add_row(
            row.offer.name,
            row.offer.kind,
            f"{row.median_ns / 1e6:.2f}",
            f"{row.spread_ns / row.median_ns:.1%}",
            f"{row.gbyte_s:.2f}",
            f"{row.first_ns / 1e6:.2f}",
            f"{row.cpu_s_per_gib('initiator'):.2f}",
            f"{row.cpu_s_per_gib('target'):.2f}",
        )
    return table


def _goals(run: Run) -> Table:
    table = Table(title="Goals", title_justify="left", box=None, padding=(0, 1), header_style="")
    table.add_column("what")
    for column in ("goal", "reached", "range"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("met")
    table.add_column("of")
    for goal in run.goals:
        if isinstance(goal, Unanswered):
            table.add_row(goal.what, "", "–", "", "unknown", goal.why)
            continue
        bound = f"{'≥' if goal.at_least else '≤'} {goal.bound:g} {goal.unit}".strip()
        spread = f"{_short(min(goal.ratios))}–{_short(max(goal.ratios))}"
        table.add_row(goal.what, bound, _short(goal.reached), spread, "yes" if goal.met else "no", goal.note)
    return table


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
