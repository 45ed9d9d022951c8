"""Reading the requests of a service from a file: prompt lengths, or a trace as they are published.

One prompt length on each line; or JSON Lines with the names of Mooncake's traces (input_length, output_length,
timestamp in ms) or of Azure's (ContextTokens, GeneratedTokens, TIMESTAMP as a date); or Azure's CSV with its header.
Traces of other services have the same names and timestamps in seconds; where that may be, the unit has to be said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from kvxfer.cost.lines import read_lines, wrong_line
from kvxfer.cost.load import Load
from kvxfer.wording import quoted

LARGEST_TOKENS = 100_000_000

PROMPT = ("input_length", "ContextTokens", "input_tokens")
OUTPUT = ("output_length", "GeneratedTokens", "output_tokens")
ARRIVAL = ("timestamp", "TIMESTAMP")

TraceUnit = Literal["ms", "s"]
PER_S: dict[TraceUnit, float] = {"ms": 1e3, "s": 1.0}

IN_SECONDS = "chat_id"
"""A field of traces that are in seconds (Qwen-Bailian's)."""
SINCE_1970 = range(10**9, 10**10)
"""Whole numbers that are seconds since 1970 rather than ms of a trace."""

REMEDY = (
    "give a prompt length on each line, or a trace with input_length, output_length and timestamp (ms), "
    "or ContextTokens, GeneratedTokens and TIMESTAMP"
)

DATE = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")


def read_load(path: str, unit: TraceUnit | None = None) -> Load:
    """The load in a file; requests are put in the order of their arrival.

    `unit` is that of timestamps that are numbers; without it whole numbers are ms, and those that may be seconds are
    refused. Raises UsageError that names the line for one that is no request, or that has an output length or a
    timestamp where others have none.
    """
    lines = read_lines(path, "--lengths", REMEDY)
    start = lines[0][1]
    if start.startswith("{"):
        records = _json_records(path, lines)
    elif any(name in start for name in PROMPT):
        records = _csv_records(path, lines)
    else:
        return Load([_length(path, number, line) for number, line in lines], f"{len(lines):,} lengths of {path}")
    return _load(path, records, unit)


def _load(path: str, records: Iterator[tuple[int, Mapping[str, Any]]], unit: TraceUnit | None) -> Load:
    rows: list[tuple[float | None, int, int | None]] = []
    for number, record in records:
        prompt = _tokens(path, number, record, PROMPT, least=1)
        if prompt is None:
            raise wrong_line(path, number, f"there is no {' nor '.join(PROMPT)}", REMEDY)
        row = (_arrival_s(path, number, record, unit), prompt, _tokens(path, number, record, OUTPUT, least=0))
        for what, column in (("timestamp", 0), ("output length", 2)):
            if rows and (row[column] is None) != (rows[0][column] is None):
                lacking = "this request" if row[column] is None else "the first request"
                raise wrong_line(path, number, f"{lacking} has no {what}, others have one", REMEDY)
        rows.append(row)
    if not rows:
        raise wrong_line(path, 1, "no request follows the header", REMEDY)
    rows.sort(key=lambda row: row[0] or 0.0)
    first = rows[0][0] or 0.0
    return Load(
        prompts=[row[1] for row in rows],
        source=f"{len(rows):,} requests of {path}",
        outputs=[row[2] for row in rows if row[2] is not None],
        arrivals_s=[row[0] - first for row in rows if row[0] is not None],
    )


def _json_records(path: str, lines: list[tuple[int, str]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise wrong_line(path, number, f"{quoted(line)} is no JSON object", REMEDY)
        yield number, record


def _csv_records(path: str, lines: list[tuple[int, str]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    names = [name.strip() for name in lines[0][1].split(",")]
    for number, line in lines[1:]:
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(names):
            raise wrong_line(path, number, f"{quoted(line)} has {len(words)} fields, the header {len(names)}", REMEDY)
        yield number, dict(zip(names, words, strict=True))


def _length(path: str, number: int, line: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", line) and 1 <= int(line) <= LARGEST_TOKENS:
        return int(line)
    raise wrong_line(path, number, f"{quoted(line)} is no prompt length", REMEDY)


def _tokens(path: str, number: int, record: Mapping[str, Any], names: tuple[str, ...], least: int) -> int | None:
    """The count under the first of `names` that is there; None when none is."""
    name = next((name for name in names if name in record), None)
    if name is None:
        return None
    value = record[name]
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)
    if type(value) is not int or not least <= value <= LARGEST_TOKENS:
        raise wrong_line(path, number, f"{name} is {quoted(value)}, no count of at least {least}", REMEDY)
    return value


def _arrival_s(path: str, number: int, record: Mapping[str, Any], unit: TraceUnit | None) -> float | None:
    """A number is in `unit`, or ms as in Mooncake's traces; text is a date, as in Azure's."""
    name = next((name for name in ARRIVAL if name in record), None)
    if name is None:
        return None
    value = record[name]
    if type(value) in (int, float) and 0 <= value < 1e15:
        if unit is None and (type(value) is float or IN_SECONDS in record or value in SINCE_1970):
            raise wrong_line(
                path, number, f"{name} is {quoted(value)}, which may be seconds or ms", "say --trace-unit s, or ms"
            )
        return float(value) / PER_S[unit or "ms"]
    try:
        if isinstance(value, str) and (found := DATE.fullmatch(value)):
            day, time, fraction, zone = found.groups()
            whole = datetime.fromisoformat(f"{day}T{time}{(zone or 'Z').replace('Z', '+00:00')}")
            return whole.timestamp() + float(f"0.{fraction or 0}")
    except (ValueError, OverflowError):
        pass
    raise wrong_line(path, number, f"{name} is {quoted(value)}, neither ms nor a date", REMEDY)
