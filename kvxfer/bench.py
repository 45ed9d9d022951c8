"""`python -m kvxfer.bench`: move a model's KV cache between two processes or hosts, and set it against prefill."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer import cli
from kvxfer.asked import Asked, Options, read, takes_options
from kvxfer.errors import ExitStatus, UnavailableError, UsageError
from kvxfer.options import parse_choice, parse_float, parse_int
from kvxfer.wording import plain

if TYPE_CHECKING:
    from kvxfer.control.channel import Client
    from kvxfer.measure.request import Op, Pipelining, Row
    from kvxfer.measure.run import Outcome, Request
    from kvxfer.measure.session import Session

FIT_SECONDS = "150"

OPS: dict[str, list[Op]] = {"push": ["push"], "pull": ["pull"], "both": ["push", "pull"]}


@takes_options
def command(
    context: typer.Context,
    options: Options,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME,…", help="auto, tcp, ucx, shm, cma or null; several, or all, are measured in turn"),
    ] = "auto",
    op: Annotated[
        str, typer.Option(metavar="push|pull|both", help="push: prefill writes; pull: decode reads")
    ] = "push",
    fragmentation: Annotated[
        str, typer.Option(metavar="SHARE", help="0: a request is one run of blocks; 1: no two blocks are adjacent")
    ] = "1",
    seed: Annotated[str, typer.Option(metavar="N", help="of block tables and contents")] = "0",
    regions: Annotated[
        str, typer.Option(metavar="1|2", help="memory regions per layer: 1 (K and V together) or 2")
    ] = "1",
    inflight: Annotated[str, typer.Option(metavar="N", help="requests at once")] = "1",
    pipeline: Annotated[
        str,
        typer.Option(
            metavar="off|sweep|all|K[xC],…",
            help="send K layers of a chunk of C tokens (of all) once they are computed; sweep: many K, all: every one",
        ),
    ] = "off",
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="timed|spin[:MS]|layers",
            help="what --pipeline computes: a layer takes MS [the assumed prefill's], with the CPU free or a core "
            "held; or real layers, in torch [timed]",
        ),
    ] = None,
    measure_prefill: Annotated[
        bool,
        typer.Option("--measure-prefill", help="time the prefill here: the model's layers at true widths, in torch"),
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="cpu", help="where the caches lie (GPU memory comes in a later version)")
    ] = "cpu",
    peer: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="a waiting `kvxfer serve` [none: here]")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="our secret key, for --peer (kvxfer keys)")] = None,
    server_key: Annotated[Path | None, typer.Option(metavar="FILE", help="the public key of the --peer")] = None,
    max_seconds: Annotated[str, typer.Option(metavar="S", help="most time that a row's steady state takes")] = "5",
    fit: Annotated[
        bool, typer.Option("--fit", help="then fit a cost model up to the longest prompt, on requests of its own")
    ] = False,
    fit_seconds: Annotated[
        str | None,
        typer.Option(metavar="S", help=f"about so long for each cost model (a backend, dtype and op) [{FIT_SECONDS}]"),
    ] = None,
    min_samples: Annotated[str, typer.Option(metavar="N", help="fewest samples before a row may end early")] = "20",
    setup_repeats: Annotated[str, typer.Option(metavar="N", help="fresh process pairs per row")] = "5",
    verify: Annotated[
        str,
        typer.Option(metavar="full|sample|off", help="full: every byte of first and last request; sample: some blocks"),
    ] = "full",
    require_transport: Annotated[
        str | None, typer.Option(metavar="NAME", help="fail when something else carried the bytes (tcp, tcp/eth0)")
    ] = None,
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[BACKEND.]NAME=N",
            help="of every backend (connections=4) or of one (tcp.connections=4, ucx.errors=none); repeatable",
        ),
    ] = None,
    ucx_endpoints: Annotated[
        str | None, typer.Option(metavar="N", help="UCX endpoints between two processes, each with a thread (1)")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="write the result there (-: stdout, alone)")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables and no progress")] = False,
) -> int:
    """Measure what moving a model's KV cache from prefill to decode costs, cold and steady, beside its prefill."""
    parse_choice(device, "--device", ["cpu"])
    asked = read(options)
    per_layer = parse_int(regions, "--regions", high=2)
    ops = OPS[parse_choice(op, "--op", OPS)]
    alike: dict[str, Any] = {
        "fragmentation": parse_float(fragmentation, "--fragmentation", 0, 1),
        "seed": parse_int(seed, "--seed", low=0, high=(1 << 63) - 1),
        "inflight": parse_int(inflight, "--inflight", high=256),
        "prefill": asked.prefill,
        "decode": asked.decode,
    }
    effort: dict[str, Any] = {
        "max_seconds": parse_float(max_seconds, "--max-seconds", 0, 86_400, above_low=True),
        "min_samples": parse_int(min_samples, "--min-samples", high=1_000_000),
        "setup_repeats": parse_int(setup_repeats, "--setup-repeats", high=1000),
        "verify": parse_choice(verify, "--verify", ["full", "sample", "off"]),
    }
    seconds = _fit_seconds(fit_seconds, fit)

    # What is heavy to import comes only now, so that --help and wrong usage answer at once.
    from kvxfer.backend.probe import ALL, MEASURES_NOTHING, choose_backends
    from kvxfer.measure.request import Effort
    from kvxfer.measure.run import Request

    if measure_prefill:
        _require_layers(asked)
    pipelining = _pipelining(asked, pipeline, compute, int(alike["inflight"]))
    backends = choose_backends(backend)
    if fit and all(name in MEASURES_NOTHING for name in backends):
        raise UsageError(
            f"--fit: backend {', '.join(backends)} moves nothing, and a cost model is of moving; name another"
        )
    given = [*(backend_option or []), *([f"ucx.endpoints={ucx_endpoints}"] if ucx_endpoints is not None else [])]
    backend_options = _backend_options(given, backends)
    request = Request(
        rows=_rows(asked, per_layer, ops, backend_options, alike),
        effort=Effort(**effort),
        assumptions=asked.assumptions,
        words=context.obj,
        require_transport=require_transport or "",
        notices=[*asked.notices, *_pipelining_notices(asked, pipelining)],
        leave_out=backend.strip().lower() == ALL,
        pipelining=pipelining,
    )
    return _run(request, measure_prefill, seconds, peer, key, server_key, json, quiet)


def _rows(
    asked: Asked, per_layer: int, ops: list[Op], backends: dict[str, dict[str, int]], alike: dict[str, Any]
) -> list[Row]:
    """Of each backend with its options. Raises UsageError when one cannot be cut over the ranks, or moves nothing."""
    from kvxfer.measure.request import Row

    rows = [
        Row(
            spec=spec,
            backend=backend,
            op=op,
            tokens=tokens,
            held_blocks=asked.assumptions.held_blocks(tokens, asked.block_size),
            options=own_options,
            **alike,
        )
        for spec in [asked.spec(dtype, per_layer) for dtype in asked.dtypes]
        for op in ops
        for tokens in asked.tokens
        for backend, own_options in backends.items()
    ]
    for row in rows:
        row.check()
    return rows


def _fit_seconds(text: str | None, fit: bool) -> float | None:
    """None: there is no fit."""
    if fit:
        return parse_float(FIT_SECONDS if text is None else text, "--fit-seconds", 0, 86_400, above_low=True)
    if text is not None:
        raise UsageError("--fit-seconds says how long --fit measures, and there is none; give both or neither")
    return None


def _pipelining(asked: Asked, pipeline: str, compute: str | None, inflight: int) -> Pipelining | None:
    """What --pipeline and --compute ask for; a layer's compute is, unless given, its share of the assumed prefill."""
    from kvxfer.cost.measured import ASSUMED_COMPUTE
    from kvxfer.cost.ratio import ratio_rows
    from kvxfer.measure.request import Pipelining
    from kvxfer.pipelining import parse_compute, parse_pipeline

    layers = len(asked.spec(asked.dtypes[0]).kinds)
    cuts = parse_pipeline(pipeline, layers, asked.tokens)
    if cuts is None:
        if compute is not None:
            raise UsageError("--compute says what --pipeline computes, and there is none; give both or neither")
        return None
    kind, layer_ms = parse_compute("timed" if compute is None else compute)
    if inflight > 1:
        raise UsageError("--pipeline measures one request at a time; leave out --inflight")
    if kind == "layers":
        _require_layers(asked)
        return Pipelining(cuts, kind, {}, "")
    if layer_ms is not None:
        return Pipelining(cuts, kind, {tokens: round(layer_ms * 1e6) for tokens in asked.tokens}, "--compute")
    rows = ratio_rows(asked.shape, asked.dtypes[0], asked.tokens, asked.block_size, asked.assumptions)
    prefill = {row["tokens"]: row for row in rows}  # the last basis of each: full where there is one
    if not prefill:
        raise UsageError(
            f"the prefill of {asked.shape.name} is not known; give the time of a layer, --compute timed:MS"
        )
    return Pipelining(
        cuts,
        kind,
        {tokens: round(row["prefill_ms"] * 1e6 / layers) for tokens, row in prefill.items()},
        f"{ASSUMED_COMPUTE} ({rows[-1]['basis']})",
    )


def _pipelining_notices(asked: Asked, pipelining: Pipelining | None) -> list[str]:
    from kvxfer.pipelining import chunk_notices, hit_notices

    if pipelining is None:
        return []
    hits = hit_notices(pipelining.cuts, pipelining.compute) if asked.assumptions.prefix_hit_prefill else []
    return [*chunk_notices(pipelining.cuts, asked.tokens), *hits]


def _require_layers(asked: Asked) -> None:
    """Raises UsageError when the model's layers cannot be computed here, UnavailableError when there is no torch."""
    from kvxfer.measure.layers import NO_TORCH, WITHOUT
    from kvxfer.model.widths import shares

    computed = len(shares(asked.shape, asked.prefill.tp)[0].order)
    if computed != (moved := len(asked.spec(asked.dtypes[0]).kinds)):
        raise UsageError(f"{computed} layers are computed and the cache of {moved} is moved; {WITHOUT}")
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError(NO_TORCH)


def _backend_options(texts: list[str], backends: list[str]) -> dict[str, dict[str, int]]:
    """The options of each backend: NAME=N is every one's that moves data, BACKEND.NAME=N that one's alone."""
    from kvxfer.backend.probe import OPTION_WORDS

    options: dict[str, dict[str, int]] = {backend: {} for backend in backends}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        backend, dot, own_name = name.rpartition(".")
        if not own_name or not equals or (dot and not backend):
            raise UsageError(
                f"--backend-option '{text}': give NAME=NUMBER or BACKEND.NAME=NUMBER, such as tcp.connections=4"
            )
        if dot and backend not in options:
            raise UsageError(
                f"--backend-option '{text}': {backend} is not measured; --backend has {', '.join(options)}"
            )
        for receiver in [backend] if dot else [one for one in backends if one != "null"]:
            words = OPTION_WORDS.get((receiver, own_name), ())
            if not value.isdigit() and words:
                options[receiver][own_name] = words.index(parse_choice(value, f"--backend-option {name}=", words))
            else:
                options[receiver][own_name] = parse_int(value, f"--backend-option {name}=", low=0)
    return options


def _run(
    request: Request,
    with_prefill: bool,
    fit_seconds: float | None,
    peer: str | None,
    key: Path | None,
    server_key: Path | None,
    json: str | None,
    quiet: bool,
) -> int:
    from kvxfer.measure.run import Outcome
    from kvxfer.result.file import check_writable
    from kvxfer.result.progress import Progress

    if json is not None:
        check_writable(json)
    cli.end_in_order()
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(not quiet and sys.stderr.isatty()))
        if with_prefill:  # before there is another side, which would hear nothing meanwhile
            request = _with_prefill(request, progress.step)
        session, peer_host = stack.enter_context(_session(peer, key, server_key))
        document = _measured(session, peer_host, request, fit_seconds, outcome, progress.step)
    return _tell(document, outcome, json, quiet)


def _with_prefill(request: Request, say: Callable[[str], None]) -> Request:
    """The request with the prefill of its prompts, measured here."""
    from kvxfer.measure.prefill import measure_prefill

    lengths = list(dict.fromkeys(row.tokens for row in request.rows))
    return replace(request, prefill=measure_prefill(request.rows[0].shape, lengths, request.assumptions, say))


def _measured(
    session: Session, peer_host: str, request: Request, fit_seconds: float | None, outcome: Outcome, say: Any
) -> dict[str, Any]:
    from kvxfer.measure.host import host_info, usable_bytes
    from kvxfer.measure.hosts import Hosts
    from kvxfer.measure.run import measure, result, within_reach

    welcome = session.welcome
    hosts = Hosts(host_info(), welcome.host, usable_bytes(), welcome.usable_bytes, peer_host, welcome.max_pool_bytes)
    request = within_reach(request, hosts, welcome.backends)
    try:
        measure(session, request, hosts, outcome, say)
        if fit_seconds is not None and outcome.status < ExitStatus.PEER_LOST:
            from kvxfer.measure.fitting import fit_all  # here: it loads scipy, for which no other run waits

            fit_all(session, request, hosts, fit_seconds, outcome, say)
    except KeyboardInterrupt:
        if not outcome.rows:
            raise
        missing = len(outcome.rows) < len(request.rows)
        only = f"only {len(outcome.rows)} of {len(request.rows)} rows were measured"
        outcome.errors.append(only if missing else "the cost models were not finished")
        outcome.status = ExitStatus.INTERRUPTED
    return result(request, hosts, outcome)


def _tell(document: dict[str, Any], outcome: Outcome, json: str | None, quiet: bool) -> int:
    """Write and print what was measured, each even if the other fails; the errors last, where they are seen."""
    from kvxfer.result.file import write_result

    with contextlib.ExitStack() as afterwards:
        afterwards.callback(_print_errors, outcome)
        if not quiet and json != "-":
            afterwards.callback(_print_tables, document)
        if json is not None:
            write_result(json, document)
    return outcome.status


def _print_tables(document: dict[str, Any]) -> None:
    from kvxfer.result.printing import make_console
    from kvxfer.result.tables import render

    render(document, make_console())
    sys.stdout.flush()


def _print_errors(outcome: Outcome) -> None:
    cli.complain(*(f"kvxfer bench: warning: {plain(text)}" for text in outcome.warnings))
    cli.complain(*(f"kvxfer bench: error: {plain(str(error))}" for error in outcome.errors))


@contextlib.contextmanager
def _session(peer: str | None, key: Path | None, server_key: Path | None) -> Iterator[tuple[Session, str]]:
    """A session with the peer, or with a second process started here; and the peer's host as this one reaches it."""
    from kvxfer.measure.local import DATA_ADDRESS, local_server
    from kvxfer.measure.session import open_session

    with contextlib.ExitStack() as stack:
        if peer is None:
            if key is not None or server_key is not None:
                raise UsageError("--key and --server-key go with --peer: nothing leaves this host without it")
            from kvxfer.control.channel import Client

            client, host = Client(stack.enter_context(local_server()), None, None), DATA_ADDRESS
        else:
            client, host = _remote(peer, key, server_key)
        yield stack.enter_context(open_session(client)), host


def _remote(peer: str, key: Path | None, server_key: Path | None) -> tuple[Client, str]:
    from kvxfer.control.channel import Client, is_loopback, split_host_port
    from kvxfer.control.keys import read_public, read_secret

    host, port = split_host_port(peer, "--peer")
    if (key is None) != (server_key is None):
        raise UsageError("--key and --server-key go together: our secret key, and the public key of the peer")
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--peer {peer} is beyond this host, and that needs keys: give --key (ours, secret) and --server-key "
            "(the peer's, public); `kvxfer keys` makes them"
        )
    pair = None if key is None else read_secret(key)
    return Client(f"tcp://{host}:{port}", pair, None if server_key is None else read_public(server_key)), host


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer bench")


if __name__ == "__main__":
    sys.exit(main())
