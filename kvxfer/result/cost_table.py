"""Cost models on the terminal: the formula with its intervals, where it holds, and how it did on requests held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from kvxfer.result.printing import NONE, Column, figure, milliseconds, print_pairs, print_table
from kvxfer.wording import plain

Row = Mapping[str, Any]

FORMS = {"sum": "T = α + γ·pieces + bytes/β", "overlap": "T = α + max(γ·pieces, bytes/β)"}
NOTES = (
    "(…): 95 % interval, by drawing again among fresh starts of the processes.",
    "α: fixed time per request; of it hidden: what several requests at once hide. γ: time per piece. β: bandwidth.",
    "held out: |error| on requests that took no part in the fit, median (worst). p50: median of the fresh starts.",
)
COLD_NOTES = (
    "First request of a pair of running engines: connect, keys, plan, transfer. Single starts: 95 % of them.",
)


def render_cost_models(models: Sequence[Row], scope: str, console: Console) -> None:
    """Print a result's `cost_model`."""
    if not models:
        return
    keys = [Column(name, [plain(model[name]) for model in models]) for name in ("backend", "dtype", "op")]
    columns = [
        _figures(models, "α µs", "alpha_ns", 1e3),
        _figures(models, "of it\nhidden µs", "latency_ns", 1e3),
        _figures(models, "γ µs", "gamma_ns", 1e3),
        Column("β GB/s", [_beta(model["beta_gbyte_s"]) for model in models]),
        Column("held out\n%", [_held_out(model) for model in models]),
    ]
    print_table(f"Cost model ({scope})", keys, columns, console, NOTES)
    print_pairs([pair for model in models for pair in _told(model)], console)
    for model in models:
        _print_held_out(model, console)
    _print_cold([model for model in models if model.get("cold")], scope, console)


def _print_cold(models: Sequence[Row], scope: str, console: Console) -> None:
    """The first request of a pair, fitted as the later ones are."""
    cold = [model["cold"] for model in models]
    keys = [Column(name, [plain(model[name]) for model in models]) for name in ("backend", "dtype", "op")]
    columns = [
        _figures(cold, "α ms", "alpha_ns", 1e6),
        _figures(cold, "γ µs", "gamma_ns", 1e3),
        Column("β GB/s", [_beta(one["beta_gbyte_s"]) for one in cold]),
        Column("held out\n%", [_held_out(one) for one in cold]),
        _column(cold, "single starts\n÷ predicted", lambda one: "{:.2f} – {:.2f}".format(*one["spread"])),
    ]
    if cold:
        print_table(f"Cost model of the first request of a pair ({scope})", keys, columns, console, COLD_NOTES)
        print_pairs([(_named(model), _shape(model["cold"])) for model in models], console)


def _told(model: Row) -> list[tuple[str, str]]:
    """Where a model holds, and where its bandwidth changes."""
    name = _named(model)
    (least, most), (fewest, many) = model["valid"]["bytes"], model["valid"]["descriptors"]
    told = f"{FORMS[model['form']]}, from {_size(least)} to {_size(most)} in {fewest:,} to {many:,} pieces"
    if model["valid"]["inflight"] > 1:
        told += f", up to {model['valid']['inflight']} requests at once"
    lines = [(name, told)]
    if model["noisy_share"]:
        lines.append((name, f"noisy: others used the CPUs during {100 * model['noisy_share']:.0f} % of its requests"))
    if len(model["bands"]) > 1:
        lines.append((name, _bands(model)))
    return lines


def _named(model: Row) -> str:
    return f"{plain(model['backend'])}, {plain(model['dtype'])}, {plain(model['op'])}"


def _shape(cold: Row) -> str:
    return FORMS[cold["form"]] + (f"; {_bands(cold)}" if len(cold["bands"]) > 1 else "")


def _bands(model: Row) -> str:
    return f"one β does not fit: {'; '.join(map(_band, model['bands']))}"


def _band(band: Row) -> str:
    rate = _band_rate(band["beta_gbyte_s"])
    step = f" and {figure(band['step_ns'] / 1e3)} µs once" if band["step_ns"] else ""
    return f"{rate}{step} for what is beyond {_size(band['from_bytes'])}" if band["from_bytes"] else f"at first {rate}"


def _band_rate(beta: Row | None) -> str:
    if beta is None:
        return "no time that shows"
    if beta["value"] is None:
        return f"no time that shows (at least {figure(beta['ci95'][0])} GB/s)"
    return f"{figure(beta['value'])} GB/s"


def _print_held_out(model: Row, console: Console) -> None:
    points = [point for point in model["points"] if point["role"] == "held_out"]
    title = f"Requests held out: {plain(model['backend'])}, {plain(model['dtype'])}, {plain(model['op'])}"
    keys = [Column("tokens", [f"{point['tokens']:,}" for point in points])]
    columns = [
        _column(points, "block\nsize", lambda point: str(point["block_size"])),
        _column(points, "fragmen-\ntation", lambda point: f"{point['fragmentation']:g}"),
        _column(points, "pieces", lambda point: f"{point['descriptors']:,}"),
        _column(points, "p50 ms", lambda point: milliseconds(point["p50_ns"])),
        _column(points, "predicted\nms", lambda point: milliseconds(point["predicted_ns"])),
        _column(points, "error\n%", lambda point: f"{100 * (point['predicted_ns'] / point['p50_ns'] - 1):+.1f}"),
    ]
    if points:
        print_table(title, keys, columns, console)


def _column(rows: Sequence[Row], header: str, cell: Callable[[Row], str]) -> Column:
    return Column(header, [cell(row) for row in rows])


def _figures(models: Sequence[Row], header: str, field: str, unit: float) -> Column:
    def cell(model: Row) -> str:
        one = model[field]
        if one is None:
            return NONE
        low, high = (figure(end / unit) for end in one["ci95"])
        return f"{figure(one['value'] / unit)} ({low} – {high})"

    return _column(models, header, cell)


def _beta(beta: Row | None) -> str:
    if beta is None:
        return NONE
    low, high = beta["ci95"]
    return f"{_rate(beta['value'])} ({figure(low)} – {_rate(high)})"


def _rate(gbyte_s: float | None) -> str:
    """Without a limit where bytes take no time that shows."""
    return "∞" if gbyte_s is None else figure(gbyte_s)


def _held_out(model: Row) -> str:
    held_out = model["held_out"]
    return NONE if held_out is None else f"{held_out['median_percent']:.1f} ({held_out['worst_percent']:.1f})"


def _size(size: int) -> str:
    """Decimal, as everywhere: `1.05 MB`."""
    for least, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= least:
            return f"{figure(size / least)} {unit}"
    return f"{size} B"
