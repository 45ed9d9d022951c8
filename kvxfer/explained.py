"""`kvxfer plan --observed …`: what a log line, or vLLM's log or metrics, say of transfers that ran elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer import __version__
from kvxfer.cost.observed import explain
from kvxfer.cost.prometheus import Scraped, scrape
from kvxfer.cost.terms import Observation
from kvxfer.cost.vllm_log import is_log, read_log
from kvxfer.errors import PeerLostError, UnavailableError, UsageError
from kvxfer.options import parse_float
from kvxfer.result.file import SCHEMA_VERSION, write_result
from kvxfer.wording import did_you_mean, quoted, quoted_path

if TYPE_CHECKING:
    from http.client import HTTPResponse

EXAMPLE = "bytes=328204288,descriptors=40064,ms=173.8,post_ms=129.1"
FROM_VLLM = "vLLM's own line (KV Transfer metrics: …), or a file or URL of its log or metrics"
LARGEST = {"ms": 1e9, "bytes": 1e18, "descriptors": 1e12, "post_ms": 1e9, "wire_ms": 1e9}
"""What an observation may say, and the most that it may say."""

LARGEST_TEXT = 16 << 20
FETCH_S = 10.0
CHUNK = 1 << 16


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
        if re.match(r"\s*[a-z_]+\s*=", text):
            observations.append(_parse(text))
        else:
            scraped = read_log(text, f"--observed {quoted(text)}") if is_log(text) else _from(text)
            observations.append(scraped.observation)
            notices += scraped.notices
    return observations, notices


def _from(place: str) -> Scraped:
    """What a file or URL tells: a log of vLLM's, or its metrics."""
    text = _fetch(place) if _is_url(place) else _read(place)
    return (read_log if is_log(text) else scrape)(text, f"--observed {quoted_path(place)}")


def _parse(text: str) -> Observation:
    """bytes=…,descriptors=…,ms=…,post_ms=…,wire_ms=… in any order; at least ms or post_ms."""
    values: dict[str, float] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in LARGEST or not equals:
            raise UsageError(
                f"--observed {quoted(text)}: {quoted(word)} is not known{did_you_mean(name, LARGEST)}; give "
                f"{', '.join(LARGEST)}, such as {EXAMPLE}, or {FROM_VLLM}"
            )
        if name in values:
            raise UsageError(
                f"--observed {quoted(text)}: {name} is there twice; give each observation its own --observed"
            )
        values[name] = parse_float(value, f"--observed {name}=", 0, LARGEST[name], above_low=True)
    one = Observation(**values)  # type: ignore[arg-type]  # mypy takes every field for one that they may be
    one.check()
    return one


def _is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return _text(file.read(LARGEST_TEXT + 1), path)
    except OSError as error:
        raise UsageError(
            f"--observed {quoted_path(path)} cannot be read: {error.strerror}; give {EXAMPLE}, or {FROM_VLLM}"
        ) from error


def _fetch(url: str) -> str:
    """What the URL answers, within FETCH_S from the first attempt to the last byte."""
    import http.client
    import urllib.error
    import urllib.request

    until = time.monotonic() + FETCH_S
    try:
        with urllib.request.urlopen(url, timeout=FETCH_S) as answer:
            return _text(_body(answer, until), url)
    except TimeoutError as error:
        raise _late(url) from error
    except urllib.error.HTTPError as error:
        raise UsageError(f"{quoted_path(url)} answered {error.code} {error.reason}; vLLM's is …/metrics") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise _late(url) from error
        why = getattr(error, "reason", None) or error
        raise UnavailableError(
            f"{quoted_path(url)} cannot be fetched: {why}; is vLLM there, and this its port?"
        ) from error


def _late(url: str) -> PeerLostError:
    return PeerLostError(f"{quoted_path(url)} has not answered within {FETCH_S:g} s; is vLLM there, and not stuck?")


def _body(answer: HTTPResponse, until: float) -> bytes:
    """All of it. Raises TimeoutError when it is not there in time, however steadily it trickles."""
    body = b""
    while len(body) <= LARGEST_TEXT:
        chunk = answer.read1(CHUNK)
        if not chunk:
            break
        body += chunk
        if time.monotonic() > until:
            raise TimeoutError
    return body


def _text(data: bytes, source: str) -> str:
    if len(data) > LARGEST_TEXT:
        raise UsageError(
            f"{quoted_path(source)} has more than {LARGEST_TEXT >> 20} MiB; give vLLM's metrics, or the end of its log"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{quoted_path(source)}, line {line}: it is not text in UTF-8; give vLLM's log or metrics"
        ) from error
