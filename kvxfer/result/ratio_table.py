"""The ratio as terminal tables: for each model and dtype the line rates, and under them what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.result.file import ONE_HOST_SCOPES
from kvxfer.result.printing import NONE, Column, counted, figure, print_table, print_trimmed
from kvxfer.wording import plain, told_requests

Row = Mapping[str, Any]

ONE_RANK = "1→1"

PER_RANK = "(busiest): of that, the most that one rank sends or receives; over its link the ms."
SEED = "seed: prefill is 2·params·N FLOP for N tokens."
SEED_AFTER_HITS = "seed: prefill is 2·params·N FLOP for the N tokens that its prefix cache lacks."
FULL = "full: active parameters without embedding, plus attention."
FULL_AFTER_HITS = "full: active parameters without embedding for these, plus their attention to the whole prompt."
SHARE = "(%) is the transfer's share of that row's prefill."
MEASURED = (
    "steady: median of the later transfers.",
    "cold: the first request of a pair of running engines (connect, keys, plan, transfer), median of the fresh starts.",
)
PREDICTED = (
    "from – to: with α, γ and β all at the same ends of their 95 % intervals; held out: how far off the model was.",
    "cold: the first request of a pair of running engines, fitted on fresh starts; from – to: 95 % of single starts.",
)
ITS_SHARE = "(%) is the share of that row's prefill, "


def render_ratio(rows: Sequence[Row], assumptions: Mapping[str, Any], console: Console) -> None:
    """Print a result's `ratio`: first what is assumed, then for each model and dtype the line rates, then measured."""
    print_trimmed(Text(_assumed(assumptions)), console)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"]), []).append(row)
    for (model, dtype), group in groups.items():
        cache = f"{plain(model)}, {plain(dtype)} KV cache"
        prefill = "prefill" if _told(group) else "assumed prefill"
        _print_line_rates(f"{cache}: ASSUMED line rates against {prefill}", group, console)
        _print_measured(f"{cache}: MEASURED transfer against {prefill}", group, console)
        _print_predicted(f"{cache}: PREDICTED transfer by a fitted cost model against {prefill}", group, console)


def _assumed(assumptions: Mapping[str, Any]) -> str:
    parameters = ""
    if assumptions["params"] is not None:
        parameters = f", {assumptions['params'] / 1e9:.4g}e9 parameters ({assumptions['params_source']})"
    given = assumptions.get("kv_bytes_per_token")
    cache = "" if given is None else f", {given:,} B of KV cache per token (--kv-bytes-per-token)"
    gpus = assumptions["gpus"]
    return (
        f"Assumed, not measured: {counted(gpus, 'GPU')} for prefill at {assumptions['eff_tflops']:g} TFLOP/s"
        f"{' each' * (gpus > 1)}{parameters}{cache}, links at "
        f"{', '.join(f'{rate:g}' for rate in assumptions['link_gbit'])} Gb/s line rate"
        f"{_beside_bytes(assumptions)}{_between_ranks(assumptions)}{_hits(assumptions)}"
    )


def _beside_bytes(assumptions: Mapping[str, Any]) -> str:
    """What a transfer is assumed to cost beside its bytes, by the names that a cost model has for it."""
    fixed_ms, send_ms, gamma_us = (assumptions.get(name, 0) for name in ("fixed_ms", "send_ms", "gamma_us"))
    if not fixed_ms and not gamma_us:
        return " with α = γ = 0 (nothing for a transfer and its pieces besides)"
    sends = f" ({send_ms:g} ms of it for each send of a pipelined one)" if send_ms else ""
    return f" with α = {fixed_ms:g} ms for each transfer{sends} and γ = {gamma_us:g} µs for each piece besides"


def _between_ranks(assumptions: Mapping[str, Any]) -> str:
    """The ranks of both sides and whose the links are; nothing where each side has one rank."""
    tp, pp = (assumptions.get(name, {"prefill": 1, "decode": 1}) for name in ("tp", "pp"))
    if _sides(tp) == _sides(pp) == ONE_RANK:
        return ""
    links = "one link that all ranks share"
    if not assumptions.get("links_shared", True):
        links = "a link of its own for every rank (the busiest one counts)"
    prefill, decode = (tp[side] * pp[side] for side in ("prefill", "decode"))
    ranks = f"prefill on {counted(prefill, 'rank')}, decode on {decode}"
    return f", {links}, {ranks} (TP {_sides(tp)}, PP {_sides(pp)})"


def _sides(counts: Mapping[str, int]) -> str:
    return f"{counts['prefill']}→{counts['decode']}"


def _hits(assumptions: Mapping[str, Any]) -> str:
    prefill, decode = (assumptions.get(f"prefix_hit_{side}", 0) for side in ("prefill", "decode"))
    if not prefill and not decode:
        return ""
    return f", prefix-cache hits of {prefill:.4g} at prefill and {decode:.4g} at decode"


def _print_line_rates(title: str, rows: Sequence[Row], console: Console) -> None:
    per_rank = not rows[0].get("links_shared", True)
    sizes = [_number(row["bytes"] / 1e9) for row in rows]
    if per_rank:
        sizes = [f"{size} ({_number(row['busiest_rank_bytes'] / 1e9)})" for size, row in zip(sizes, rows, strict=True)]
    keys = [
        Column("tokens", [f"{row['tokens']:,}" for row in rows]),
        Column("KV moved\nGB\n(busiest)" if per_rank else "KV moved\nGB", sizes),
        Column("basis", [row["basis"] for row in rows], words=True),
        Column("prefill\nms" if _told(rows) else "prefill\nassumed\nms", [_number(row["prefill_ms"]) for row in rows]),
    ]
    links = [
        Column(
            f"{link['line_gbit']:g} Gb/s\nline rate,\nassumed\nms (%)",
            [_cell(row["links"][number]["transfer_ms"], row["links"][number]["percent"]) for row in rows],
        )
        for number, link in enumerate(rows[0]["links"])
    ]
    hits = "prefill_tokens" in rows[0]
    notes = [SEED_AFTER_HITS, FULL_AFTER_HITS] if hits else [SEED, FULL]
    notes += [f"{plain(source)}." for source in _told(rows)] + [SHARE]
    print_table(title, keys, links, console, [PER_RANK, *notes] if per_rank else notes)


def _told(rows: Sequence[Row]) -> list[str]:
    """What was measured of prefill, by the user or here, in words; nothing where all of it is assumed."""
    measured = {row["basis"]: row["prefill_source"] for row in reversed(rows) if row["basis"] in ("given", "layers")}
    return [source if basis == "given" else f"{basis}: {source}" for basis, source in measured.items()]


def _print_measured(title: str, rows: Sequence[Row], console: Console) -> None:
    """A line for each prompt length, basis and row of the results."""
    lines = [(row, entry) for row in rows for entry in row["measured"]]
    if not lines:
        return
    several = "links_shared" in rows[0] or any(_ranks(entry) != _ranks({}) for _, entry in lines)
    ranks = [Column("TP P→D,\nPP P→D", [_ranks(entry) for _, entry in lines], words=True)] if several else []
    keys = [
        Column("tokens", [f"{row['tokens']:,}" for row, _ in lines]),
        Column("basis", [row["basis"] for row, _ in lines], words=True),
    ]
    columns = [
        Column("steady p50\nms (%)", [_cell(entry["transfer_ms"], entry["percent"]) for _, entry in lines]),
        Column("cold p50\nms (%)", [_cold(entry) for _, entry in lines]),
        Column("longest\ncold ms", [_time(entry, "cold_pair_longest_ms") for _, entry in lines]),
        Column("cold ÷\nsteady", [_time(entry, "cold_pair_over_steady") for _, entry in lines]),
        Column("exposed p50\nms (%)", [_exposed(entry) for _, entry in lines]),
        Column("backend", [plain(entry.get("backend", "?")) for _, entry in lines], words=True),
        Column("op", [plain(entry.get("op", "?")) for _, entry in lines], words=True),
        *ranks,
        Column("scope", [_scope(entry) for _, entry in lines], words=True, share=3),
    ]
    source = "as above." if _told(rows) else "which is assumed as above."
    print_table(title, keys, columns, console, [*MEASURED, ITS_SHARE + source])


def _print_predicted(title: str, rows: Sequence[Row], console: Console) -> None:
    """A line for each prompt length, basis and cost model."""
    lines = [(row, entry) for row in rows for entry in row.get("predicted", ())]
    if not lines:
        return
    keys = [
        Column("tokens", [f"{row['tokens']:,}" for row, _ in lines]),
        Column("pieces", [f"{entry['descriptors']:,}" for _, entry in lines]),
        Column("basis", [row["basis"] for row, _ in lines], words=True),
    ]
    columns = [
        Column("steady\nms (%)", [_predicted(entry) for _, entry in lines]),
        Column("from – to\nms", [_ends(entry, "") for _, entry in lines]),
        Column("cold\nms (%)", [_cold(entry) for _, entry in lines]),
        Column("cold from –\nto, ms", [_ends(entry, "cold_pair_") for _, entry in lines]),
        Column("backend", [plain(entry["backend"]) for _, entry in lines], words=True),
        Column("op", [plain(entry["op"]) for _, entry in lines], words=True),
        Column("scope", [_scope(entry) for _, entry in lines], words=True),
    ]
    ranges = [_range(row, entry) for row, entry in lines]
    print_table(title, keys, columns, console, [*PREDICTED, *dict.fromkeys(ranges)])


def _predicted(entry: Row) -> str:
    return "outside" if entry["transfer_ms"] is None else _cell(entry["transfer_ms"], entry["percent"])


def _ends(entry: Row, of: str) -> str:
    if entry.get(f"{of}low_ms") is None:
        return NONE
    return f"{_number(entry[f'{of}low_ms'])} – {_number(entry[f'{of}high_ms'])}"


def _range(row: Row, entry: Row) -> str:
    """Where a cost model holds, whose cache it was fitted on where that is another's, and how it did beside that."""
    whose = "" if entry["model"] == row["model"] else f" of {plain(entry['model'])}"
    fitted = told_requests(entry["valid"]["bytes"], entry["valid"]["descriptors"])
    held_out, told = entry["held_out_percent"], ""
    if held_out is not None:
        told = f", and off by {figure(held_out)} % at the median on requests held out"
    named = f"{plain(entry['backend'])} {plain(entry['op'])}"
    return f"{named}: fitted on {fitted}{whose}{told}; nothing is predicted outside."


def _ranks(entry: Row) -> str:
    return ", ".join(_sides(entry.get(name, {"prefill": 1, "decode": 1})) for name in ("tp", "pp"))


def _scope(entry: Row) -> str:
    if entry.get("backend") == "null":
        return f"{entry['scope']}: null moves no bytes"
    return (
        f"{entry['scope']}: says nothing about the links" if entry["scope"] in ONE_HOST_SCOPES else str(entry["scope"])
    )


def _cell(milliseconds: float | None, percent: float | None) -> str:
    """`53.7 (30.0%)`; a time that has too few samples for a median is said to."""
    if milliseconds is None or percent is None:
        return "too few samples"
    return f"{_number(milliseconds)} ({_number(percent)}%)"


def _cold(entry: Row) -> str:
    """Of the first request of a pair, which results of an earlier kvxfer do not tell; none of what is not predicted."""
    if entry.get("cold_pair_ms") is None:
        return NONE if entry["transfer_ms"] is None else "not known"
    return _cell(entry["cold_pair_ms"], entry["cold_pair_percent"])


def _time(entry: Row, field: str) -> str:
    return NONE if entry.get(field) is None else _number(entry[field])


def _exposed(entry: Row) -> str:
    return NONE if entry.get("exposed_ms") is None else _cell(entry["exposed_ms"], entry["exposed_percent"])


def _number(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
