"""How long `kvxfer plan` takes in the process: the ratio alone, and the decision for a trace of 5,000 requests.

Of all that it does the search for the best cut takes longest: every prompt in every cut, layer by layer.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from kvxfer import plan

QUIET = ["--model", "70b", "--quiet", "--json", os.devnull]


def test_the_ratio(benchmark) -> None:
    assert benchmark(plan.main, QUIET) == 0


def test_the_decision(benchmark, tmp_path: Path) -> None:
    pools = ["--prefill-gpus", "32", "--decode-gpus", "32", "--decode-step-ms", "30", "--itl-target-ms", "60"]
    assert benchmark(plan.main, [*QUIET, "--lengths", str(trace(tmp_path)), *pools]) == 0


def test_the_best_cut_of_many_layers_and_ranks(benchmark, tmp_path: Path) -> None:
    ranks = ["--model", "405b", "--tp-prefill", "8", "--tp-decode", "16"]
    assert benchmark(plan.main, [*QUIET, "--lengths", str(trace(tmp_path)), *ranks, "--pipeline", "best"]) == 0


def trace(directory: Path) -> Path:
    """Of 5,000 requests, about 3,000 tokens long."""
    draw = random.Random(1)
    path = directory / "trace.jsonl"
    with path.open("w") as file:
        for number in range(5000):
            tokens = min(128_000, int(draw.lognormvariate(8, 1)) + 1)
            file.write(json.dumps({"timestamp": number * 250, "input_length": tokens, "output_length": 300}) + "\n")
    return path
