"""The ratio as terminal tables: for each model and dtype the line rates, and under them what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
Justify = Literal["left", "right"]

ONE_RANK = "1→1"

LOOPBACK = "loopback: says nothing about the links"

CAPTION = (
    "seed: prefill is 2·params·N FLOP.\n"
    "full: active parameters without embedding, plus attention.\n"
    "(%) is the transfer's share of that row's prefill."
)
CAPTION_PER_RANK = "(busiest): of that, the most that one rank sends or receives; over its link the ms."
CAPTION_MEASURED = (
    "steady: median of the later transfers.\n"
    "cold: from start to the first confirmed transfer.\n"
    "(%) is the share of that row's prefill, which is assumed as above."
)


def render_ratio(rows: Sequence[Row], assumptions: Mapping[str, Any], console: Console) -> None:
    """Print a result's `ratio`: first what is assumed, then the tables."""
    console.print(_assumed(assumptions), highlight=False, markup=False)
    for table in ratio_tables(rows):
        console.print(table)
        console.print()


def ratio_tables(rows: Sequence[Row]) -> list[Table]:
    """One or two tables per model and dtype, in the order of a result's `ratio`: line rates, then measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"]), []).append(row)
    tables = []
    for (model, dtype), group in groups.items():
        tables.append(_line_rates(f"{model}, {dtype} KV cache: ASSUMED line rates against assumed prefill", group))
        if any(row["measured"] for row in group):
            tables.append(_measured(f"{model}, {dtype} KV cache: MEASURED transfer against assumed prefill", group))
    return tables


def _assumed(assumptions: Mapping[str, Any]) -> str:
    parameters = ""
    if assumptions["params"] is not None:
        parameters = f", {assumptions['params'] / 1e9:.4g}e9 parameters ({assumptions['params_source']})"
    given = assumptions.get("kv_bytes_per_token")
    cache = "" if given is None else f", {given:,} B of KV cache per token (--kv-bytes-per-token)"
    gpus = assumptions["gpus"]
    return (
        f"Assumed, not measured: {gpus} GPU{'s' * (gpus > 1)} for prefill at {assumptions['eff_tflops']:g} TFLOP/s"
        f"{' each' * (gpus > 1)}{parameters}{cache}, links at "
        f"{', '.join(f'{rate:g}' for rate in assumptions['link_gbit'])} Gb/s line rate"
        f"{_between_ranks(assumptions)}{_hits(assumptions)}"
    )


def _between_ranks(assumptions: Mapping[str, Any]) -> str:
    """The ranks of both sides and whose the links are; nothing where each side has one rank."""
    tp, pp = (assumptions.get(name, {"prefill": 1, "decode": 1}) for name in ("tp", "pp"))
    if _sides(tp) == _sides(pp) == ONE_RANK:
        return ""
    links = "one link that all ranks share"
    if not assumptions.get("links_shared", True):
        links = "a link of its own for every rank (the busiest one counts)"
    prefill, decode = (tp[side] * pp[side] for side in ("prefill", "decode"))
    ranks = f"prefill on {prefill} rank{'s' * (prefill > 1)}, decode on {decode}"
    return f", {links}, {ranks} (TP {_sides(tp)}, PP {_sides(pp)})"


def _sides(counts: Mapping[str, int]) -> str:
    return f"{counts['prefill']}→{counts['decode']}"


def _hits(assumptions: Mapping[str, Any]) -> str:
    prefill, decode = (assumptions.get(f"prefix_hit_{side}", 0) for side in ("prefill", "decode"))
    if not prefill and not decode:
        return ""
    return f", prefix-cache hits of {prefill:.4g} at prefill and {decode:.4g} at decode"


def _line_rates(title: str, rows: Sequence[Row]) -> Table:
    per_rank = not rows[0].get("links_shared", True)
    table = _table(title, f"{CAPTION_PER_RANK}\n{CAPTION}" if per_rank else CAPTION)
    _column(table, "tokens")
    _column(table, "KV moved\nGB\n(busiest)" if per_rank else "KV moved\nGB")
    _column(table, "basis", "left")
    _column(table, "prefill\nassumed\nms")
    for link in rows[0]["links"]:
        _column(table, f"{link['line_gbit']:g} Gb/s\nline rate,\nassumed\nms (%)")
    for row in rows:
        links = [_cell(link["transfer_ms"], link["percent"]) for link in row["links"]]
        size, prefill = _number(row["bytes"] / 1e9), _number(row["prefill_ms"])
        size += f" ({_number(row['busiest_rank_bytes'] / 1e9)})" if per_rank else ""
        table.add_row(f"{row['tokens']:,}", size, row["basis"], prefill, *links)
    return table


def _measured(title: str, rows: Sequence[Row]) -> Table:
    """A line for each prompt length, basis and row of the results."""
    table = _table(title, CAPTION_MEASURED)
    _column(table, "tokens")
    _column(table, "basis", "left")
    _column(table, "steady\nms (%)")
    _column(table, "cold\nms (%)")
    _column(table, "backend", "left")
    _column(table, "op", "left")
    ranks = any(_ranks(entry) != _ranks({}) for row in rows for entry in row["measured"]) or "links_shared" in rows[0]
    if ranks:
        _column(table, "TP P→D,\nPP P→D", "left")
    _column(table, "scope", "left")
    for row in rows:
        for entry in row["measured"]:
            steady = _cell(entry["transfer_ms"], entry["percent"])
            cold = _cell(entry["cold_ms"], entry["cold_percent"])
            who = [_ranks(entry)] if ranks else []
            carried = map(Text, (entry.get("backend", "?"), entry.get("op", "?"), *who, _scope(entry)))
            table.add_row(f"{row['tokens']:,}", row["basis"], steady, cold, *carried)
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        caption=Text(caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )


def _column(table: Table, header: str, justify: Justify = "right") -> None:
    table.add_column(header, justify=justify, overflow="fold")  # a figure is never cut short


def _ranks(entry: Row) -> str:
    return ", ".join(_sides(entry.get(name, {"prefill": 1, "decode": 1})) for name in ("tp", "pp"))


def _scope(entry: Row) -> str:
    if entry.get("backend") == "null":
        return f"{entry['scope']}: null moves no bytes"
    return LOOPBACK if entry["scope"] == "loopback" else str(entry["scope"])


def _cell(milliseconds: float | None, percent: float | None) -> str:
    """`53.7 (30.0%)`; a time that has too few samples for a median is said to."""
    if milliseconds is None or percent is None:
        return "too few samples"
    return f"{_number(milliseconds)} ({_number(percent)}%)"


def _number(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
