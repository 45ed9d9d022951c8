"""kvxfer beside the tools that do part of its job, in one run: python bench/peers --help."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from cases import all_cases
from environment import Environment
from goals import Unanswered
from pair import OursFailedError
from report import record, show
from rich.console import Console
from run import Run

FAILED = 1
INTERRUPTED = 130
LEAST_ROUNDS = 7
QUICK_ROUNDS = 2
FOLDER = Path(__file__).resolve().parents[2] / ".venv-peers"


def main() -> int:
    cases = all_cases()
    asked = _arguments([case.NAME for case in cases])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    _say(f"installing what the others need into {FOLDER.name}")
    run = Run(asked.rounds, asked.quick, Environment(FOLDER, asked.also), _say)
    failed = False
    for case in cases:
        if asked.only and case.NAME not in asked.only:
            continue
        try:
            case.measure(run)
        except OursFailedError as error:  # what was measured before is worth showing
            failed = True
            run.goals.append(Unanswered(case.NAME, str(error)))
    show(run, Console(width=None if sys.stdout.isatty() else 150, highlight=False))
    if asked.json:
        asked.json.write_text(json.dumps(record(run), indent=1) + "\n")
    return FAILED if failed else 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"of each comparison ({LEAST_ROUNDS}; {QUICK_ROUNDS} when quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, measures nothing")
    parser.add_argument("--only", choices=names, action="append", metavar="CASE", help=", ".join(names))
    parser.add_argument(
        "--also",
        type=_variant,
        action="append",
        default=[],
        metavar="BACKEND:OPTION=NUMBER,…",
        help="measure a backend of kvxfer with these options too, beside its defaults",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    asked = parser.parse_args()
    if asked.rounds is None:
        asked.rounds = QUICK_ROUNDS if asked.quick else LEAST_ROUNDS
    if asked.rounds < 1:
        parser.error("--rounds takes at least 1")
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json {asked.json}: there is no such folder")
    return asked


def _variant(text: str) -> tuple[str, dict[str, int]]:
    """Raises ValueError, which argparse reports, on anything else than BACKEND:OPTION=NUMBER,…"""
    backend, options = text.split(":")
    return backend, {name: int(value) for name, value in (one.split("=") for one in options.split(","))}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
