"""A model's cache as terminal tables: its layers, its bytes by length and dtype, and its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.result.printing import NONE, Column, counted, figure, print_notices, print_table, print_trimmed
from kvxfer.wording import plain

NAIVE = (
    "(plain): how many times the true bytes the plain formula gives, which is",
    "2 · layers · KV heads · head size · bytes of an element for each token.",
)


def render_model(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `kvxfer model`."""
    print_trimmed(Text(_headline(document["model"]), style="bold"), console)
    _print_layers(document, console)
    _print_bytes(document, console)
    _print_descriptors(document, console)
    print_notices(document["notices"], console)


def _headline(model: Mapping[str, Any]) -> str:
    parameters = "parameters not known"
    if model["params_total"] is not None:
        parameters = f"{model['params_total']:,} parameters"
        if model["params_active"] != model["params_total"]:
            parameters += f", {model['params_active']:,} active"
        parameters += f" ({model['params_embedding']:,} of them embedding and head)"
    layers = counted(model["layers"], "layer")
    return f"{plain(model['name'])}: {model['family'].replace('_', ' ')}, {layers}, {parameters}"


def _print_layers(document: Mapping[str, Any], console: Console) -> None:
    groups = document["layer_groups"]
    keys = [
        Column("layers", [str(group["layers"]) for group in groups]),
        Column("kind", [group["kind"] for group in groups], words=True, share=3),
    ]
    columns = [
        Column(f"{name}\nB per token", [f"{group['bytes_per_token'][name]:,}" for group in groups])
        for name in [record["dtype"] for record in document["models"]]
    ]
    bound = Column("at most", [_bound(group) for group in groups], words=True)
    print_table("Layers: what one of each kind keeps", keys, [*columns, bound], console)


def _bound(group: Mapping[str, Any]) -> str:
    """What a request holds of the layer, however long it is."""
    parts = [counted(group["most_blocks"], "block")] if group["most_blocks"] else []
    parts += ["no bound"] if group["most_blocks"] is None else []
    parts += [f"{group['state_bytes']:,} B of state"] if group["state_bytes"] else []
    return ", ".join(parts) or "nothing"


def _print_bytes(document: Mapping[str, Any], console: Console) -> None:
    records = document["models"]
    columns = [
        Column("B per\ntoken", [f"{record['kv_bytes_per_token']:,}" for record in records]),
        Column("fixed B per\nrequest", [f"{record['fixed_bytes_per_request']:,}" for record in records]),
        *(
            Column(f"{counted(int(count), 'token')}\nMB (plain)", [_megabytes(record, count) for record in records])
            for count in records[0]["bytes_by_tokens"]
        ),
    ]
    title = f"Bytes of a request, in whole blocks of {counted(document['block_size'], 'token')}"
    dtypes = Column("dtype", [record["dtype"] for record in records], words=True, share=4)
    print_table(title, [dtypes], columns, console, NAIVE)


def _megabytes(record: Mapping[str, Any], count: str) -> str:
    over = (record["naive_over_true"] or {}).get(count)
    naive = NONE if over is None else f"{figure(over)}×"
    return f"{figure(record['bytes_by_tokens'][count] / 1e6)} ({naive})"


def _print_descriptors(document: Mapping[str, Any], console: Console) -> None:
    rows = document["descriptors"]
    columns = [
        Column(f"K and V\n{how}", [f"{row['regions_per_layer'][regions]:,}" for row in rows])
        for regions, how in (("1", "together"), ("2", "apart"))
    ]
    title = "Pieces of a request of which no two blocks are adjacent (fragmentation 1)"
    print_table(title, [Column("tokens", [f"{row['tokens']:,}" for row in rows])], columns, console)
