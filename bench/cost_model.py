"""How well a cost model predicts requests that it was not fitted on, on this machine: `make cost-model`.

Of each backend one run of `kvxfer bench --fit`: the grid's own held-out requests, and prompt lengths that are measured
as bench measures any row. Writes each result to DIRECTORY, and leaves with 6 where a median is more than 10 % off.

    python bench/cost_model.py [--backends tcp,shm] [--directory DIRECTORY] [-- options of bench]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from kvxfer.cost.model import from_record
from kvxfer.result.file import read_result

GOAL_PERCENT = 10.0
MISSED = 6

MODEL = "8b"
TOKENS = "100,700,3000,4096"
"""The last is what the grid goes up to; the others lie between its lengths."""

OPTIONS = ["--fit", "--fit-seconds", "140", "--setup-repeats", "1", "--max-seconds", "1", "--quiet"]


def errors(path: Path) -> dict[str, list[float]]:
    """In percent, of the grid's held-out requests and of the rows in a result."""
    result = read_result(path)
    (fitted,) = result["cost_model"]
    model = from_record(fitted)
    held_out = [(one["predicted_ns"], one["p50_ns"]) for one in fitted["points"] if one["role"] == "held_out"]
    rows = [(model.predict_ns(row["descriptors"], row["bytes"]), row["p50_ns"]) for row in result["results"]]
    return {
        name: [100 * (predicted / measured - 1) for predicted, measured in pairs]
        for name, pairs in (("held out of the grid", held_out), (f"rows of {TOKENS} tokens", rows))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="tcp,shm")
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("options", nargs="*", help="of bench")
    asked = parser.parse_args()
    missed = False
    for backend in asked.backends.split(","):
        path = asked.directory / f"cost-model-{backend}.json"
        words = ["--model", MODEL, "--tokens", TOKENS, "--backend", backend, *OPTIONS, "--json", os.fspath(path)]
        subprocess.run([sys.executable, "-m", "kvxfer.bench", *words, *asked.options], check=True)
        for name, found in errors(path).items():
            median = statistics.median(map(abs, found))
            missed |= median > GOAL_PERCENT
            each = ", ".join(f"{error:+.1f}" for error in found)
            print(f"{backend}, {name}: off by {median:.1f} % at the median ({each}); at most {GOAL_PERCENT:g} wanted")
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
