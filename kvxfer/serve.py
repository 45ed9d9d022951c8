"""`kvxfer serve`: wait on another host for a bench to measure against."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer import cli
from kvxfer.errors import PeerLostError, UnavailableError, UsageError
from kvxfer.options import parse_float, parse_int

if TYPE_CHECKING:
    from kvxfer.measure.server import Settings

DEFAULT_PORT = 7420
LARGEST_DATA_PORT = 65520  # those that follow it are used too
GIB = 1 << 30
MOST_DESCRIPTORS = 1 << 16


def command(
    bind: Annotated[str, typer.Option(help="address to listen on; beyond loopback only with keys")] = "127.0.0.1",
    port: Annotated[str, typer.Option(help="control port")] = str(DEFAULT_PORT),
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="this server's secret key (kvxfer keys)")] = None,
    allow: Annotated[Path | None, typer.Option(metavar="DIR", help="public keys (*.key) of allowed clients")] = None,
    data_port: Annotated[
        str,
        typer.Option(help="port of the data connections; 0: any free one; backends that are compared use the next too"),
    ] = "0",
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="where clients reach the data port, when something stands between"),
    ] = None,
    max_gib: Annotated[str | None, typer.Option(help="largest pool that a client may ask for, in GiB")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="do not tell of runs")] = False,
) -> None:
    """Wait for `kvxfer bench --peer` of another host: one run at a time, until Ctrl-C."""
    number = parse_int(port, "--port", high=65535)
    data = parse_int(data_port, "--data-port", low=0, high=LARGEST_DATA_PORT)
    most = None if max_gib is None else int(parse_float(max_gib, "--max-gib", 0, 1 << 20, above_low=True) * GIB)

    from kvxfer.control.channel import split_host_port
    from kvxfer.measure.server import Settings

    if advertise is not None:
        split_host_port(advertise, "--advertise")
    address = _address(bind, keyless=key is None or allow is None)
    if (key is None) != (allow is None):
        raise UsageError("--key and --allow go together: our secret key, and the public keys of the clients")
    if ":" in address and not address.startswith("["):
        address = f"[{address}]"
    settings = Settings(data_address=address.strip("[]"), data_port=data, advertise=advertise or "", max_bytes=most)
    _serve(f"tcp://{address}:{number}", settings, key, allow, quiet)


def _address(bind: str, keyless: bool) -> str:
    """The number of --bind: ZeroMQ would wait for a name server however long that takes."""
    from kvxfer.control.channel import is_loopback, numeric

    beyond = UsageError(
        f"--bind {bind} lets other hosts in, and that needs keys: give --key (ours, secret) and --allow (a "
        "directory with the clients' public keys); `kvxfer keys` makes them"
    )
    if keyless and not is_loopback(bind):
        raise beyond
    try:
        address = numeric(bind)
    except PeerLostError as error:  # to a client, that is
        raise UnavailableError(f"--bind: {error}") from error
    if keyless and not is_loopback(address):  # whatever localhost means here
        raise beyond
    return address


def _serve(endpoint: str, settings: Settings, key: Path | None, allow: Path | None, quiet: bool) -> None:
    from kvxfer.control.channel import server_socket
    from kvxfer.control.keys import read_allowed, read_secret
    from kvxfer.measure.server import Server

    pair = None if key is None else read_secret(key)
    allowed = frozenset() if allow is None else read_allowed(allow)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # a log that nobody reads any more is no reason to end
            if not quiet:
                print(f"kvxfer serve: {text}", file=sys.stderr, flush=True)

    cli.end_in_order()
    _allow_descriptors()
    with server_socket(endpoint, pair, allowed) as socket:
        clients = "anyone on this host" if pair is None else f"{len(allowed)} known client(s)"
        server = Server(socket, settings, say)
        say(f"waiting on {endpoint.removeprefix('tcp://')} for {clients}; Ctrl-C ends it")
        server.run()


def _allow_descriptors() -> None:
    """As many as we may have: strangers hold one each until their handshake times out."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer serve")


if __name__ == "__main__":
    sys.exit(main())
