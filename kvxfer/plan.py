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

from kvxfer import __version__, assumed, cli
from kvxfer.cache.layout import Ranks, rank_pairs, regions
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.wire import Wire, on_the_wire
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, matching, measured_rows
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, PACKED, DType, resolve_dtype
from kvxfer.model.presets import load_model
from kvxfer.model.record import model_record
from kvxfer.model.shape import ModelShape, blocks_of
from kvxfer.options import parse_int, parse_int_list, split_list
from kvxfer.result.file import SCHEMA_VERSION, read_result, write_result

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20

NO_VERDICT = "no verdict: this version computes the ratio and leaves the decision to the reader"
LOOPBACK = "the measured times are from one host (loopback): they say nothing about the links, and no verdict follows"
LINE_RATES = "line rates are upper bounds without protocol or set-up cost; kvxfer bench measures what a path takes"


Wires = dict[int, Wire] | None


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    shape: ModelShape
    dtypes: list[DType]
    tokens: list[int]
    block_size: int
    layout: str
    prefill: Ranks
    decode: Ranks
    assumptions: Assumptions
    measured: list[Measured]


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="preset (8b, 70b, deepseek-v3, …) or the path of a config.json")] = "8b",
    dtype: Annotated[
        str, typer.Option(help=f"of the cache: {', '.join([*DTYPES, *PACKED])}; fp8 is fp8_e4m3; several: A,B")
    ] = "bf16",
    tokens: Annotated[str, typer.Option(help="prompt lengths")] = "512,2048,8192",
    block_size: Annotated[str, typer.Option(help="tokens per block; whole blocks move")] = "16",
    layout: assumed.Layout = "nhd",
    tp_prefill: assumed.TpPrefill = None,
    tp_decode: assumed.TpDecode = None,
    pp_prefill: assumed.PpPrefill = None,
    pp_decode: assumed.PpDecode = None,
    prefix_hit_prefill: assumed.PrefixHitPrefill = "0",
    prefix_hit_decode: assumed.PrefixHitDecode = "0",
    gpus: assumed.Gpus = None,
    eff_tflops: assumed.EffTflops = "400",
    params: assumed.Params = None,
    params_active: assumed.ParamsActive = None,
    kv_bytes_per_token: Annotated[
        str | None, typer.Option(help="assumed: bytes per token on the wire, all rank pairs together [model's]")
    ] = None,
    link: assumed.Link = "100,200,400",
    links: assumed.Links = "shared",
    with_mtp: Annotated[
        bool, typer.Option("--with-mtp", help="count the layers of multi-token prediction too")
    ] = False,
    measured: Annotated[str | None, typer.Option(metavar="FILE", help="a result of kvxfer bench, set beside")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the figures there (-: to stdout, alone)")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables")] = False,
) -> None:
    """Set the transfer of a KV cache against its prefill, at line rates and as measured."""
    _, prefill, decode = assumed.read_ranks(layout, tp_prefill, tp_decode, pp_prefill, pp_decode)
    request = Request(
        shape=load_model(model).with_mtp() if with_mtp else load_model(model),
        dtypes=list(dict.fromkeys(resolve_dtype(word) for word in split_list(dtype, "--dtype"))),
        tokens=parse_int_list(tokens, "--tokens", high=LARGEST_TOKENS),
        block_size=parse_int(block_size, "--block-size", high=LARGEST_BLOCK),
        layout=layout.strip().lower(),
        prefill=prefill,
        decode=decode,
        assumptions=assumed.read_assumptions(
            prefill,
            decode,
            gpus=gpus,
            eff_tflops=eff_tflops,
            params=params,
            params_active=params_active,
            link=link,
            links=links,
            prefix_hit_prefill=prefix_hit_prefill,
            prefix_hit_decode=prefix_hit_decode,
            kv_bytes_per_token=kv_bytes_per_token,
        ),
        measured=[] if measured is None else _read_measured(measured),
    )
    if kv_bytes_per_token is not None and len(request.dtypes) > 1:
        raise UsageError("--kv-bytes-per-token is for one dtype, and --dtype names several; run once for each")
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
        "models": [_model(request, dtype) for dtype in request.dtypes],
        "ratio": rows,
        "verdict": None,
        "notices": _notices(request, rows, wires if wants_measured else {}),
    }


def _wires(request: Request, dtype: DType) -> Wires:
    """What moves between the ranks by prompt length; None when each side has one. Nothing where decode holds all."""
    if not request.assumptions.parallel:
        return None
    order, _ = assumed.LAYOUTS[request.layout]
    spec = CacheSpec(request.shape, dtype, request.block_size, order=order)
    pairs = rank_pairs(regions(spec.parts, request.prefill), regions(spec.parts, request.decode), spec.order)
    wires = {}
    for count in request.tokens:
        held = request.assumptions.held_blocks(count, request.block_size)
        missing = blocks_of(count, request.block_size) > held
        wires[count] = on_the_wire(pairs, spec.blocks(count, held)) if missing else Wire({}, 0)
    return wires


def _read_measured(path: str) -> list[Measured]:
    result = read_result(path)
    return measured_rows(result["results"], str(result["scope"]))


def _model(request: Request, dtype: DType) -> dict[str, Any]:
    """One entry of the result file's `models`; bytes per token that the user gave replace the model's."""
    shape, assumptions = request.shape, request.assumptions
    record = model_record(shape, dtype, request.tokens, request.block_size)
    if assumptions.kv_bytes_per_token is None:
        return record
    sizes = {str(count): assumptions.request_bytes(shape, count, request.block_size, dtype) for count in request.tokens}
    given = assumptions.kv_bytes_per_token
    return record | {"kv_bytes_per_token": given, "fixed_bytes_per_request": 0, "bytes_by_tokens": sizes}


def _notices(request: Request, rows: Sequence[dict[str, Any]], wanted: dict[DType, Wires]) -> list[str]:
    """`wanted` are the dtypes that measured times are wanted of, with what moves between the ranks."""
    shape = request.shape
    known = [*shape.notices, *shape.dtype_notices(request.dtypes)]
    notices = [*known, *ratio_notices(shape, request.assumptions), LINE_RATES]
    notices += _pieces(request, rows)
    for dtype, wires in wanted.items():
        notices += _missing(request, dtype, wires)
    if any(entry["scope"] == "loopback" for row in rows for entry in row["measured"]):
        notices.append(LOOPBACK)
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
    from kvxfer.result.ratio_table import render_ratio  # here, so that --help does not wait for them
    from kvxfer.result.tables import make_console

    console = make_console()
    render_ratio(document["ratio"], document["assumptions"], console)
    for notice in document["notices"]:
        console.print(f"note: {notice}", highlight=False, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer plan")


if __name__ == "__main__":
    sys.exit(main())
