"""`kvxfer plan`: whether to split prefill from decode; what the cache's transfer costs beside prefill, and the verdict.

Answers at once: nothing heavy may be imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from kvxfer import __version__, cli, explained
from kvxfer.asked import Asked, Options, read, takes_options
from kvxfer.cache.sends import Cut
from kvxfer.cache.wire import Wire
from kvxfer.cost.beside_bytes import line_rate_notices
from kvxfer.cost.doubts import doubts
from kvxfer.cost.fitted import fitted_models, fitting
from kvxfer.cost.measured import matching, measured_rows
from kvxfer.cost.pipeline import LONGEST_PROMPT, longest
from kvxfer.cost.predicted import predicted_entries
from kvxfer.cost.prefill_layers import PrefillLayers, prefill_layers
from kvxfer.cost.prefill_source import GIVEN, PrefillSource
from kvxfer.cost.ratio import ratio_notices, ratio_rows, wire_ms
from kvxfer.decision import (
    Measurement,
    layers_refused,
    pipelining_notices,
    plan_record,
    pool_notices,
    service_of,
    unused_notices,
    verdict_record,
)
from kvxfer.errors import UsageError
from kvxfer.load_options import LoadOptions, Offered, read_load_options
from kvxfer.model.dtypes import DType
from kvxfer.model.record import model_record
from kvxfer.pipelining import chunk_notices
from kvxfer.result.file import ONE_HOST_SCOPES, SCHEMA_VERSION, read_result, write_result
from kvxfer.topology.links import parse_links
from kvxfer.wording import three_digits, told_requests

ONE_HOST = (
    "the measured times are from one host ({}): they say nothing about the links, and no verdict follows; measure "
    "between two hosts (kvxfer bench --peer), or leave --measured out for a verdict from line rates"
)
AT_ONCE = "measured rows with several requests at once are left out: each waits for the others; --inflight 1"
ONE_RANK = "fitted cost models predict requests between one rank on each side; they are not used for several"
REAL_LAYERS = (
    "the prefill of real layers in the measured result ({}, random weights, without an engine) {}; time your engine's, "
    "--prefill-csv or --prefill-tokens-per-s"
)
OTHER_LAYERS = (
    "the prefill of real layers in the measured result has no whole prompt of this model and is not looked at"
)
NOT_PIPELINED = "what was measured on one host ({}) is no path between two, and --pipeline is not looked at over it"
EVEN_COMPUTE = (
    "pipelining: a prompt's compute is shared out evenly over its {:,} layers; bytes and pieces are each layer's own"
)
STAGES = (
    "pipelining: prefill's {} pipeline stages compute a prompt one after another, in the time that its source "
    "says; an assumed one keeps the GPUs of all stages busy, which one prompt alone does not"
)
LINE_RATES = "line rates are upper bounds without protocol or set-up cost; kvxfer bench measures what a path takes"

OBSERVED_TAKES = ("observed", "link", "json", "quiet")

Wires = dict[int, Wire] | None


@dataclass(frozen=True)
class Request(Asked):
    """What the user asked for, checked; with what a result holds to set beside."""

    measurement: Measurement
    offered: Offered


@takes_options
def command(
    context: typer.Context,
    options: Options,
    load: LoadOptions,
    measured: Annotated[str | None, typer.Option(metavar="FILE", help="a result of kvxfer bench, set beside")] = None,
    observed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,…|LINE|FILE|URL",
            help="explain transfers that ran elsewhere: bytes=…,descriptors=…,ms=…,post_ms=…, vLLM's line of KV "
            "Transfer metrics, its log, or its Prometheus metrics",
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the figures there (-: to stdout, alone)")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables")] = False,
) -> None:
    """Set the transfer of a KV cache against its prefill, and say whether to split prefill from decode."""
    if observed:
        _require_unused(context)
        explained.show(observed, parse_links(options.link), context.obj, json, quiet)
        return
    asked = read(options)
    measurement = Measurement() if measured is None else _read_measured(measured, asked.shape.name)
    if measurement.layers is not None and load.prefill_csv is None and load.prefill_tokens_per_s is None:
        asked = _as_measured(asked, options, measurement.layers)
    asked, offered = read_load_options(load, options, asked, _given(context, "tokens"))
    request = Request(**vars(asked), measurement=measurement, offered=offered)
    document = plan_document(request, context.obj, wants_measured=measured is not None)
    if json is not None:
        write_result(json, document)
    if not quiet and json != "-":
        _print(document)


def _require_unused(context: typer.Context) -> None:
    """Raises UsageError that names the options that were given and that --observed does not look at."""
    unused = [
        one.opts[0] for one in context.command.params if one.name not in OBSERVED_TAKES and _given(context, one.name)
    ]
    if unused:
        raise UsageError(
            f"--observed explains transfers that ran elsewhere and does not look at {', '.join(unused)}; leave that "
            "out, or run without --observed"
        )


def _given(context: typer.Context, name: str | None) -> bool:
    """Whether the user said something for that option."""
    source = context.get_parameter_source(name or "")
    return source is not None and source.name != "DEFAULT"


def plan_document(request: Request, words: Sequence[str], wants_measured: bool = False) -> dict[str, Any]:
    """The plan as JSON: the fields of a result file that need no measurement, in the same form.

    `words` are the command line.
    """
    shape, assumptions = request.shape, request.assumptions
    wires = {dtype: _wires(request, dtype) for dtype in request.dtypes}
    rows = [
        row
        for dtype, between in wires.items()
        for row in ratio_rows(
            shape,
            dtype,
            request.tokens,
            request.block_size,
            assumptions,
            request.measurement.rows,
            between,
            request.offered.given,
            request.measurement.layers,
            request.on_links(dtype, request.offered.regions, request.offered.fragmentation),
        )
    ]
    _predict(request, rows)
    service = service_of(request, request.offered, request.measurement if wants_measured else None, rows)
    one_host = _one_host(request)
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
        "plan": plan_record(service),
        "verdict": None if one_host else verdict_record(service),
        "notices": [
            *_notices(request, rows, wires if wants_measured else {}, service.source),
            *pool_notices(service),
            *unused_notices(service),
            *pipelining_notices(service),
        ],
    }


def _wires(request: Request, dtype: DType) -> Wires:
    """What moves between the ranks by prompt length; None when each side has one. Nothing where decode holds all."""
    wire = request.wire(dtype, request.offered.regions)
    return None if wire is None else {count: wire(count) for count in request.tokens}


def _read_measured(path: str, model: str) -> Measurement:
    """What a result holds, of its prefills those of this model."""
    result = read_result(path)
    rows = measured_rows(result["results"], str(result["scope"]))
    prefills = result.get("prefill", [])
    layers = prefill_layers(prefills, model)
    return Measurement(rows, fitted_models(result["cost_model"]), layers, bool(prefills) and layers is None)


def _as_measured(asked: Asked, options: Options, layers: PrefillLayers) -> Asked:
    """With the GPUs that layers were measured on, where the user says nothing of how many share a prefill."""
    if not layers.on_gpu or options.gpus is not None or asked.prefill.count > 1:
        return asked
    return replace(asked, assumptions=replace(asked.assumptions, gpus=layers.devices))


def _predict(request: Request, rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row what fitted cost models say of its request; they are of one rank on each side."""
    if request.assumptions.parallel:
        return
    for dtype in request.dtypes:
        models = fitting(request.measurement.fitted, request.shape.name, dtype.name)
        pieces = request.pieces(dtype, request.offered.regions, request.offered.fragmentation)
        for row in rows:
            if models and row["dtype"] == dtype.name:
                row["predicted"] = predicted_entries(models, row["bytes"], pieces(row["tokens"]), row["prefill_ms"])


def _notices(
    request: Request, rows: Sequence[dict[str, Any]], wanted: dict[DType, Wires], source: PrefillSource | None
) -> list[str]:
    """`wanted` are the dtypes that measured times are wanted of, with what moves between the ranks."""
    notices = [*request.notices, *ratio_notices(request.shape, request.assumptions), LINE_RATES]
    notices += [*_beside_bytes(request, rows, source), *_pieces(request, rows), *_as_flops(request, rows)]
    for dtype, wires in wanted.items():
        notices += _missing(request, dtype, wires, _predicted(rows, dtype))
    notices += _outside(rows)
    if request.measurement.fitted and request.assumptions.parallel:
        notices.append(ONE_RANK)
    if any(row.inflight > 1 for row in request.measurement.rows):
        notices.append(AT_ONCE)
    if request.measurement.layers is not None and request.offered.given is None:
        notices.append(_layers(request, request.measurement.layers))
    if request.measurement.other_layers:
        notices.append(OTHER_LAYERS)
    notices += _doubts(request)
    if isinstance(request.offered.cut, Cut):
        notices += chunk_notices(
            [request.offered.cut],
            [*request.tokens, *request.offered.load.prompts],
            request.assumptions.cached_tokens,
        )
    if request.offered.cut is not None:
        if (layers := len(request.spec(request.dtypes[0]).kinds)) > 1:
            notices.append(EVEN_COMPUTE.format(layers))
        if request.prefill.pp > 1:
            notices.append(STAGES.format(request.prefill.pp))
    if one_host := _one_host(request):
        notices.append(ONE_HOST.format(", ".join(one_host)))
        if request.offered.cut is not None:
            notices.append(NOT_PIPELINED.format(", ".join(one_host)))
    return notices


def _layers(request: Request, layers: PrefillLayers) -> str:
    """A sentence about what the prefill of real layers decides, or why it does not."""
    why = layers_refused(request, request.offered, layers)
    decides = f"decides nothing here: {why}"
    if why is None:
        decides = f"is of {layers.named_devices}; figures that name no basis, and the verdict, go by it"
    return REAL_LAYERS.format(layers.how, decides)


def _doubts(request: Request) -> list[str]:
    """What speaks against the measured times that are set beside."""
    measurement, names = request.measurement, {dtype.name for dtype in request.dtypes}
    own = [row for row in measurement.rows if row.model == request.shape.name and row.dtype in names]
    fitted = [one for name in names for one in fitting(measurement.fitted, request.shape.name, name)]
    return doubts(own, fitted, measurement.layers)


def _one_host(request: Request) -> list[str]:
    """The scopes of measured times that say nothing about a link."""
    told = {row.scope for row in request.measurement.rows} | {one.scope for one in request.measurement.fitted}
    return [scope for scope in ONE_HOST_SCOPES if scope in told]


def _beside_bytes(request: Request, rows: Sequence[dict[str, Any]], source: PrefillSource | None) -> list[str]:
    """What a transfer is assumed to cost beside its bytes, up to which length that is most of it, what it may be."""
    assumptions, offered, dtype = request.assumptions, request.offered, request.dtypes[0]
    on_links = request.on_links(dtype, offered.regions, offered.fragmentation)
    prefill_ms = {row["tokens"]: row["prefill_ms"] for row in rows if source and row["basis"] == source.basis}
    pieces = {tokens: max((each for _, each in on_links(tokens)), default=0) for tokens in prefill_ms}
    notices = line_rate_notices(assumptions, pieces, prefill_ms, request.measurement.fitted)
    if assumptions.fixed_ms:
        best = max(assumptions.link_gbit)

        def fixed_is_more(tokens: int) -> bool:
            return max((wire_ms(size, best) for size, _ in on_links(tokens)), default=0) < assumptions.fixed_ms

        upto = longest(fixed_is_more)
        if upto:
            lengths = "of any length" if upto == LONGEST_PROMPT else f"up to {upto:,} tokens"
            told = f"the fixed {assumptions.fixed_ms:g} ms of a transfer are more than its bytes take"
            notices.append(f"{told} of prompts {lengths} in {dtype.name} at {best:g} Gb/s")
    return notices


def _as_flops(request: Request, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence that sets what was measured of prefill beside what the GPUs are assumed to sustain."""
    by_basis = {row["basis"]: row for row in rows}  # the longest prompt's
    if GIVEN not in by_basis or "full" not in by_basis:
        return []
    gpus, assumed = request.assumptions.gpus, request.assumptions.eff_tflops
    sustained = assumed * by_basis["full"]["prefill_ms"] / by_basis[GIVEN]["prefill_ms"]
    tokens, whose = by_basis[GIVEN]["tokens"], f"each of {gpus} GPUs" if gpus > 1 else "one GPU"
    prompt = f"{tokens:,} token{'s' * (tokens > 1)}"
    return [
        f"the given prefill of {prompt} is {three_digits(sustained)} TFLOP/s on {whose}, beside {assumed:g} assumed"
    ]


def _pieces(request: Request, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence about the pieces between several ranks: with unequal TP they depend on the layout."""
    most = {row["tokens"]: row["pieces"] for row in rows if row["dtype"] == request.dtypes[0].name and "pieces" in row}
    if not any(most.values()):
        return []
    told = ", ".join(f"{pieces:,} for {count:,} tokens" for count, pieces in most.items())
    pairs = f"{rows[0]['rank_pairs']} rank pair{'s' * (rows[0]['rank_pairs'] > 1)}"
    return [f"pieces of a request between {pairs} in layout {request.layout}, at most: {told}"]


def _predicted(rows: Sequence[dict[str, Any]], dtype: DType) -> set[int]:
    """The prompt lengths that a cost model reaches."""
    return {
        row["tokens"]
        for row in rows
        if row["dtype"] == dtype.name and any(entry["transfer_ms"] is not None for entry in row.get("predicted", ()))
    }


def _outside(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence about each cost model of which nothing is predicted, for some prompt: its range, and what that has."""
    asked: dict[str, dict[str, None]] = {}
    for row in rows:
        for entry in row.get("predicted", ()):
            if entry["transfer_ms"] is None:
                span = told_requests(entry["valid"]["bytes"], entry["valid"]["descriptors"])
                size, pieces = row["bytes"], entry["descriptors"]
                prompt = f"{row['tokens']:,} tokens ({told_requests((size, size), (pieces, pieces))})"
                model = f"{entry['backend']} {entry['op']} in {row['dtype']} was fitted on {span}"
                asked.setdefault(model, {})[prompt] = None
    return [f"{model}: nothing is predicted of {', '.join(prompts)}" for model, prompts in asked.items()]


def _missing(request: Request, dtype: DType, wires: Wires, predicted: set[int]) -> list[str]:
    """A sentence about the prompt lengths that were neither measured nor are predicted from what was fitted."""
    name, missing = request.shape.name, []
    for count in request.tokens:
        wire = wires[count] if wires else None
        size = request.assumptions.moved_bytes(request.shape, count, request.block_size, dtype, wire)
        if count not in predicted and not matching(request.measurement.rows, name, dtype.name, count, size):
            missing.append(f"{count:,} tokens ({size:,} bytes)")
    return [f"not measured: {name} in {dtype.name} with {', '.join(missing)}"] if missing else []


def _print(document: dict[str, Any]) -> None:
    from kvxfer.result.plan_tables import render_plan, render_verdict  # here, so that --help does not wait for them
    from kvxfer.result.printing import make_console, print_notices
    from kvxfer.result.ratio_table import render_ratio

    console = make_console()
    render_ratio(document["ratio"], document["assumptions"], console)
    render_plan(document["plan"], console)
    print_notices(document["notices"], console)
    render_verdict(document["verdict"], console)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer plan")


if __name__ == "__main__":
    sys.exit(main())
