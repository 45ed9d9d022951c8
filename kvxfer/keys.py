"""`kvxfer keys`: make the keys that bench and serve know each other by."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvxfer import cli


def command(
    name: Annotated[str, typer.Argument(help="of the host, such as prefill1")],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="where to write the two files")] = Path("."),
) -> None:
    """Make a key pair: NAME.key_secret stays on this host, NAME.key is given to the other side."""
    from kvxfer.control.keys import write_pair

    public, secret = write_pair(directory, name)
    print(f"secret  {secret}   keep it here: --key {secret}")
    print(f"public  {public}   give it to the other side: for serve's --allow directory, or bench's --server-key")


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer keys")


if __name__ == "__main__":
    sys.exit(main())
