"""How well the model of pipelining predicts what was measured: python bench/prediction.py RESULT.json…

Each RESULT is what `kvxfer bench --pipeline … --compute timed:MS --json RESULT.json` wrote. Of every cut the error is
the predicted exposed time less the measured one, in percent of the serial transfer; serial itself counts too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvxfer.result.file import read_result


def errors(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(cut, signed error as a share of the serial transfer) of every cut of a row."""
    serial = row["pipeline"]["serial"]["alone_p50_ns"]
    for cut in row["pipeline"]["cuts"]:
        yield cut["cut"], (cut["predicted_exposed_ns"] - cut["exposed_ns"]) / serial


def pipelined_rows(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The rows of these results that were pipelined behind timed compute."""
    rows = [row for path in paths for row in read_result(path)["results"] if row["status"] == "ok"]
    return [row for row in rows if row["pipeline"] and row["pipeline"]["compute"]["kind"] == "timed"]


def main(paths: Sequence[str]) -> int:
    rows = pipelined_rows(paths)
    if not rows:
        print("no row of these results was pipelined behind timed compute", file=sys.stderr)
        return 2
    every = []
    for row in rows:
        compute, found = row["pipeline"]["compute"], list(errors(row))
        every += [abs(error) for _, error in found]
        shown = "  ".join(f"{cut}: {100 * error:+.0f}" for cut, error in found)
        where = f"{row['backend']} {row['op']}, {row['tokens']:,} tokens"
        print(f"{where}, {compute['layer_ns'] / 1e6:g} ms a layer: {shown}")
    print(
        f"{len(every)} cuts of {len(rows)} rows: median error {100 * median(every):.1f} % of the serial transfer, "
        f"largest {100 * max(every):.1f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
