"""What a URL answers, whole or not at all, and within a time that no server can draw out."""

from __future__ import annotations

import re
import threading
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import KvxferError, PeerLostError, UnavailableError, UsageError
from kvxfer.wording import quoted, quoted_path

FETCH_S = 10.0


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def fetch(url: str, most: int) -> bytes:
    """All that it answers, redirects followed, within FETCH_S of the call; at most `most` bytes.

    Raises UsageError for what is no URL, an answer other than 200 and one of more bytes; UnavailableError where nothing
    was to be had, or only the beginning; PeerLostError when it took longer.
    """
    _check(url)
    outcome: list[bytes | BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(_fetch(url, most))
        except BaseException as error:
            outcome.append(error)

    # A timeout of the socket is for each read by itself, and none is for the resolver: whoever trickles has both wait
    # without end. A thread can be left behind; it ends with the process.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(FETCH_S)
    if not outcome:
        raise _late(url)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        why = None if parts.hostname else "it names no host"
        _ = parts.port  # which raises ValueError
    except ValueError as error:
        why = str(error)
    else:
        if "@" in parts.netloc:  # not named, for its password
            raise UsageError(
                f"the URL of {quoted(parts.hostname)} has a user name in it, which is not sent; fetch it by other "
                "means (curl), and give the file"
            )
    if re.search(r"[^!-~]", url):
        why = "it has a character that a URL has as % and two hexadecimal digits"
    if why is not None:
        raise UsageError(f"{quoted_path(url)} is no URL: {why}; give one such as http://HOST:8000/metrics")


def _fetch(url: str, most: int) -> bytes:
    import http.client
    import urllib.error
    import urllib.request

    class OnlyHttp(urllib.request.HTTPRedirectHandler):
        """Its own handler follows ftp too."""

        def redirect_request(self, *request: Any) -> urllib.request.Request | None:
            to = request[-1]
            if not is_url(to):
                raise UsageError(f"{quoted_path(url)} answered a redirect to {quoted_path(to)}; give a URL of http(s)")
            return super().redirect_request(*request)

    try:
        with urllib.request.build_opener(OnlyHttp).open(url, timeout=FETCH_S) as answer:
            if answer.status != HTTPStatus.OK:
                raise _answered(url, answer.status, answer.reason)
            body: bytes = answer.read(most + 1)
            missing = answer.length  # of a Content-Length; a shorter body is no error to http.client
    except TimeoutError as error:
        raise _late(url) from error
    except urllib.error.HTTPError as error:
        raise _answered(url, error.code, error.reason) from error
    except http.client.IncompleteRead as error:
        raise _cut_off(url, "the connection ended within a chunk") from error
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:  # the last: of a port
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise _late(url) from error
        why = getattr(error, "reason", None) or error
        raise UnavailableError(
            f"{quoted_path(url)} cannot be fetched: {why}; is vLLM there, and this its port?"
        ) from error
    if len(body) > most:
        raise UsageError(
            f"{quoted_path(url)} has more than {most / (1 << 20):g} MiB; vLLM's metrics have far less; of a log "
            "give the last lines (tail) as a file"
        )
    if missing:
        raise _cut_off(url, f"{missing:,} bytes of its Content-Length are missing")
    return body


def _answered(url: str, code: int, reason: str) -> UsageError:
    return UsageError(f"{quoted_path(url)} answered {code} {quoted(reason)[1:-1]}; vLLM's is …/metrics")


def _late(url: str) -> KvxferError:
    return PeerLostError(f"{quoted_path(url)} has not answered within {FETCH_S:g} s; is vLLM there, and not stuck?")


def _cut_off(url: str, why: str) -> KvxferError:
    return UnavailableError(f"the answer of {quoted_path(url)} is cut off: {why}; fetch it again")
