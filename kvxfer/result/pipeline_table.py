"""What pipelining gave, on the terminal: a table for each row that measured it, and which cut was best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from kvxfer.result.printing import NONE, Column, counted, figure, milliseconds, print_table, with_interval
from kvxfer.wording import plain

Record = dict[str, Any]

NOTES = (
    "total: from the start of compute until decode can use all of it.",
    "exposed: total less compute alone, in the same chunks.",
    "predicted: of a model that knows compute and the transfers alone, not the totals.",
    "hidden: the share of the cut's own transfer alone that is not exposed, negative where more is than that takes.",
    "slower: what the transfer added to the compute.",
    "waited for: the end waited for compute up to that layer, then for so many transfers one after another.",
    "pays from: by the model, the shortest prompt from which on the cut is no slower than serial (all layers at once).",
)

UNKNOWN_BEST = (
    "Cuts of as many sends do not tell what a send costs, and so not which number of layers would be best: "
    "--pipeline sweep."
)


def render_pipelines(rows: Sequence[Record], scope: str, label: Callable[[Record], str], console: Console) -> None:
    """Print `pipeline` of every row that has one; `label` says what the row is called."""
    measured = [row for row in rows if row.get("pipeline")]
    for row in measured:
        _print_one(row["pipeline"], f"{label(row)} ({scope})", console, NOTES if row is measured[-1] else ())


def _print_one(pipeline: Record, label: str, console: Console, notes: Sequence[str]) -> None:
    cuts: list[Record] = pipeline["cuts"]
    serial = pipeline["compute"]["layers"]
    print_table(
        f"Pipelining, {plain(label)}",
        [Column("layers\nper send", [_name(cut, serial) for cut in cuts], words=True)],
        [
            Column("sends", [f"{cut['sends']:,}" for cut in cuts]),
            Column("total p50\nms ± 95 %", [with_interval(cut["total_p50_ns"], cut["total_ci95_ns"]) for cut in cuts]),
            Column("exposed\nms", [milliseconds(cut["exposed_ns"]) for cut in cuts]),
            Column("predicted\nms", [milliseconds(cut["predicted_exposed_ns"]) for cut in cuts]),
            Column("hidden\n%", [f"{100 * cut['hidden_share']:.0f}" for cut in cuts]),
            Column("transfer\nalone ms", [milliseconds(cut["alone_p50_ns"]) for cut in cuts]),
            Column("slower\n%", [f"{100 * cut['slowdown']:.1f}" for cut in cuts]),
            Column("waited for", [_critical(cut["critical"]) for cut in cuts]),
            Column("pays from\ntokens", [_break_even(cut, serial) for cut in cuts]),
        ],
        console,
        [_compute(pipeline), _best(pipeline), *notes],
    )


def _name(cut: Record, serial: int) -> str:
    if cut["layers_per_send"] == serial and cut["chunk_tokens"] is None:
        return f"{serial} (serial)"
    return plain(cut["cut"])


def _critical(critical: Record) -> str:
    chunk = f"chunk {critical['computed_chunk'] + 1}, " * (critical["computed_chunk"] > 0)
    return f"{chunk}layer {critical['computed_layer'] + 1} + {critical['sends_after']}"


def _break_even(cut: Record, serial: int) -> str:
    if cut["chunk_tokens"] is not None or cut["layers_per_send"] == serial:
        return NONE
    return "never" if cut["break_even_tokens"] is None else f"{cut['break_even_tokens']:,}"


def _compute(pipeline: Record) -> str:
    compute = pipeline["compute"]
    how = {"timed": "with the CPU free", "spin": "holding a core"}.get(compute["kind"], "in torch")
    mfu = f" MFU {100 * compute['mfu']:.0f} % of the peak measured here." if "mfu" in compute else ""
    chunked = "".join(
        f", {milliseconds(one['alone_p50_ns'])} ms in chunks of {counted(one['chunk_tokens'], 'token')}"
        for one in compute.get("chunked", ())
    )
    return (
        f"Compute alone {milliseconds(compute['alone_p50_ns'])} ms{chunked}: {counted(compute['layers'], 'layer')} of "
        f"{milliseconds(compute['layer_ns'])} ms {how}; a layer's time: {plain(compute['source'])}.{mfu} "
        f"{counted(pipeline['rounds'], 'sample')} of each cut, in turn."
    )


def _best(pipeline: Record) -> str:
    cuts = {cut["cut"]: cut for cut in pipeline["cuts"]}
    best, serial = cuts[pipeline["best"]["cut"]], pipeline["serial"]["total_p50_ns"]
    ties, layers = pipeline["best"]["ties"], pipeline["best"]["predicted_layers"]
    gain = (
        f"{figure(100 * (1 - best['total_p50_ns'] / serial))} % less than serial's"
        if best["total_p50_ns"] < serial
        else "serial itself"
    )
    others = "; no other is as good" if len(cuts) > 1 else "; no other was measured"
    same = f"; not to be told from it: {', '.join(plain(tie) for tie in ties)}" if ties else others
    model = UNKNOWN_BEST if layers is None else f"Of every number of layers the model says {layers}."
    return f"Best of these: {plain(best['cut'])}, total {milliseconds(best['total_p50_ns'])} ms, {gain}{same}. {model}"
