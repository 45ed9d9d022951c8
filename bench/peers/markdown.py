"""python bench/peers/markdown.py FILE: what `make peers` wrote, as the two tables of the project's README."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def tables(record: dict[str, Any]) -> str:
    """GB/s of everyone in every comparison, and the ratios."""
    return "\n\n".join(("\n".join(_speeds(record)), "\n".join(_ratios(record))))


def _speeds(record: dict[str, Any]) -> list[str]:
    """A row per contender: median GB/s ± half of the interquartile range, CPU s/GiB of both sides in brackets."""
    comparisons = record["comparisons"]
    names = sorted({row["contender"] for one in comparisons for row in one["rows"]}, key=_ours_first)
    lines = _head(["GB/s (CPU s/GiB)", *(one["title"] for one in comparisons)])
    for name in names:
        cells = [next((_speed(row) for row in one["rows"] if row["contender"] == name), "–") for one in comparisons]
        lines.append(_line([name, *cells]))
    return lines


def _ours_first(name: str) -> tuple[bool, str]:
    return not name.startswith("kvxfer"), name


def _speed(row: dict[str, Any]) -> str:
    spread = row["iqr_ns"] / row["median_ns"] / 2
    return f"{row['gbyte_s']:.2f} ± {spread:.0%} ({sum(row['cpu_s_per_gib'].values()):.2f})"


def _ratios(record: dict[str, Any]) -> list[str]:
    lines = _head(["ratio of the same rounds", "goal", "median", "range", "of"])
    for goal in record["goals"]:
        bound = f"{'≥' if goal['at_least'] else '≤'} {goal['bound']:g} {goal['unit']}".strip()
        span = "–".join(f"{one:.3g}" for one in goal["range"])
        lines.append(_line([goal["what"], bound, f"{goal['reached']:.3g} {goal['unit']}".strip(), span, goal["note"]]))
    lines += [_line([one["what"], "", "–", "", one["why"]]) for one in record["unanswered"]]
    return lines


def _head(words: list[str]) -> list[str]:
    return [_line(words), "|" + "---|" * len(words)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
