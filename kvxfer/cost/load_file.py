"""Reading the requests of a service from a file: prompt lengths, or a trace as they are published.

One prompt length on each line; or JSON Lines with the names of Mooncake's traces (input_length, output_length,
timestamp in ms) or of Azure's (ContextTokens, GeneratedTokens, TIMESTAMP as a date); or Azure's CSV with its header.
Traces of other services have the same names and timestamps in seconds; where that may be, the unit has to be said.
"""

from __future__ import annotations

import json
import operator
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal

from kvxfer.cost.lines import read_lines, wrong_line
from kvxfer.cost.load import Load
from kvxfer.errors import UsageError
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

DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d):([0-5]\d(?:\.\d+)?)(Z|[+-]\d\d:\d\d)?", re.ASCII)

Record = Mapping[str, Any]
Lines = Iterator[tuple[int, str]]
Records = Iterator[tuple[int, Record]]


def read_load(path: str, unit: TraceUnit | None = None) -> Load:
    """The load in a file; requests are put in the order of their arrival.

    `unit` is that of timestamps that are numbers; without it whole numbers are ms, and those that may be seconds are
    refused. Raises UsageError that names the line for one that is no request, or whose output length or timestamp is
    of another kind than the others'.
    """
    lines = read_lines(path, "--lengths", REMEDY)
    first = next(lines)
    if first[1].startswith("{"):
        return _load(path, _json_records(path, chain([first], lines)), unit)
    if any(name in first[1] for name in PROMPT):
        return _load(path, _csv_records(path, first[1], lines), unit)
    prompts = array("i", (_length(path, number, line) for number, line in chain([first], lines)))
    return Load(prompts, f"{len(prompts):,} lengths of {path}")


def _load(path: str, records: Records, unit: TraceUnit | None) -> Load:
    prompts, outputs, arrivals_s = array("i"), array("i"), array("d")
    first: tuple[str | None, str | None] | None = None
    for number, record in records:
        prompt = _tokens(path, number, record, PROMPT, 1)
        output = _tokens(path, number, record, OUTPUT, 0)
        arrival_s, kind = _arrival_s(path, number, record, unit)
        if prompt is None:
            raise wrong_line(path, number, f"there is no {' nor '.join(PROMPT)}", REMEDY)
        kinds = (kind, None if output is None else "count")
        first = first or kinds
        if kinds != first:
            raise _mixed(path, number, kinds, first)
        prompts.append(prompt)
        if output is not None:
            outputs.append(output)
        if arrival_s is not None:
            arrivals_s.append(arrival_s)
    if not prompts:
        raise wrong_line(path, 1, "no request follows the header", REMEDY)
    return _in_order(prompts, f"{len(prompts):,} requests of {path}", outputs, arrivals_s)


def _in_order(prompts: array[int], source: str, outputs: array[int], arrivals_s: array[float]) -> Load:
    """Of their arrival, which is counted from the first on."""
    if any(map(operator.gt, arrivals_s, islice(arrivals_s, 1, None))):
        order = sorted(range(len(prompts)), key=arrivals_s.__getitem__)
        prompts, arrivals_s = array("i", map(prompts.__getitem__, order)), array("d", sorted(arrivals_s))
        outputs = array("i", map(outputs.__getitem__, order)) if outputs else outputs
    start = arrivals_s[0] if arrivals_s else 0.0
    return Load(prompts, source, outputs, array("d", (each - start for each in arrivals_s)))


def _mixed(path: str, number: int, kinds: Sequence[str | None], first: Sequence[str | None]) -> UsageError:
    """Of what this request and the first one have: timestamp, output length."""
    what, this, other = next(
        each for each in zip(("timestamp", "output length"), kinds, first, strict=True) if each[1] != each[2]
    )
    if this and other:
        return wrong_line(path, number, f"the {what} is a {this}, and the first request's a {other}", "give one kind")
    lacking = "the first request" if this else "this request"
    return wrong_line(path, number, f"{lacking} has no {what}, others have one", REMEDY)


def _json_records(path: str, lines: Lines) -> Records:
    decode = json.JSONDecoder().raw_decode  # loads() looks for white space around it each time
    for number, line in lines:
        try:
            record, end = decode(line)
        except (ValueError, RecursionError):
            record, end = None, 0
        if type(record) is not dict or end != len(line):
            raise wrong_line(path, number, f"{quoted(line)} is no JSON object", REMEDY)
        yield number, record


def _csv_records(path: str, header: str, lines: Lines) -> Records:
    names = [name.strip() for name in header.split(",")]
    for number, line in lines:
        words = line.split(",")
        if len(words) != len(names):
            raise wrong_line(path, number, f"{quoted(line)} has {len(words)} fields, the header {len(names)}", REMEDY)
        yield number, dict(zip(names, map(str.strip, words), strict=True))


def _length(path: str, number: int, line: str) -> int:
    count = _count(line)
    if 1 <= count <= LARGEST_TOKENS:
        return count
    raise wrong_line(path, number, f"{quoted(line)} is no prompt length", REMEDY)


def _count(text: str) -> int:
    """-1 for what is none: int() also takes 1_000 and other scripts' digits."""
    return int(text) if len(text) <= 9 and text.isascii() and text.isdigit() else -1


def _tokens(path: str, number: int, record: Record, names: tuple[str, ...], least: int) -> int | None:
    """The count under the first of `names` that is there; None when none is."""
    for name in names:
        if name in record:
            break
    else:
        return None
    value = record[name]
    count = value if type(value) is int else _count(value) if type(value) is str else -1
    if not least <= count <= LARGEST_TOKENS:
        raise wrong_line(path, number, f"{name} is {quoted(value)}, no count of at least {least}", REMEDY)
    return count


def _arrival_s(path: str, number: int, record: Record, unit: TraceUnit | None) -> tuple[float | None, str | None]:
    """A number is in `unit`, or ms as in Mooncake's traces; text is a date, as in Azure's. And which of both it is."""
    for name in ARRIVAL:
        if name in record:
            break
    else:
        return None, None
    value = record[name]
    if type(value) in (int, float) and 0 <= value < 1e15:
        if unit is None and (type(value) is float or IN_SECONDS in record or value in SINCE_1970):
            raise wrong_line(
                path, number, f"{name} is {quoted(value)}, which may be seconds or ms", "say --trace-unit s, or ms"
            )
        return value / PER_S[unit or "ms"], "number"
    found = DATE.fullmatch(value) if type(value) is str else None
    if found is not None:
        minute, seconds, zone = found.groups()
        try:
            return _minute_s(minute, zone) + float(seconds), "date"
        except (ValueError, OverflowError):
            pass
    raise wrong_line(path, number, f"{name} is {quoted(value)}, neither ms nor a date", REMEDY)


@lru_cache(maxsize=16)
def _minute_s(minute: str, zone: str | None) -> float:
    """Seconds since 1970 of `2023-11-16 18:15`, in UTC without a zone. Many requests come in one minute."""
    return datetime.fromisoformat(f"{minute}:00{'+00:00' if zone in (None, 'Z') else zone}").timestamp()
