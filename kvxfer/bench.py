"""`python -m kvxfer.bench`: move a model's KV cache between two processes or hosts, and set it against prefill."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer import cli
from kvxfer.cache.layout import Ranks
from kvxfer.cost.assumptions import Assumptions
from kvxfer.errors import ExitStatus, UsageError
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model
from kvxfer.options import parse_choice, parse_count, parse_float, parse_int, parse_int_list, split_list
from kvxfer.topology.links import parse_links

if TYPE_CHECKING:
    from kvxfer.control.channel import Client
    from kvxfer.measure.request import Row
    from kvxfer.measure.run import Outcome, Request
    from kvxfer.measure.session import Session

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20
LARGEST_RANKS = 64


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="preset (8b, 70b, qwen3-32b, …) or the path of a config.json")] = "8b",
    dtype: Annotated[
        str, typer.Option(help="of the cache: bf16, fp16, fp8 (fp8_e4m3), fp8_e5m2; several: A,B")
    ] = "bf16",
    backend: Annotated[str, typer.Option(help="auto, tcp or null; several with commas are measured in turn")] = "auto",
    tokens: Annotated[str, typer.Option(help="prompt lengths")] = "512,2048,8192",
    op: Annotated[str, typer.Option(help="push (prefill writes), pull (decode reads) or both")] = "push",
    block_size: Annotated[str, typer.Option(help="tokens per block; whole blocks move")] = "16",
    layout: Annotated[
        str, typer.Option(help="of a block: nhd (token, head, cell) or hnd; …-together: all layers in one block")
    ] = "nhd",
    tp_prefill: Annotated[
        str, typer.Option(help="tensor-parallel ranks of prefill; pairs of ranks move at once")
    ] = "1",
    tp_decode: Annotated[str, typer.Option(help="tensor-parallel ranks of decode")] = "1",
    pp_prefill: Annotated[str, typer.Option(help="pipeline stages of prefill: layers split over ranks")] = "1",
    pp_decode: Annotated[str, typer.Option(help="pipeline stages of decode")] = "1",
    fragmentation: Annotated[
        str, typer.Option(help="0: a request is one run of blocks; 1: no two blocks are adjacent")
    ] = "1",
    seed: Annotated[str, typer.Option(help="of block tables and contents")] = "0",
    regions: Annotated[str, typer.Option(help="memory regions per layer: 1 (K and V together) or 2")] = "1",
    inflight: Annotated[str, typer.Option(help="requests at once")] = "1",
    device: Annotated[
        str, typer.Option(help="where the caches lie: cpu (GPU memory comes in a later version)")
    ] = "cpu",
    peer: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="a waiting `kvxfer serve` [none: here]")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="our secret key, for --peer (kvxfer keys)")] = None,
    server_key: Annotated[Path | None, typer.Option(metavar="FILE", help="the public key of the --peer")] = None,
    gpus: Annotated[str, typer.Option(help="assumed: GPUs that share a prefill")] = "4",
    eff_tflops: Annotated[str, typer.Option(help="assumed: TFLOP/s that each of them sustains")] = "400",
    params: Annotated[str | None, typer.Option(help="assumed: parameters of the seed row, as 70e9 [model's]")] = None,
    params_active: Annotated[
        str | None, typer.Option(help="assumed: active parameters of the full row, embedding included [model's]")
    ] = None,
    link: Annotated[str, typer.Option(help="assumed: line rates in Gb/s or names (100gbe, ndr)")] = "100,200,400",
    max_seconds: Annotated[str, typer.Option(help="most time that a row's steady state takes")] = "5",
    min_samples: Annotated[str, typer.Option(help="fewest samples before a row may end early")] = "20",
    setup_repeats: Annotated[str, typer.Option(help="fresh process pairs per row")] = "5",
    verify: Annotated[
        str, typer.Option(help="full: every byte of first and last request, sample: some blocks, off")
    ] = "full",
    require_transport: Annotated[
        str | None, typer.Option(metavar="NAME", help="fail when something else carried the bytes (tcp, tcp/eth0)")
    ] = None,
    backend_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="of the backend, such as connections=4; repeatable")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="write the result there (-: stdout, alone)")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables and no progress")] = False,
) -> int:
    """Measure what moving a model's KV cache from prefill to decode costs, cold and steady, beside its prefill."""
    order, _, together = parse_choice(layout, "--layout", ["nhd", "hnd", "nhd-together", "hnd-together"]).partition("-")
    parse_choice(device, "--device", ["cpu"])
    assumptions = Assumptions(
        gpus=parse_int(gpus, "--gpus", high=1_000_000),
        eff_tflops=parse_float(eff_tflops, "--eff-tflops", 0.001, 1e6),
        params=None if params is None else parse_count(params, "--params"),
        params_active=None if params_active is None else parse_count(params_active, "--params-active"),
        link_gbit=tuple(parse_links(link)),
    )
    wanted = {
        "shape": load_model(model),
        "dtypes": list(dict.fromkeys(resolve_dtype(word) for word in split_list(dtype, "--dtype"))),
        "tokens": parse_int_list(tokens, "--tokens", high=LARGEST_TOKENS),
        "ops": ["push", "pull"]
        if (chosen := parse_choice(op, "--op", ["push", "pull", "both"])) == "both"
        else [chosen],
        "block_size": parse_int(block_size, "--block-size", high=LARGEST_BLOCK),
        "fragmentation": parse_float(fragmentation, "--fragmentation", 0, 1),
        "seed": parse_int(seed, "--seed", low=0, high=(1 << 63) - 1),
        "regions": parse_int(regions, "--regions", high=2),
        "inflight": parse_int(inflight, "--inflight", high=256),
        "options": _backend_options(backend_option or []),
        "order": order,
        "prefill": Ranks(
            parse_int(tp_prefill, "--tp-prefill", high=LARGEST_RANKS),
            parse_int(pp_prefill, "--pp-prefill", high=LARGEST_RANKS),
            bool(together),
        ),
        "decode": Ranks(
            parse_int(tp_decode, "--tp-decode", high=LARGEST_RANKS),
            parse_int(pp_decode, "--pp-decode", high=LARGEST_RANKS),
            bool(together),
        ),
    }
    effort: dict[str, Any] = {
        "max_seconds": parse_float(max_seconds, "--max-seconds", 0, 86_400, above_low=True),
        "min_samples": parse_int(min_samples, "--min-samples", high=1_000_000),
        "setup_repeats": parse_int(setup_repeats, "--setup-repeats", high=1000),
        "verify": parse_choice(verify, "--verify", ["full", "sample", "off"]),
    }

    # What is heavy to import comes only now, so that --help and wrong usage answer at once.
    from kvxfer.backend.probe import choose_backends
    from kvxfer.measure.request import Effort
    from kvxfer.measure.run import Request

    backends = choose_backends(backend)
    request = Request(
        rows=_rows(wanted, backends),
        effort=Effort(**effort),
        assumptions=assumptions,
        words=context.obj,
        require_transport=require_transport or "",
    )
    return _run(request, peer, key, server_key, json, quiet)


def _rows(wanted: dict[str, Any], backends: list[str]) -> list[Row]:
    from kvxfer.cache.spec import CacheSpec
    from kvxfer.measure.request import Row

    return [
        Row(
            spec=CacheSpec(wanted["shape"], dtype, wanted["block_size"], wanted["regions"], wanted["order"]),
            backend=backend,
            op=op,
            tokens=tokens,
            fragmentation=wanted["fragmentation"],
            seed=wanted["seed"],
            inflight=wanted["inflight"],
            options=wanted["options"] if backend != "null" else {},
            prefill=wanted["prefill"],
            decode=wanted["decode"],
        )
        for dtype in wanted["dtypes"]
        for op in wanted["ops"]
        for tokens in wanted["tokens"]
        for backend in backends
    ]


def _backend_options(texts: list[str]) -> dict[str, int]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"--backend-option '{text}': give NAME=NUMBER, such as connections=4")
        options[name.strip()] = parse_int(value, f"--backend-option {name}=", low=0)
    return options


def _run(
    request: Request, peer: str | None, key: Path | None, server_key: Path | None, json: str | None, quiet: bool
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
        session, peer_host = stack.enter_context(_session(peer, key, server_key))
        document = _measured(session, peer_host, request, outcome, progress.step)
    return _tell(document, outcome, json, quiet)


def _measured(session: Session, peer_host: str, request: Request, outcome: Outcome, say: Any) -> dict[str, Any]:
    from kvxfer.measure.host import host_info, usable_bytes
    from kvxfer.measure.hosts import Hosts
    from kvxfer.measure.run import measure, result

    welcome = session.welcome
    hosts = Hosts(host_info(), welcome.host, usable_bytes(), welcome.usable_bytes, peer_host, welcome.max_pool_bytes)
    try:
        measure(session, request, hosts, outcome, say)
    except KeyboardInterrupt:
        if not outcome.rows:
            raise
        outcome.errors.append(f"only {len(outcome.rows)} of {len(request.rows)} rows were measured")
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
    from kvxfer.result.tables import make_console, render

    render(document, make_console())
    sys.stdout.flush()


def _print_errors(outcome: Outcome) -> None:
    for error in outcome.errors:
        print(f"kvxfer bench: error: {error}", file=sys.stderr)


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
