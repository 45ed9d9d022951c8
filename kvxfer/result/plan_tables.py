"""A plan as terminal tables: the load, colocated prefill, the cost of the split, the pools, and the verdict's rules."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.result.printing import NONE, Column, figure, print_pairs, print_table, print_trimmed
from kvxfer.wording import digits, plain, three_digits

Record = Mapping[str, Any]

STALLS = "How long decode stands still for one prompt's prefill in the same engine, in ms"
STALLS_NOTES = ("chunk: the longest chunk of that prompt.",)

COLOCATED_NOTES = (
    "busy: time that prefill takes, with chunks that its full steps take; 100 % or more: it cannot keep up.",
    "stalled: pairs of successive tokens that prefill came between; mean, p99 and longest are over all pairs.",
    "Simulated request by request, as a sequence sees it that decodes all the time. (…): in single draws of the load.",
)

SPLIT = "Split: what every request pays to cross"
SPLIT_NOTES = {
    "percent": "(%) is the share of all transfers in the prefill of the same prompts.",
    "setup_ms": "set-up: what the first request of two running engines waits for beside its transfer.",
    "exposed_ms": "exposed: what pipelining leaves to wait for, as measured.",
    "busy": "busy: time that the load's sends hold the path of one engine, where named of that side, the busier one.",
}
"""By the field of a column."""

PIPELINED = "Pipelined, by a model: what is left to wait for when layers leave as they are computed"
PIPELINED_NOTES = (
    "cut: layers per send, xTOKENS of a chunk of the prompt; --pipeline best takes the best of bench's sweep.",
    "serial: all layers at once, after the whole prefill.",
    "(%) is the share of the load's transfers, and of what is exposed of them, in the prefill of the same prompts.",
    "pays from: the shortest prompt from which on this cut is no slower than serial.",
)

NOT_REACHED = (
    "–: nobody measured a prompt of --tokens over that path; the load's shares are of prompts that it reaches."
)

POOLS_NOTES = (
    "busy: time that an engine works; wait: mean of a prompt for its engine, which takes them as they come.",
    "sequences: that a decode engine works on at once, mean.",
)

FIRST_TOKENS = "Time to first token at this load: wait, prefill and, in the split, transfer"
FIRST_TOKENS_NOTES = (
    "Engines and both ends of a path, replayed first come first served. (…): in single draws of the load. –: the p99",
    "of fewer than a hundred, a split whose prefill pool is not said, and a path not measured for all prompts.",
)

HOLDS = {True: "yes", False: "no", None: "open"}


def render_plan(plan: Record, console: Console) -> None:
    """Print a result's `plan`."""
    console.print()
    print_pairs([("load", _load(plan["load"])), *_prefill(plan)], console)
    _print_stalls(plan["stalls"], console)
    _print_colocated(plan["colocated"], plan["wanted"], console)
    _print_split(plan["split"], console)
    _print_pipelined(plan["split"], console)
    _print_pools(plan["pools"], console)
    _print_first_tokens(plan, console)


def render_verdict(verdict: Record | None, console: Console) -> None:
    """Print a plan's `verdict`: the answer with its reasons, then every rule with what decided it."""
    if verdict is None:
        return
    console.print()
    print_trimmed(Text(f"Verdict: {plain(verdict['answer'])}", style="bold"), console)
    print_pairs([("-", plain(reason)) for reason in verdict["reasons"]], console)
    rows = [row for number in range(len(verdict["cases"][0]["rules"])) for row in _of_rule(verdict["cases"], number)]
    print_table(
        "The rules, in this order; the first that holds decides",
        [Column("rule", [row[0] for row in rows], words=True, share=3)],
        [
            Column("holds", [row[1] for row in rows], words=True),
            Column("because", [row[2] for row in rows], words=True, share=2),
        ],
        console,
    )


def _load(load: Record) -> str:
    prompts = load["prompt_tokens"]
    lengths = ", ".join(f"{prompts[name]:,} {name}" for name in ("p50", "p90", "p99"))
    told = [f"{load['source']}: prompts of {lengths}, {prompts['mean']:,.0f} mean tokens"]
    if load["output_tokens"] is not None:
        told.append(f"answers of {digits(load['output_tokens'], 4)} tokens mean")
    if load["requests_per_s"] is not None:
        how = "arrivals independent of each other"
        if load["arrivals"] == "trace":
            how = f"as the trace's arrivals, which are bursty by {digits(load['burstiness'], 2)} (1: independent)"
        told.append(f"{three_digits(load['requests_per_s'])} requests/s, {how}")
    return plain("; ".join(told))


def _prefill(plan: Record) -> list[tuple[str, str]]:
    source = plan["prefill_source"]
    return [] if source is None else [("prefill", plain(f"{source}; figures that name no basis are by it"))]


def _print_stalls(rows: Sequence[Record], console: Console) -> None:
    chunks = list(dict.fromkeys(chunk["chunk_tokens"] for row in rows for chunk in row["chunks"]))
    keys = [
        Column("tokens", [f"{row['tokens']:,}" for row in rows]),
        Column("basis", [row["basis"] for row in rows], words=True),
    ]
    columns = [Column("whole\nprompt", [figure(row["prompt_ms"]) for row in rows])]
    for size in chunks:
        stalls = [{chunk["chunk_tokens"]: chunk["stall_ms"] for chunk in row["chunks"]}.get(size) for row in rows]
        columns.append(Column(f"chunk of\n{size:,}", [figure(stall) for stall in stalls]))
    print_table(STALLS, keys, columns, console, STALLS_NOTES)


def _print_colocated(colocated: Record, wanted: Record, console: Console) -> None:
    modes = colocated["modes"]
    if not modes:
        return
    count = colocated["instances"]
    engines = "one engine takes all of the load" if count == 1 else f"one of {count:,} engines that share the load"
    step = wanted["decode_step_ms"]
    print_table(
        f"Colocated at this load: {engines}, decode steps of {step:g} ms, prefill by `{colocated['basis']}`",
        [Column("prefill", [_mode(mode["chunk_tokens"]) for mode in modes], words=True)],
        [
            Column("busy", [_share(mode["busy"]) for mode in modes]),
            Column("stalled", [_share(mode["stalled"]) for mode in modes]),
            *(
                Column(f"{what}\nstall, ms", [_cell(mode, f"stall_{name}_ms") for mode in modes])
                for what, name in (("mean", "mean"), ("p99", "p99"), ("longest", "max"))
            ),
            Column("p99 ITL\nms", [_itl(mode) for mode in modes]),
        ],
        console,
        COLOCATED_NOTES,
    )


def _itl(mode: Record) -> str:
    """With the least and the most of the load's draws, where they differ."""
    return _cell(mode, "itl_p99_ms") + _range(mode.get("itl_p99_range_ms"))


def _range(draws: Sequence[float] | None) -> str:
    if draws is None:
        return ""
    low, high = map(figure, draws)
    return "" if low == high else f" ({low} – {high})"


def _print_split(paths: Sequence[Record], console: Console) -> None:
    if not paths:
        return
    print_table(
        SPLIT,
        [
            Column("cache", [path["dtype"] for path in paths], words=True),
            Column("path", [plain(path["path"]) for path in paths], words=True, share=3),
        ],
        [
            Column("Gb/s", [figure(path["gbit"]) for path in paths]),
            Column("(%)", [f"{figure(path['percent'])}%" for path in paths]),
            Column("median\nprompt, ms", [figure(path["median_ms"]) for path in paths]),
            Column("p99\nprompt, ms", [figure(path["p99_ms"]) for path in paths]),
            Column("exposed\nms", [figure(path["exposed_ms"]) for path in paths]),
            Column("first request:\nset-up, ms", [figure(path["setup_ms"]) for path in paths]),
            Column("busy", [_busy(path) for path in paths]),
        ],
        console,
        [note for field, note in SPLIT_NOTES.items() if any(path[field] is not None for path in paths)],
    )


def _print_pipelined(paths: Sequence[Record], console: Console) -> None:
    """A line for each cache, path and prompt length, where pipelining was asked for; one where no length is reached."""
    nothing = {"tokens": None, "serial_ms": None, "exposed_ms": None}
    lines = [
        (path, pipelined, prompt)
        for path in paths
        if (pipelined := path.get("pipelined")) is not None
        for prompt in pipelined["prompts"] or [nothing]
    ]
    if not lines:
        return
    unreached = any(prompt is nothing for _, _, prompt in lines)
    print_table(
        PIPELINED,
        [
            Column("cache", [path["dtype"] for path, _, _ in lines], words=True),
            Column("path", [plain(path["path"]) for path, _, _ in lines], words=True, share=3),
        ],
        [
            Column("cut", [pipelined["cut"] for _, pipelined, _ in lines]),
            Column("tokens", [_count(prompt["tokens"]) for _, _, prompt in lines]),
            Column("serial\nms", [figure(prompt["serial_ms"]) for _, _, prompt in lines]),
            Column("exposed\nms", [figure(prompt["exposed_ms"]) for _, _, prompt in lines]),
            Column("load:\nserial (%)", [f"{figure(pipelined['serial_percent'])}%" for _, pipelined, _ in lines]),
            Column("exposed\n(%)", [f"{figure(pipelined['percent'])}%" for _, pipelined, _ in lines]),
            Column("pays from\ntokens", [_pays_from(pipelined) for _, pipelined, _ in lines]),
        ],
        console,
        [*PIPELINED_NOTES, NOT_REACHED] if unreached else PIPELINED_NOTES,
    )


def _pays_from(pipelined: Record) -> str:
    tokens = pipelined["break_even_tokens"]
    loses = pipelined["chunk_tokens"] is None and pipelined["percent"] > pipelined["serial_percent"]
    return "never" if tokens is None and loses else _count(tokens)


def _print_pools(pools: Record, console: Console) -> None:
    sides = [pools["prefill"], pools["decode"]]
    if all(side["gpus"] is None for side in sides) and pools["concurrency"] is None:
        return
    print_table(
        "Pools at this load",
        [Column("pool", ["prefill", "decode"], words=True)],
        [
            Column("GPUs", [_count(side["gpus"]) for side in sides]),
            Column("engines", [_count(side["instances"]) for side in sides]),
            Column("GPUs an\nengine", [_count(side["gpus_per_instance"]) for side in sides]),
            Column("busy", [_share(side["busy"]) for side in sides]),
            Column("wait\nms", [figure(side.get("wait_ms")) for side in sides]),
            Column("sequences", [figure(side.get("batch")) for side in sides]),
        ],
        console,
        [*POOLS_NOTES, *_caches(pools)],
    )


def _print_first_tokens(plan: Record, console: Console) -> None:
    """What the split costs beside what colocated engines do."""
    modes, paths = plan["colocated"]["modes"], plan["split"]
    rows = [(f"colocated, {_mode(mode['chunk_tokens'])}", mode, mode["busy"] >= 1) for mode in modes]
    narrow = (plan["pools"]["prefill"]["busy"] or 0) >= 1
    rows += [
        (f"split, {path['dtype']} over {plain(path['path'])}", path, narrow or (path["busy"] or 0) >= 1)
        for path in paths
    ]
    if not any(endless or one.get("first_token_mean_ms") is not None for _, one, endless in rows):
        return

    def told(name: str) -> list[str]:
        return ["no end" if endless else figure(one.get(name)) for _, one, endless in rows]

    ranges = ["" if endless else _range(one.get("first_token_p99_range_ms")) for _, one, endless in rows]
    worst = list(map(operator.add, told("first_token_p99_ms"), ranges))
    print_table(
        FIRST_TOKENS,
        [Column("layout", [name for name, _, _ in rows], words=True, share=3)],
        [Column("mean\nms", told("first_token_mean_ms")), Column("p99\nms", worst)],
        console,
        FIRST_TOKENS_NOTES,
    )


def _caches(pools: Record) -> list[str]:
    """A sentence for each dtype about the memory of the decode pool's sequences."""
    told = []
    for cache in pools["cache"]:
        needed, available = cache["needed_bytes"], cache["available_bytes"]
        if needed is not None:
            has = "" if available is None else f" of {three_digits(available / 1e9)} GB that the pool has"
            each = f"{three_digits(cache['bytes_per_sequence'] / 1e9)} GB"
            sequences = f"{three_digits(pools['concurrency'])} sequences of {each}"
            total = f"{sequences} take {three_digits(needed / 1e9)} GB{has}"
            told.append(f"{cache['dtype']} cache of the decode pool: {total}.")
    return told


def _of_rule(cases: Sequence[Record], number: int) -> list[tuple[str, str, str]]:
    """The rule of that number in the cases, those that agree in one row."""
    together: dict[tuple[Any, str], list[str]] = {}
    for case in cases:
        rule = case["rules"][number]
        why = plain(rule["why"]) + (f"; give {', '.join(rule['needs'])}" if rule["needs"] else "")
        together.setdefault((rule["holds"], why), []).append(case["dtype"])
    rows = []
    for (holds, why), dtypes in together.items():
        rule = cases[0]["rules"][number]
        whose = f"{', '.join(dict.fromkeys(dtypes))}: " if len({case["dtype"] for case in cases}) > 1 else ""
        if len(together) == 1:
            whose = ""
        says = f"{rule['rule']}: {rule['situation']} → {rule['verdict']}"
        rows.append((says, HOLDS[holds], whose + why))
    return rows


def _mode(chunk: int | None) -> str:
    return "whole prompts" if chunk is None else f"chunks of {chunk:,}"


def _cell(mode: Record, name: str) -> str:
    return "no end" if mode[name] is None else figure(mode[name])


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.3%}" if 0 < share < 0.001 else f"{share:.1%}"


def _busy(path: Record) -> str:
    side = path.get("busy_side")
    return _share(path["busy"]) + (f" ({side})" if side else "")


def _count(count: int | None) -> str:
    return NONE if count is None else f"{count:,}"
