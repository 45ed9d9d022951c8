"""`kvxfer plan --observed …`: what a log line, or vLLM's log or metrics, say of transfers that ran elsewhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from kvxfer import __version__
from kvxfer.cost.observed import explain
from kvxfer.cost.observed_ranges import RANGES
from kvxfer.cost.prometheus import Scraped, scrape
from kvxfer.cost.terms import Observation
from kvxfer.cost.vllm_log import is_log, read_log
from kvxfer.errors import UsageError
from kvxfer.fetching import fetch, is_url
from kvxfer.options import parse_float
from kvxfer.reading import MIB, open_to_read
from kvxfer.result.file import SCHEMA_VERSION, write_result
from kvxfer.wording import did_you_mean, quoted, quoted_path

EXAMPLE = "bytes=328204288,descriptors=40064,ms=173.8,post_ms=129.1"
FROM_VLLM = "vLLM's own line (KV Transfer metrics: …), or a file or URL of its log or metrics"
LARGEST_TEXT = 16 << 20
END_OF_LOG = 8 << 20
"""What is read of a larger file, if it is a log: its last line tells what is now."""


def show(texts: Sequence[str], link_gbit: Sequence[float], words: Sequence[str], json: str | None, quiet: bool) -> None:
    """Read the observations, explain them, write and print what follows. `words` are the command line."""
    document = document_of(texts, link_gbit, words)
    if json is not None:
        write_result(json, document)
    if not quiet and json != "-":
        from kvxfer.result.observed_table import render_observed  # here, so that --help does not wait for it
        from kvxfer.result.printing import make_console

        render_observed(document, make_console())


def document_of(texts: Sequence[str], link_gbit: Sequence[float], words: Sequence[str]) -> dict[str, Any]:
    """What --observed prints, as JSON."""
    observations, notices = read_all(texts)
    explanation = explain(observations, link_gbit)
    return {
        "schema_version": SCHEMA_VERSION,
        "kvxfer_version": __version__,
        "created_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(words),
        "observed": explanation.as_record(),
        "notices": [*notices, *explanation.notices],
    }


def read_all(texts: Sequence[str]) -> tuple[list[Observation], list[str]]:
    """The observation of each text, and notices: NAME=NUMBER,…, vLLM's line, or a file or URL of its log or metrics."""
    observations, notices = [], []
    for text in texts:
        if not is_log(text) and re.match(r"\s*[a-z_]+\s*=", text, re.IGNORECASE):
            observations.append(_parse(text))
        else:
            scraped = read_log(text, f"--observed {quoted(text)}") if is_log(text) else _from(text)
            observations.append(scraped.observation)
            notices += scraped.notices
    return observations, notices


def _from(place: str) -> Scraped:
    """What a file or URL tells: a log of vLLM's, or its metrics."""
    data, is_all = (fetch(place, LARGEST_TEXT), True) if is_url(place) else _read(place)
    source = f"--observed {quoted_path(place)}"
    log = data.decode("utf-8", errors="replace")  # of which a prompt may be anything
    if is_all:
        return read_log(log, source, is_whole=False) if is_log(log) else scrape(_metrics(data, place), source)
    found = read_log(log, f"{source} (its last {END_OF_LOG / MIB:g} MiB)", is_whole=False)
    end = f"of {quoted_path(place)} only the last {END_OF_LOG / MIB:g} MiB were read; its lines are counted from there"
    return replace(found, notices=[*found.notices, end])


def _parse(text: str) -> Observation:
    """bytes=…,descriptors=…,ms=…,post_ms=…,wire_ms=… in any order; at least ms or post_ms."""
    values: dict[str, float] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in RANGES or not equals:
            raise UsageError(
                f"--observed {quoted(text)}: {quoted(word)} is not known{did_you_mean(name, RANGES)}; give "
                f"{', '.join(RANGES)}, such as {EXAMPLE}, or {FROM_VLLM}"
            )
        if name in values:
            raise UsageError(
                f"--observed {quoted(text)}: {name} is there twice; give each observation its own --observed"
            )
        values[name] = parse_float(value, f"--observed {name}=", *RANGES[name])
    one = Observation(**values)  # type: ignore[arg-type]  # mypy takes every field for one that they may be
    one.check()
    return one


def _metrics(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{quoted_path(place)}, line {line}: it is not text in UTF-8; give vLLM's log or metrics"
        ) from error


def _read(path: str) -> tuple[bytes, bool]:
    """A file, and whether that is all of it: of a large one it is the end, from the beginning of a line on."""
    try:
        try:
            with open_to_read(path, LARGEST_TEXT) as file:
                return file.read(), True
        except OSError as error:
            if error.errno != errno.EFBIG or not os.path.isfile(path):
                raise
        with open(path, "rb") as log:
            log.seek(-END_OF_LOG, os.SEEK_END)
            log.readline()
            return log.read(LARGEST_TEXT), False
    except OSError as error:
        raise UsageError(
            f"--observed {quoted_path(path)} cannot be read: {error.strerror}; give {EXAMPLE}, or {FROM_VLLM}"
        ) from error
