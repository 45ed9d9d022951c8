"""The options that only plan has: the load, the GPUs of both pools, the target, how long prefill and decode take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import typer

from kvxfer.asked import LARGEST_TOKENS, Asked, Options
from kvxfer.cache.layout import Ranks
from kvxfer.cache.sends import Cut
from kvxfer.cost.load import Load
from kvxfer.cost.load_file import PER_S, TraceUnit, read_load
from kvxfer.cost.pools import Cluster, make_cluster
from kvxfer.cost.prefill_file import read_prefill_times
from kvxfer.cost.prefill_source import PrefillRate, PrefillSource
from kvxfer.errors import UsageError
from kvxfer.options import parse_choice, parse_float, parse_int, parse_int_list
from kvxfer.pipelining import parse_one_cut

LARGEST_GPUS = 1_000_000
LARGEST_MS = 1e9
LARGEST_US = 1e6
SMALLEST_CHUNK = 16
USUAL_CHUNKS = "2048,512"
MOST_CHUNKS = 200_000
"""Of a prompt: each is computed by itself."""


@dataclass(frozen=True)
class LoadOptions:
    """What the user typed, unread."""

    lengths: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="prompt lengths, one a line, or a trace as Mooncake's or Azure's [--tokens]"),
    ] = None
    trace_unit: Annotated[
        str | None, typer.Option(metavar="ms|s", help="of a trace's timestamps that are numbers [ms if they are whole]")
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="X", help="requests per second that the service is offered [the trace's]")
    ] = None
    output_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="tokens that a request is answered with, mean [the trace's]")
    ] = None
    objective: Annotated[str | None, typer.Option(metavar="latency|throughput", help="what counts")] = None
    itl_target_ms: Annotated[
        str | None, typer.Option(metavar="X", help="target of the p99 time between two tokens")
    ] = None
    decode_step_ms: Annotated[
        str | None, typer.Option(metavar="X", help="how long a decode step takes at your batch, without prefill")
    ] = None
    chunk: Annotated[
        str | None,
        typer.Option(metavar="N,…", help=f"chunk sizes of colocated prefill to look at, in tokens [{USUAL_CHUNKS}]"),
    ] = None
    total_gpus: Annotated[str | None, typer.Option(metavar="N", help="GPUs of both pools [their sum]")] = None
    prefill_gpus: Annotated[
        str | None, typer.Option(metavar="N", help="GPUs of the prefill pool; --gpus of them make an engine")
    ] = None
    decode_gpus: Annotated[
        str | None,
        typer.Option(metavar="N", help="GPUs of the decode pool; decode's ranks, or as many as prefill's, an engine"),
    ] = None
    kv_memory_gb: Annotated[
        str | None, typer.Option(metavar="X", help="memory for the cache on each GPU of decode, in GB")
    ] = None
    fixed_ms: Annotated[
        str, typer.Option(metavar="X", help="assumed: α, what a transfer costs beside its bytes, in ms")
    ] = "0"
    send_ms: Annotated[
        str, typer.Option(metavar="X", help="assumed: the part of --fixed-ms that each send of --pipeline costs again")
    ] = "0"
    gamma_us: Annotated[
        str, typer.Option(metavar="X", help="assumed: γ, what each piece of a transfer costs beside its bytes, in µs")
    ] = "0"
    pipeline: Annotated[
        str,
        typer.Option(
            metavar="off|best|K[xC]",
            help="let K layers (of chunks of C tokens) leave together while later ones are computed, by a model; best: "
            "of bench's sweep",
        ),
    ] = "off"
    fragmentation: Annotated[
        str, typer.Option(metavar="F", help="of a request's blocks, 0 … 1, which makes its pieces")
    ] = "1"
    regions: Annotated[
        str, typer.Option(metavar="1|2", help="memory regions per layer, each with pieces of its own")
    ] = "1"
    prefill_tokens_per_s: Annotated[
        str | None, typer.Option(metavar="X", help="measured by you: tokens that one engine prefills per second")
    ] = None
    prefill_csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="measured by you: lines of a prompt length and its prefill in ms")
    ] = None
    prefill_extrapolate: Annotated[
        bool, typer.Option("--prefill-extrapolate", help="use --prefill-csv outside the lengths in it too")
    ] = False


@dataclass(frozen=True)
class Offered:
    """What the user said of the service, checked; None where nothing was said.

    from_file: the load is that of a file. chunks are sizes that the user gave, or (chunks_given False) the usual ones.
    ranks are the sides' ranks where the user named both. given is the prefill that the user measured. cut is how
    prompts leave layer by layer; None: all at once. fragmentation and regions per layer make the pieces of a request.
    """

    load: Load
    from_file: bool
    cluster: Cluster
    objective: str | None
    itl_target_ms: float | None
    step_ms: float | None
    chunks: Sequence[int]
    chunks_given: bool
    kv_memory_gb: float | None
    ranks: tuple[Ranks, Ranks] | None
    given: PrefillSource | None
    cut: Cut | Literal["best"] | None
    fragmentation: float
    regions: int


def read_load_options(options: LoadOptions, shared: Options, asked: Asked, tokens_given: bool) -> tuple[Asked, Offered]:
    """What was asked for with the prompt lengths of a file in place of the default ones, and what is offered.

    Raises UsageError that names the option, or the line of a file, that is wrong.
    """
    load = _load(options, asked)
    if options.lengths is not None and not tokens_given:
        asked = replace(asked, tokens=list(dict.fromkeys(load.percentile(percent) for percent in (50, 90, 99))))
    fixed_ms = parse_float(options.fixed_ms, "--fixed-ms", 0, LARGEST_MS)
    send_ms = parse_float(options.send_ms, "--send-ms", 0, LARGEST_MS)
    if send_ms > fixed_ms:
        raise UsageError(
            f"--send-ms {send_ms:g} is more than --fixed-ms {fixed_ms:g}, of which it is the part that each send costs "
            "again; give what a whole transfer costs beside its bytes as --fixed-ms"
        )
    gamma_us = parse_float(options.gamma_us, "--gamma-us", 0, LARGEST_US)
    asked = replace(
        asked, assumptions=replace(asked.assumptions, fixed_ms=fixed_ms, send_ms=send_ms, gamma_us=gamma_us)
    )
    layers = len(asked.spec(asked.dtypes[0]).kinds)
    prefill_named = shared.tp_prefill is not None or shared.pp_prefill is not None
    decode_named = shared.tp_decode is not None or shared.pp_decode is not None
    objective = options.objective
    chunk = USUAL_CHUNKS if options.chunk is None else options.chunk
    return asked, Offered(
        load=load,
        from_file=options.lengths is not None,
        cluster=_cluster(options, asked, decode_named),
        objective=None if objective is None else parse_choice(objective, "--objective", ["latency", "throughput"]),
        itl_target_ms=_positive(options.itl_target_ms, "--itl-target-ms", LARGEST_MS),
        step_ms=_positive(options.decode_step_ms, "--decode-step-ms", LARGEST_MS),
        chunks=_chunks(chunk, max(load.prompts)),
        chunks_given=options.chunk is not None,
        kv_memory_gb=_positive(options.kv_memory_gb, "--kv-memory-gb", 1e6),
        ranks=(asked.prefill, asked.decode) if prefill_named and decode_named else None,
        given=_given(options),
        cut=parse_one_cut(options.pipeline, layers, max(max(load.prompts), *asked.tokens)),
        fragmentation=parse_float(options.fragmentation, "--fragmentation", 0, 1),
        regions=parse_int(options.regions, "--regions", high=2),
    )


def _chunks(text: str, longest: int) -> list[int]:
    """Sizes that cut the longest prompt into so many that a plan still answers at once. Raises UsageError."""
    sizes = parse_int_list(text, "--chunk", SMALLEST_CHUNK, LARGEST_TOKENS)
    if longest > MOST_CHUNKS * min(sizes):
        raise UsageError(
            f"--chunk {min(sizes)} cuts a prompt of {longest:,} tokens into more than {MOST_CHUNKS:,} chunks; give "
            "larger ones"
        )
    return sizes


def _load(options: LoadOptions, asked: Asked) -> Load:
    load = Load(asked.tokens, "the prompts of --tokens, equally often")
    if options.lengths is not None:
        unit = None if options.trace_unit is None else parse_choice(options.trace_unit, "--trace-unit", PER_S)
        load = read_load(options.lengths, cast("TraceUnit | None", unit))
    elif options.trace_unit is not None:
        raise UsageError("--trace-unit says how to read the trace of --lengths, and there is none; give both")
    if options.output_tokens is not None:
        tokens = parse_float(options.output_tokens, "--output-tokens", 0, LARGEST_TOKENS, above_low=True)
        load = replace(load, outputs=[tokens])
    return replace(load, rate=_positive(options.rate, "--rate", 1e9))


def _cluster(options: LoadOptions, asked: Asked, decode_named: bool) -> Cluster:
    """An engine of decode takes the ranks that were named, and else as many GPUs as one of prefill."""

    def gpus(text: str | None, name: str) -> int | None:
        return None if text is None else parse_int(text, name, high=LARGEST_GPUS)

    engine = asked.assumptions.gpus
    return make_cluster(
        prefill_instance=engine,
        decode_instance=asked.decode.count if decode_named else engine,
        prefill=gpus(options.prefill_gpus, "--prefill-gpus"),
        decode=gpus(options.decode_gpus, "--decode-gpus"),
        total=gpus(options.total_gpus, "--total-gpus"),
    )


def _given(options: LoadOptions) -> PrefillSource | None:
    if options.prefill_csv is not None:
        if options.prefill_tokens_per_s is not None:
            raise UsageError("--prefill-csv and --prefill-tokens-per-s both say how long prefill takes; give one")
        return read_prefill_times(options.prefill_csv, options.prefill_extrapolate)
    if options.prefill_extrapolate:
        raise UsageError(
            "--prefill-extrapolate says how to read --prefill-csv, and there is none; give both or neither"
        )
    rate = _positive(options.prefill_tokens_per_s, "--prefill-tokens-per-s", 1e12)
    return None if rate is None else PrefillRate(rate)


def _positive(text: str | None, name: str, high: float) -> float | None:
    return None if text is None else parse_float(text, name, 1e-6, high)
