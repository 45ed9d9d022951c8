"""A model's cache as terminal tables: its layers, its bytes by length and dtype, and its pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.result.tables import NONE, figure, plain

Justify = Literal["left", "right"]

NAIVE = (
    "(plain): how many times the true bytes the plain formula gives, which is\n"
    "2 · layers · KV heads · head size · bytes of an element for each token."
)


def render_model(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `kvxfer model`."""
    console.print(Text(_headline(document["model"]), style="bold"))
    console.print()
    tables = [_layers(document), _bytes(document), _descriptors(document)]
    for table in tables:
        console.print(table)
        console.print()
    for notice in document["notices"]:
        console.print(f"note: {plain(notice)}", highlight=False, markup=False)


def _headline(model: Mapping[str, Any]) -> str:
    parameters = "parameters not known"
    if model["params_total"] is not None:
        parameters = f"{model['params_total']:,} parameters"
        if model["params_active"] != model["params_total"]:
            parameters += f", {model['params_active']:,} active"
    return f"{plain(model['name'])}: {model['family'].replace('_', ' ')}, {model['layers']} layers, {parameters}"


def _layers(document: Mapping[str, Any]) -> Table:
    table = _table("Layers: what one of each kind keeps", "", [("layers", "right"), ("kind", "left")])
    names = [record["dtype"] for record in document["models"]]
    for name in names:
        table.add_column(Text(f"{name}\nB per token"), justify="right", overflow="fold")
    table.add_column(Text("at most"), overflow="fold")
    for group in document["layer_groups"]:
        cells = [_count(group["bytes_per_token"][name]) for name in names]
        table.add_row(Text(str(group["layers"])), Text(group["kind"]), *cells, Text(_bound(group)))
    return table


def _bound(group: Mapping[str, Any]) -> str:
    """What a request holds of the layer, however long it is."""
    parts = [f"{group['most_blocks']:,} blocks"] if group["most_blocks"] else []
    parts += ["no bound"] if group["most_blocks"] is None else []
    parts += [f"{group['state_bytes']:,} B of state"] if group["state_bytes"] else []
    return ", ".join(parts) or "nothing"


def _bytes(document: Mapping[str, Any]) -> Table:
    lengths = list(document["models"][0]["bytes_by_tokens"])
    columns: list[tuple[str, Justify]] = [
        ("dtype", "left"),
        ("B per token", "right"),
        ("fixed\nB per request", "right"),
    ]
    columns += [(f"{int(count):,} tokens\nMB (plain)", "right") for count in lengths]
    title = f"Bytes of a request, in whole blocks of {document['block_size']} tokens"
    table = _table(title, NAIVE, columns)
    for record in document["models"]:
        fixed = _count(record["fixed_bytes_per_request"])
        cells = [_megabytes(record, count) for count in lengths]
        table.add_row(Text(record["dtype"]), _count(record["kv_bytes_per_token"]), fixed, *cells)
    return table


def _megabytes(record: Mapping[str, Any], count: str) -> Text:
    over = (record["naive_over_true"] or {}).get(count)
    naive = NONE if over is None else f"{figure(over)}×"
    return Text(f"{figure(record['bytes_by_tokens'][count] / 1e6)} ({naive})")


def _descriptors(document: Mapping[str, Any]) -> Table:
    title = "Pieces of a request of which no two blocks are adjacent (fragmentation 1)"
    columns: list[tuple[str, Justify]] = [
        ("tokens", "right"),
        ("K and V\ntogether", "right"),
        ("K and V\napart", "right"),
    ]
    table = _table(title, "", columns)
    for row in document["descriptors"]:
        counts = row["regions_per_layer"]
        table.add_row(_count(row["tokens"]), _count(counts["1"]), _count(counts["2"]))
    return table


def _table(title: str, caption: str, columns: Sequence[tuple[str, Justify]]) -> Table:
    table = Table(
        title=Text(title, style="bold"),
        caption=Text(caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for header, justify in columns:
        table.add_column(Text(header), justify=justify, overflow="fold")
    return table


def _count(value: int) -> Text:
    return Text(f"{value:,}")
