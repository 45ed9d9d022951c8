"""`python -m kvxfer.bench`: move a model's KV cache between two processes or hosts, and set it against prefill."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer import assumed, cli
from kvxfer.cost.assumptions import Assumptions
from kvxfer.errors import ExitStatus, UsageError
from kvxfer.model.dtypes import DTYPES, PACKED, resolve_dtype
from kvxfer.model.presets import load_model
from kvxfer.options import parse_choice, parse_float, parse_int, parse_int_list, split_list

if TYPE_CHECKING:
    from kvxfer.control.channel import Client
    from kvxfer.measure.request import Row
    from kvxfer.measure.run import Outcome, Request
    from kvxfer.measure.session import Session

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="preset (8b, 70b, qwen3-32b, …) or the path of a config.json")] = "8b",
    dtype: Annotated[
        str, typer.Option(help=f"of the cache: {', '.join([*DTYPES, *PACKED])}; fp8 is fp8_e4m3; several: A,B")
    ] = "bf16",
    backend: Annotated[str, typer.Option(help="auto, tcp or null; several with commas are measured in turn")] = "auto",
    tokens: Annotated[str, typer.Option(help="prompt lengths")] = "512,2048,8192",
    op: Annotated[str, typer.Option(help="push (prefill writes), pull (decode reads) or both")] = "push",
    with_mtp: Annotated[bool, typer.Option("--with-mtp", help="move the layers of multi-token prediction too")] = False,
    block_size: Annotated[str, typer.Option(help="tokens per block; whole blocks move")] = "16",
    layout: assumed.Layout = "nhd",
    tp_prefill: assumed.TpPrefill = None,
    tp_decode: assumed.TpDecode = None,
    pp_prefill: assumed.PpPrefill = None,
    pp_decode: assumed.PpDecode = None,
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
    prefix_hit_prefill: assumed.PrefixHitPrefill = "0",
    prefix_hit_decode: assumed.PrefixHitDecode = "0",
    gpus: assumed.Gpus = None,
    eff_tflops: assumed.EffTflops = "400",
    params: assumed.Params = None,
    params_active: assumed.ParamsActive = None,
    link: assumed.Link = "100,200,400",
    links: assumed.Links = "shared",
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
    parse_choice(device, "--device", ["cpu"])
    order, prefill, decode = assumed.read_ranks(layout, tp_prefill, tp_decode, pp_prefill, pp_decode)
    assumptions = assumed.read_assumptions(
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
    )
    wanted = {
        "shape": load_model(model).with_mtp() if with_mtp else load_model(model),
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
        "prefill": prefill,
        "decode": decode,
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
        rows=_rows(wanted, backends, assumptions),
        effort=Effort(**effort),
        assumptions=assumptions,
        words=context.obj,
        require_transport=require_transport or "",
    )
    return _run(request, peer, key, server_key, json, quiet)


def _rows(wanted: dict[str, Any], backends: list[str], assumptions: Assumptions) -> list[Row]:
    """Raises UsageError when one of them cannot be cut over the ranks, or has nothing to move."""
    from kvxfer.cache.spec import CacheSpec
    from kvxfer.measure.request import Row

    rows = [
        Row(
            spec=CacheSpec(wanted["shape"], dtype, wanted["block_size"], wanted["regions"], wanted["order"]),
            backend=backend,
            op=op,
            tokens=tokens,
            held_blocks=assumptions.held_blocks(tokens, wanted["block_size"]),
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
    for row in rows:
        row.check()
    return rows


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
