"""`kvxfer plan`: what moving a prompt's KV cache costs beside its prefill, from assumptions or measured times.

Answers at once: nothing heavy may be imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from kvxfer import __version__, cli
from kvxfer.asked import Asked, Options, read, takes_options
from kvxfer.cache.layout import rank_pairs
from kvxfer.cache.wire import Wire, on_the_wire
from kvxfer.cost.measured import Measured, matching, measured_rows
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.model.dtypes import DType
from kvxfer.model.record import model_record
from kvxfer.model.shape import blocks_of
from kvxfer.result.file import SCHEMA_VERSION, read_result, write_result

NO_VERDICT = "no verdict: this version computes the ratio and leaves the decision to the reader"
ONE_HOST_SCOPES = ("loopback", "host")
ONE_HOST = "the measured times are from one host ({}): they say nothing about the links, and no verdict follows"
LINE_RATES = "line rates are upper bounds without protocol or set-up cost; kvxfer bench measures what a path takes"


Wires = dict[int, Wire] | None


@dataclass(frozen=True)
class Request(Asked):
    """What the user asked for, checked; with the rows of a measured result to set beside."""

    measured: list[Measured]


@takes_options
def command(
    context: typer.Context,
    options: Options,
    measured: Annotated[str | None, typer.Option(metavar="FILE", help="a result of kvxfer bench, set beside")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the figures there (-: to stdout, alone)")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables")] = False,
) -> None:
    """Set the transfer of a KV cache against its prefill, at line rates and as measured."""
    asked = read(options)
    request = Request(**vars(asked), measured=[] if measured is None else _read_measured(measured))
    document = plan_document(request, context.obj, wants_measured=measured is not None)
    if json is not None:
        write_result(json, document)
    if not quiet and json != "-":
        _print(document)


def plan_document(request: Request, words: Sequence[str], wants_measured: bool = False) -> dict[str, Any]:
    """The plan as JSON: the fields of a result file that need no measurement, in the same form.

    `words` are the command line.
    """
    shape, assumptions = request.shape, request.assumptions
    wires = {dtype: _wires(request, dtype) for dtype in request.dtypes}
    rows = [
        row
        for dtype, between in wires.items()
        for row in ratio_rows(shape, dtype, request.tokens, request.block_size, assumptions, request.measured, between)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "kvxfer_version": __version__,
        "created_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(words),
        "assumptions": assumptions.as_record(shape),
        "models": [
            model_record(shape, dtype, request.tokens, request.block_size, assumptions.kv_bytes_per_token)
            for dtype in request.dtypes
        ],
        "ratio": rows,
        "verdict": None,
        "notices": _notices(request, rows, wires if wants_measured else {}),
    }


def _wires(request: Request, dtype: DType) -> Wires:
    """What moves between the ranks by prompt length; None when each side has one. Nothing where decode holds all."""
    spec = request.spec(dtype)  # which refuses what bench would
    if not request.assumptions.parallel:
        return None
    pairs = rank_pairs(spec.regions(request.prefill), spec.regions(request.decode), spec.order)
    wires = {}
    for count in request.tokens:
        held = request.assumptions.held_blocks(count, request.block_size)
        missing = blocks_of(count, request.block_size) > held
        wires[count] = on_the_wire(pairs, spec.blocks(count, held)) if missing else Wire({}, 0)
    return wires


def _read_measured(path: str) -> list[Measured]:
    result = read_result(path)
    return measured_rows(result["results"], str(result["scope"]))


def _notices(request: Request, rows: Sequence[dict[str, Any]], wanted: dict[DType, Wires]) -> list[str]:
    """`wanted` are the dtypes that measured times are wanted of, with what moves between the ranks."""
    notices = [*request.notices, *ratio_notices(request.shape, request.assumptions), LINE_RATES]
    notices += _pieces(request, rows)
    for dtype, wires in wanted.items():
        notices += _missing(request, dtype, wires)
    scopes = dict.fromkeys(entry["scope"] for row in rows for entry in row["measured"])
    if one_host := [scope for scope in scopes if scope in ONE_HOST_SCOPES]:
        notices.append(ONE_HOST.format(", ".join(one_host)))
    return [*notices, NO_VERDICT]


def _pieces(request: Request, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence about the pieces between several ranks: with unequal TP they depend on the layout."""
    most = {row["tokens"]: row["pieces"] for row in rows if row["dtype"] == request.dtypes[0].name and "pieces" in row}
    if not any(most.values()):
        return []
    told = ", ".join(f"{pieces:,} for {count:,} tokens" for count, pieces in most.items())
    pairs = f"{rows[0]['rank_pairs']} rank pair{'s' * (rows[0]['rank_pairs'] > 1)}"
    return [f"pieces of a request between {pairs} in layout {request.layout}, at most: {told}"]


def _missing(request: Request, dtype: DType, wires: Wires) -> list[str]:
    """A sentence about the prompt lengths that were not measured."""
    name, missing = request.shape.name, []
    for count in request.tokens:
        wire = wires[count] if wires else None
        size = request.assumptions.moved_bytes(request.shape, count, request.block_size, dtype, wire)
        if not matching(request.measured, name, dtype.name, count, size):
            missing.append(f"{count:,} tokens ({size:,} bytes)")
    return [f"not measured, and not estimated: {name} in {dtype.name} with {', '.join(missing)}"] if missing else []


def _print(document: dict[str, Any]) -> None:
    from kvxfer.result.printing import make_console, print_notices  # here, so that --help does not wait for them
    from kvxfer.result.ratio_table import render_ratio

    console = make_console()
    render_ratio(document["ratio"], document["assumptions"], console)
    print_notices(document["notices"], console)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer plan")


if __name__ == "__main__":
    sys.exit(main())
