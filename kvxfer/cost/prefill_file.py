"""Reading the prefill times that a user measured: CSV with a prompt length and a time on each line."""

from __future__ import annotations

import re
from itertools import chain, pairwise

from kvxfer.cost.lines import read_lines, wrong_line
from kvxfer.cost.prefill_source import PrefillTimes
from kvxfer.options import parse_number
from kvxfer.wording import quoted

LARGEST_TOKENS = 100_000_000

MS_PER = {"ms": 1.0, "milliseconds": 1.0, "s": 1e3, "seconds": 1e3}

REMEDY = "give lines of a prompt length and a time in ms, such as 8192,717.5, after a header or none"


def read_prefill_times(path: str, extrapolate: bool) -> PrefillTimes:
    """The times in a file: `8192,717.5` in ms, or in the unit that ends a header's second name (prefill_ms, time_s).

    Of several times of one length the median counts. Raises UsageError that names the line when there is none, a line
    is no length and time, or a longer prompt takes no more time.
    """
    lines = read_lines(path, "--prefill-csv", REMEDY)
    number, start = next(lines)
    unit = 1.0
    if start[:1].isdigit():
        lines = chain([(number, start)], lines)
    else:
        unit = _unit(path, number, start)
    times: dict[int, list[float]] = {}
    first_lines: dict[int, int] = {}
    for number, line in lines:
        tokens, ms = _length_and_time(path, number, line)
        times.setdefault(tokens, []).append(ms * unit)
        first_lines.setdefault(tokens, number)
    if not times:
        raise wrong_line(path, 1, "nothing follows the header", REMEDY)
    points = [(tokens, _median(several)) for tokens, several in sorted(times.items())]
    for (shorter, less), (longer, more) in pairwise(points):
        if more <= less:
            raise wrong_line(
                path,
                first_lines[longer],
                f"{longer:,} tokens take {more:g} ms, and {shorter:,} tokens {less:g} ms",
                "a longer prompt takes more; measure again, warm and with more repetitions",
            )
    return PrefillTimes(points, path, extrapolate)


def _unit(path: str, number: int, header: str) -> float:
    """ms per unit of the second column, from the last word of its name."""
    names = [name.strip().lower() for name in header.split(",")]
    unit = names[1].replace(" ", "_").rsplit("_", 1)[-1] if len(names) == 2 else ""
    if unit not in MS_PER:
        raise wrong_line(path, number, f"the header {quoted(header)} names no length and time in ms or s", REMEDY)
    return MS_PER[unit]


def _length_and_time(path: str, number: int, line: str) -> tuple[int, float]:
    length, _, duration = (word.strip() for word in line.partition(","))
    tokens = int(length) if re.fullmatch(r"[0-9]{1,9}", length) else 0
    time = parse_number(duration) or 0.0
    if not 1 <= tokens <= LARGEST_TOKENS or not 0 < time < 1e12:
        raise wrong_line(path, number, f"{quoted(line)} is no prompt length and time", REMEDY)
    return tokens, time


def _median(values: list[float]) -> float:
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
