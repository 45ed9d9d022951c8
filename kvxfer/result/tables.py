"""A result on the terminal: tables that a newcomer reads right.

The first line says in a sentence what was found. Every table begins with what tells its rows apart; what all rows share
is said once, above. Columns that do not fit the width go to a second table below, so that no figure is ever cut. Scope
stands in every title, and beside the rows where they differ in it: a figure of one host must not be taken for one of a
link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.result.cold import cold_pair
from kvxfer.result.cost_table import render_cost_models
from kvxfer.result.printing import (
    NONE,
    Column,
    counted,
    figure,
    milliseconds,
    print_notices,
    print_pairs,
    print_table,
    print_trimmed,
    with_interval,
)
from kvxfer.wording import plain

Row = dict[str, Any]

SCOPES = {
    "loopback": "both sides on this host through the network stack; this says nothing about a link between two hosts",
    "host": "both sides on this host through memory; this says nothing about a link between two hosts",
    "network": "two hosts through the network between them",
}

PHASES = {
    "library_ns": "load library",
    "context_ns": "open context",
    "allocate_ns": "allocate pool",
    "register_ns": "register memory",
    "connect_ns": "connect",
    "exchange_ns": "exchange keys",
    "prepare_ns": "prepare plans",
    "first_ns": "first transfer",
    "other_ns": "other",
    "cold_ns": "from start: all of it",
}

COLD = "cold: connect … first"

WARNINGS: dict[str, Callable[[Row], bool | None]] = {
    "not converged": lambda row: not row["converged"],
    "not warm": lambda row: not row["warmup"]["agreed"],
    "noisy": lambda row: row["noisy"],
    "hot": lambda row: row["hot"],
    "unverified": lambda row: row["verified"] == "off",
}
"""What a reader has to know before trusting a row's figures; each is explained in TERMS."""


@dataclass(frozen=True)
class Key:
    """Something that tells rows apart: a column where they differ in it, a part of a sentence where they do not."""

    header: str
    sentence: str
    cell: Callable[[Row], str]


KEYS = (
    Key("model", "model {}", lambda row: plain(row["model"])),
    Key("dtype", "{}", lambda row: plain(row["dtype"])),
    Key("backend", "backend {}", lambda row: plain(row["backend"])),
    Key("scope", "", lambda row: plain(row["scope"])),  # of all rows it is said in the header
    Key("op", "{}", lambda row: plain(row["op"])),
    Key("device", "device {}", lambda row: plain(row["device"])),
    Key("layout", "layout {}", lambda row: plain(row["layout"])),
    Key("block\nsize", "{} tokens per block", lambda row: str(row["block_size"])),
    Key("fragmen-\ntation", "fragmentation {}", lambda row: f"{row['fragmentation']:g}"),
    Key("regions\nper layer", "regions per layer {}", lambda row: str(row["regions_per_layer"])),
    Key("TP P→D", "TP {}", lambda row: _ranks(row["tp"])),
    Key("PP P→D", "PP {}", lambda row: _ranks(row.get("pp", {"prefill": 1, "decode": 1}))),
    Key("at\nonce", "requests at once {}", lambda row: str(row["inflight"])),
)


def render(result: dict[str, Any], console: Console) -> None:
    """Print a whole result (the object of schema.json)."""
    rows: list[Row] = [{"scope": result["scope"], **row} for row in result["results"]]
    measured = [row for row in rows if row["status"] == "ok"]
    keys = _differing(rows)
    scopes = list(dict.fromkeys(row["scope"] for row in rows)) or [result["scope"]]
    _print_header(result, scopes, keys, console)
    scope = ", ".join(scopes)
    _print_transfers(measured, keys, scope, console)
    _print_setup(measured, keys, scope, console)
    _print_references(measured, result["references"], keys, scope, console)
    _print_pipelines(measured, keys, scope, console)
    render_cost_models(result["cost_model"], scope, console)
    if result.get("prefill"):
        from kvxfer.result.prefill_table import render_prefill

        render_prefill(result["prefill"], console)
    _print_errors([row for row in rows if row["status"] == "error"], keys, console)
    if result["ratio"]:
        from kvxfer.result.ratio_table import render_ratio

        console.print()
        render_ratio(result["ratio"], result["assumptions"], console)
    _print_verdict(result["verdict"], console)
    print_notices(result["notices"], console)
    _print_terms(_terms(measured, result["references"]), console)


# --- what stands above the tables -----------------------------------------------------------------------------------


def _print_header(result: dict[str, Any], scopes: Sequence[str], keys: Sequence[Key], console: Console) -> None:
    lines = [
        *_found(result),
        ("prefill", _host(result["host"])),
        ("decode", _host(result["peer"]) if "network" in scopes else "the same host"),
        *(("scope", f"{scope}: {SCOPES[scope]}") for scope in scopes),
    ]
    if result["results"]:
        lines.append(("all rows", _shared(result["results"][0], keys)))
    print_trimmed(
        Text(f"kvxfer {plain(result['kvxfer_version'])}, {plain(result['created_utc'])}", style="bold"), console
    )
    print_pairs(lines, console)


def _host(host: dict[str, Any]) -> str:
    cache = f", {host['llc_bytes'] / 2**20:.0f} MiB last-level cache" if host["llc_bytes"] else ""
    memory = f"{host['memory_bytes'] / 2**30:.0f} GiB memory"
    return f"{plain(host['hostname'])}: {plain(host['cpu_model'])}, {counted(host['cpus'], 'CPU')}, {memory}{cache}"


def _found(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The run in one sentence: what its longest prompt cost. Nothing where no row moved bytes."""
    rows = [row for row in result["results"] if row["status"] == "ok" and row["bandwidth_gbyte_s"] is not None]
    if not rows:
        return []
    row = max(rows, key=lambda row: int(row["tokens"]))  # the first of those
    beware = _warnings(row)
    what = f"{plain(row['model'])} in {plain(row['dtype'])} over {plain(row['transport'])}, {plain(row['op'])}"
    parts = [
        f"{what}: {counted(row['tokens'], 'token')} move in {milliseconds(row['p50_ns'])} ms",
        f"{figure(row['bandwidth_gbyte_s'])} GB/s",
        *_share_of_prefill(result["ratio"], row["id"]),
        f"{row.get('scope', result['scope'])}{' (' + ', '.join(beware) + ')' if beware else ''}",
    ]
    return [("found", ", ".join(parts))]


def _share_of_prefill(ratio: Sequence[Row], row: str) -> list[str]:
    """`68 % of an assumed prefill`, by the last basis that is assumed, `full` before `seed`."""
    beside = [
        (entry["basis"], one)
        for entry in ratio
        for one in entry["measured"]
        if one["of"] == row and entry["basis"] in ("seed", "full")
    ]
    if not beside or beside[-1][1]["percent"] is None:
        return []
    basis, measured = beside[-1]
    return [f"{figure(measured['percent'])} % of its assumed prefill ({basis})"]


def _differing(rows: Sequence[Row]) -> list[Key]:
    """The keys in which `rows` differ."""
    return [key for key in KEYS if len({key.cell(row) for row in rows}) > 1]


def _shared(row: Row, keys: Sequence[Key]) -> str:
    """What all rows have in common, taken from one of them: everything but `keys`."""
    return ", ".join(key.sentence.format(key.cell(row)) for key in KEYS if key.sentence and key not in keys)


# --- the tables -----------------------------------------------------------------------------------------------------


def _print_transfers(rows: Sequence[Row], keys: Sequence[Key], scope: str, console: Console) -> None:
    giga = any(row["bytes"] >= 1e9 for row in rows)
    columns = [
        _column(rows, "moved\nGB" if giga else "moved\nMB", lambda row: figure(row["bytes"] / (1e9 if giga else 1e6))),
        _column(rows, "held\ntokens", lambda row: f"{row['held_tokens']:,}" if row.get("held_tokens") else NONE),
        _column(rows, "pieces", lambda row: f"{row['descriptors']:,}"),
        _column(rows, "steady p50\nms ± 95 %", _median_with_interval),
        _column(rows, "steady\nGB/s", lambda row: figure(row["bandwidth_gbyte_s"])),
        _column(rows, "hand-over\np50 ms", lambda row: milliseconds(row["handover"]["p50_ns"])),
        _column(rows, "cold p50\nms (longest)", lambda row: _median_and_longest(cold_pair(row["setup"]))),
        _column(rows, "CPU s/GiB\nP / D", _cpu),
        _column(rows, "p90\nms", lambda row: milliseconds(row["p90_ns"])),
        _column(rows, "p99\nms", lambda row: milliseconds(row["p99_ns"])),
        _column(rows, "beware", lambda row: ", ".join(_warnings(row)) or NONE, words=True),
        _column(rows, "verified", lambda row: plain(row["verified"]), words=True),
        _column(rows, "carried by", lambda row: plain(row["transport"]), words=True),
    ]
    print_table(f"Transfers ({scope})", _key_columns(rows, keys), columns, console)


def _print_setup(rows: Sequence[Row], keys: Sequence[Key], scope: str, console: Console) -> None:
    """Phases down, rows of the result across: so they read as a sum."""
    repeats = sorted({len(row["setup"]["cold_ns"]["samples"]) for row in rows})
    starts = f"{' or '.join(map(str, repeats))} fresh start{'s' * (repeats != [1])}"
    title = f"Setup in ms, median (longest) of {starts} ({scope})"
    columns = [Column(_label(row, keys, "\n"), _phase_cells(row["setup"])) for row in rows]
    print_table(title, [Column("phase", [*PHASES.values(), COLD], words=True)], columns, console)


def _print_references(
    rows: Sequence[Row], references: Iterable[Row], keys: Sequence[Key], scope: str, console: Console
) -> None:
    speeds = {(reference["of"], reference["kind"]): reference["bandwidth_gbyte_s"] for reference in references}
    compared = [row for row in rows if any((row["id"], kind) in speeds for kind in ("bulk", "memcpy"))]

    def speed(kind: str) -> Column:
        return _column(compared, f"{kind}\nGB/s", lambda row: figure(speeds.get((row["id"], kind))))

    def share(kind: str) -> Column:
        return _column(compared, f"row, %\nof {kind}", lambda row: _percent(row, speeds.get((row["id"], kind))))

    row_speed = _column(compared, "row\nGB/s", lambda row: figure(row["bandwidth_gbyte_s"]))
    columns = [row_speed, speed("bulk"), share("bulk"), speed("memcpy"), share("memcpy")]
    title = f"References: the same bytes moved in simpler ways ({scope})"
    print_table(title, _key_columns(compared, keys), columns, console)


def _print_pipelines(rows: Sequence[Row], keys: Sequence[Key], scope: str, console: Console) -> None:
    if any(row.get("pipeline") for row in rows):
        from kvxfer.result.pipeline_table import render_pipelines

        render_pipelines(rows, scope, lambda row: _label(row, keys, " "), console)


def _key_columns(rows: Sequence[Row], keys: Sequence[Key]) -> list[Column]:
    tokens = _column(rows, "tokens", lambda row: f"{row['tokens']:,}")
    return [*(_column(rows, key.header, key.cell, words=True) for key in keys), tokens]


def _column(rows: Sequence[Row], header: str, cell: Callable[[Row], str], words: bool = False) -> Column:
    return Column(header, [cell(row) for row in rows], words)


def _label(row: Row, keys: Sequence[Key], separator: str) -> str:
    """What a row is called among the others."""
    parts = [key.sentence.format(key.cell(row)) for key in keys if key.sentence]
    return separator.join([*parts, counted(row["tokens"], "token")])


# --- cells ----------------------------------------------------------------------------------------------------------


def _median_with_interval(row: Row) -> str:
    """The median and how far, in percent of it, the farther end of its 95 % interval is."""
    return with_interval(row["p50_ns"], row["ci95_ns"])


def _median_and_longest(phase: dict[str, Any]) -> str:
    return f"{milliseconds(phase['p50'])} ({milliseconds(phase['max'])})"


def _phase_cells(setup: dict[str, Any]) -> list[str]:
    """Median and longest of every phase, all with one decimal so that the column reads as a sum; cold below it."""
    lines = [*(setup[phase] for phase in PHASES), cold_pair(setup)]
    longest = [_tenths(line["max"]) for line in lines]
    width = max(map(len, longest))
    return [f"{_tenths(line['p50'])} ({most:>{width}})" for line, most in zip(lines, longest, strict=True)]


def _tenths(ns: int) -> str:
    return "<0.1" if 0 < ns < 50_000 else f"{ns / 1e6:,.1f}"


def _ranks(counts: dict[str, int]) -> str:
    return f"{counts['prefill']}→{counts['decode']}"


def _cpu(row: Row) -> str:
    sides = [row["cpu_s_per_gib"][side] for side in ("prefill", "decode")]
    if sides == [None, None]:
        return NONE
    return " / ".join(NONE if seconds is None else f"{seconds:.2f}" for seconds in sides)


def _percent(row: Row, reference: float | None) -> str:
    if not reference or row["bandwidth_gbyte_s"] is None:
        return NONE
    return f"{100 * row['bandwidth_gbyte_s'] / reference:.0f} %"


def _warnings(row: Row) -> list[str]:
    return [word for word, holds in WARNINGS.items() if holds(row)]


# --- what stands below the tables -----------------------------------------------------------------------------------


def _print_errors(rows: Sequence[Row], keys: Sequence[Key], console: Console) -> None:
    if rows:
        console.print()
        print_trimmed(Text("Rows that failed", style="bold red"), console)
        print_pairs([(_label(row, keys, " "), plain(row["error"])) for row in rows], console)


def _print_verdict(verdict: dict[str, Any] | None, console: Console) -> None:
    if verdict is not None:
        console.print()
        print_trimmed(Text(f"Verdict: {plain(verdict.get('answer', NONE))}", style="bold"), console)
        for reason in verdict.get("reasons", []):
            print_trimmed(Text(f"- {plain(reason)}"), console)


TERMS = {
    "steady": "a transfer after warm-up, from its post to the confirmation that every byte is in place",
    "p50, p90, p99": "half, 90 %, 99 % of the transfers took at most this long; p90 takes 100 samples, p99 1000",
    "± 95 %": "how far the true median may be from p50, in % of it, with 95 % confidence; ? with fewer than 6 samples",
    "GB/s": "10⁹ bytes per second (MB and GB are decimal too)",
    "moved": "the KV cache of one request as it goes over, in whole blocks",
    "held": "tokens of the prompt in whole blocks that the decode side has already; they do not move",
    "pieces": "separate stretches of memory that one request moves, between all pairs of ranks",
    "TP, PP": "tensor-parallel ranks and pipeline stages, prefill→decode; all pairs of ranks move at once, and moved "
    "counts what ranks replicate each time",
    "fragmentation": "how a request's blocks lie: 0 one after the other, 1 no two side by side",
    "hand-over": "from 'KV ready' on the prefill side to its hearing 'usable' from the decode side",
    "cold": "the first request of a pair of running engines: to connect, to exchange keys, to prepare its plan and the "
    "first transfer; median (and longest) of the fresh starts",
    "from start": "from starting both processes, which cold leaves out, to the first confirmed transfer",
    "CPU s/GiB": "CPU seconds that the prefill (P) and the decode (D) side spend per 2³⁰ bytes",
    "verified": "full: every byte of the first and last request, a mark in every piece of each; sample: some blocks",
    "carried by": "the transport really used, whatever was asked for",
    "setup": "the phases of each start sum to its time from start; their medians need not",
    "bulk": "the same bytes over the same backend in one piece: what pieces cost is the difference",
    "memcpy": "one thread copying the same pieces within this host's memory",
    "not converged": "time was over before p50 was certain within 2 %; raise --max-seconds",
    "not warm": "time was over before two windows of warm-up agreed; raise --max-seconds",
    "noisy": "other processes took more than 5 % of the CPUs meanwhile; measure again on a quiet machine",
    "hot": "the data stay in the CPU cache between uses, which a server's would not: faster than real",
    "unverified": "nobody looked whether the bytes arrived right (--verify off)",
}


def _terms(rows: Sequence[Row], references: Iterable[Row]) -> list[str]:
    """The terms to explain: those that this print uses, in the order of TERMS."""
    if not rows:
        return []
    occasional = {"bulk", "memcpy", "held", "TP, PP", *WARNINGS}
    used = {reference["kind"] for reference in references}.union(*(_warnings(row) for row in rows))
    if any(row.get("held_tokens") for row in rows):
        used.add("held")
    if any(max(*row["tp"].values(), *row.get("pp", {}).values()) > 1 for row in rows):
        used.add("TP, PP")
    return [term for term in TERMS if term not in occasional or term in used]


def _print_terms(terms: Sequence[str], console: Console) -> None:
    if terms:
        console.print()
        print_trimmed(Text("What the words mean", style="bold"), console)
        print_pairs([(term, TERMS[term]) for term in terms], console, style="dim")
