"""How well a cost model predicts requests that it was not fitted on, on this machine: `make cost-model`.

Of each backend and op one run of `kvxfer bench --fit`: the grid's own held-out requests, and prompt lengths that are
measured as bench measures any row; of both also the first request of a pair. Writes each result to DIRECTORY, and
leaves with 6 where of a backend and op the median of its later requests is more than 10 % off.

    python bench/cost_model.py [--backends tcp,shm] [--ops push,pull] [--directory DIRECTORY] [-- options of bench]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

from kvxfer.cost.fitted import cold_model
from kvxfer.cost.model import from_record
from kvxfer.result.cold import cold_pair
from kvxfer.result.file import read_result

GOAL_PERCENT = 10.0
MISSED = 6

MODEL = "8b"
TOKENS = "100,700,3000,4096"
"""The last is what the grid goes up to; the others lie between its lengths."""

OPTIONS = ["--fit", "--fit-seconds", "140", "--setup-repeats", "5", "--max-seconds", "1", "--quiet"]


def errors(path: Path) -> dict[str, list[float]]:
    """In percent, of the grid's held-out requests and of the rows in a result, later requests and first ones."""
    result = read_result(path)
    (fitted,) = result["cost_model"]
    model = from_record(fitted)
    held_out = [(one["predicted_ns"], one["p50_ns"]) for one in fitted["points"] if one["role"] == "held_out"]
    rows = result["results"]
    return {
        "held out of the grid": [off(*pair) for pair in held_out],
        f"rows of {TOKENS} tokens": [
            off(model.predict_ns(row["descriptors"], row["bytes"]), row["p50_ns"]) for row in rows
        ],
    }


def cold_errors(path: Path) -> dict[str, list[float]]:
    """The same of the first request of a pair."""
    result = read_result(path)
    (fitted,) = result["cost_model"]
    model = cold_model(fitted)
    requests = {
        "held out of the grid": [point for point in fitted["points"] if point["role"] == "held_out"],
        f"rows of {TOKENS} tokens": result["results"],
    }
    return {
        name: [
            off(model.predict_ns(each["descriptors"], each["bytes"]), cold_pair(each["setup"])["p50"]) for each in found
        ]
        for name, found in requests.items()
    }


def off(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="tcp,shm")
    parser.add_argument("--ops", default="push,pull")
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("options", nargs="*", help="of bench")
    asked = parser.parse_args()
    missed = False
    for backend, op in product(asked.backends.split(","), asked.ops.split(",")):
        path = asked.directory / f"cost-model-{backend}-{op}.json"
        words = ["--model", MODEL, "--tokens", TOKENS, "--backend", backend, "--op", op, *OPTIONS]
        subprocess.run(
            [sys.executable, "-m", "kvxfer.bench", *words, "--json", os.fspath(path), *asked.options], check=True
        )
        missed |= any(told(f"{backend} {op}", errors(path)))
        told(f"{backend} {op}, first requests", cold_errors(path))
    return MISSED if missed else 0


def told(of: str, errors: dict[str, list[float]]) -> list[bool]:
    """Prints the errors of each kind of request, and returns of each whether its median is over the goal."""
    for name, found in errors.items():
        each = ", ".join(f"{error:+.1f}" for error in found)
        print(f"{of}, {name}: off by {middle(found):.1f} % at the median ({each})", flush=True)
    return [middle(found) > GOAL_PERCENT for found in errors.values()]


def middle(found: list[float]) -> float:
    return statistics.median(map(abs, found))


if __name__ == "__main__":
    sys.exit(main())
