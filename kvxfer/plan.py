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
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, matching, measured_rows
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, PACKED, DType, resolve_dtype
from kvxfer.model.presets import load_model
from kvxfer.model.record import model_record
from kvxfer.model.shape import ModelShape
from kvxfer.options import parse_count, parse_float, parse_int, parse_int_list, split_list
from kvxfer.result.file import SCHEMA_VERSION, read_result, write_result
from kvxfer.topology.links import parse_links

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20

NO_VERDICT = "no verdict: this version computes the ratio and leaves the decision to the reader"
LOOPBACK = "the measured times are from one host (loopback): they say nothing about the links, and no verdict follows"
LINE_RATES = "line rates are upper bounds without protocol or set-up cost; kvxfer bench measures what a path takes"


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    shape: ModelShape
    dtypes: list[DType]
    tokens: list[int]
    block_size: int
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
    gpus: Annotated[str, typer.Option(help="assumed: GPUs that share a prefill")] = "4",
    eff_tflops: Annotated[str, typer.Option(help="assumed: TFLOP/s that each of them sustains")] = "400",
    params: Annotated[str | None, typer.Option(help="assumed: parameters of the seed row, as 70e9 [model's]")] = None,
    params_active: Annotated[
        str | None, typer.Option(help="assumed: active parameters of the full row, embedding included [model's]")
    ] = None,
    kv_bytes_per_token: Annotated[
        str | None, typer.Option(help="assumed: bytes per token on the wire, say with replicated heads [model's]")
    ] = None,
    link: Annotated[str, typer.Option(help="assumed: line rates in Gb/s or names (100gbe, ndr)")] = "100,200,400",
    prefix_hit_prefill: Annotated[
        str, typer.Option(help="share of a prompt in prefill's prefix cache (0 … 1), which is not computed")
    ] = "0",
    prefix_hit_decode: Annotated[
        str, typer.Option(help="share of a prompt in decode's prefix cache (0 … 1), whose whole blocks do not move")
    ] = "0",
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
    request = Request(
        shape=load_model(model).with_mtp() if with_mtp else load_model(model),
        dtypes=list(dict.fromkeys(resolve_dtype(word) for word in split_list(dtype, "--dtype"))),
        tokens=parse_int_list(tokens, "--tokens", high=LARGEST_TOKENS),
        block_size=parse_int(block_size, "--block-size", high=LARGEST_BLOCK),
        assumptions=Assumptions(
            gpus=parse_int(gpus, "--gpus", high=1_000_000),
            eff_tflops=parse_float(eff_tflops, "--eff-tflops", 0.001, 1e6),
            params=None if params is None else parse_count(params, "--params"),
            params_active=None if params_active is None else parse_count(params_active, "--params-active"),
            link_gbit=tuple(parse_links(link)),
            kv_bytes_per_token=None
            if kv_bytes_per_token is None
            else parse_int(kv_bytes_per_token, "--kv-bytes-per-token"),
            prefix_hit_prefill=parse_float(prefix_hit_prefill, "--prefix-hit-prefill", 0, 1),
            prefix_hit_decode=parse_float(prefix_hit_decode, "--prefix-hit-decode", 0, 1),
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
    rows = [
        row
        for dtype in request.dtypes
        for row in ratio_rows(shape, dtype, request.tokens, request.block_size, assumptions, request.measured)
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
        "notices": _notices(request, rows, wants_measured),
    }


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


def _notices(request: Request, rows: Sequence[dict[str, Any]], wants_measured: bool) -> list[str]:
    shape = request.shape
    known = [*shape.notices, *shape.dtype_notices(request.dtypes)]
    notices = [*known, *ratio_notices(shape, request.assumptions), LINE_RATES]
    if wants_measured:
        notices += [notice for dtype in request.dtypes for notice in _missing(request, dtype)]
    if any(entry["scope"] == "loopback" for row in rows for entry in row["measured"]):
        notices.append(LOOPBACK)
    return [*notices, NO_VERDICT]


def _missing(request: Request, dtype: DType) -> list[str]:
    """A sentence about the prompt lengths that were not measured."""
    name, missing = request.shape.name, []
    for count in request.tokens:
        size = request.assumptions.moved_bytes(request.shape, count, request.block_size, dtype)
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
