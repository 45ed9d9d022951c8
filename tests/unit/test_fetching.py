"""Fetching a URL: all that it answers, within the deadline, whatever the server does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer import fetching
from kvxfer.errors import PeerLostError, UnavailableError, UsageError
from kvxfer.fetching import fetch

HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = b"x_sum 11.738\n"
STEP_S = 0.05


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server whose connections are answered so, whatever they ask; its URL. The event says that nobody waits."""
    over = threading.Event()

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            answer(connection, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def sends(*parts: bytes) -> Callable[[socket.socket, threading.Event], None]:
    return lambda connection, _: connection.sendall(b"".join(parts))


def trickles(start: bytes, again: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """The start at once, the rest again and again until nobody waits."""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.wait(STEP_S):
            connection.sendall(again)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        sends(HEAD, b"Content-Length: 13\r\n\r\n", BODY),
        sends(HEAD, b"\r\n", BODY),
        sends(HEAD, b"Transfer-Encoding: chunked\r\n\r\n6\r\nx_sum \r\n7\r\n11.738\n\r\n0\r\n\r\n"),
        sends(b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, b"\r\n", BODY),
    ],
    ids=["by length", "to the end", "in chunks", "continued"],
)
def test_the_whole_answer(answer: Callable[[socket.socket, threading.Event], None]) -> None:
    with serving(answer) as url:
        assert fetch(url, 100) == BODY


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (sends(HEAD, b"Content-Length: 15\r\n\r\n", BODY), "2 bytes of its Content-Length are missing"),
        (sends(HEAD, b"Content-Length: 15\r\n\r\n"), "15 bytes of its Content-Length are missing"),
        (sends(HEAD, b"Transfer-Encoding: chunked\r\n\r\n16\r\n", BODY), "ended within a chunk"),
        (sends(HEAD, b"Transfer-Encoding: chunked\r\n\r\nd\r\n", BODY, b"\r\n"), "ended within a chunk"),
    ],
    ids=["by length", "nothing of it", "within a chunk", "between chunks"],
)
def test_an_answer_that_is_cut_off_is_refused(
    answer: Callable[[socket.socket, threading.Event], None], why: str
) -> None:
    with serving(answer) as url, pytest.raises(UnavailableError, match=f"is cut off: .*{why}"):
        fetch(url, 100)


@pytest.mark.parametrize(
    "answer",
    [
        trickles(b"", b""),
        trickles(b"H", b""),
        trickles(b"", b"H"),
        trickles(HEAD + b"X-Long: ", b"x"),
        trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        trickles(HEAD + b"\r\n", b"#\n"),
        trickles(HEAD + b"Content-Length: 1000000\r\n\r\n", b"#\n"),
        trickles(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
        trickles(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: 1\r\n"),
    ],
    ids=[
        "silence",
        "silence after a byte",
        "a status line",
        "a header",
        "continue",
        "a body",
        "a body by length",
        "a chunk's extension",
        "trailers",
    ],
)
def test_one_deadline_over_all_of_it(
    answer: Callable[[socket.socket, threading.Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte by itself comes in time."""
    monkeypatch.setattr(fetching, "FETCH_S", 0.4)
    with serving(answer) as url:
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=r"has not answered within 0\.4 s"):
            fetch(url, 1 << 20)
        assert time.monotonic() - start < 2


def test_redirects_are_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.4)
    place = ""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        over.wait(0.15)
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())

    with serving(answer) as url:
        place = url
        with pytest.raises(PeerLostError, match="has not answered within"):
            fetch(url, 100)


def test_more_than_is_allowed_is_refused() -> None:
    with serving(sends(HEAD, b"\r\n", b"#" * (1 << 20), b"\n")) as url:
        with pytest.raises(UsageError, match="more than 1 MiB"):
            fetch(url, 1 << 20)
        assert len(fetch(url, (1 << 20) + 1)) == (1 << 20) + 1


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:99999999999999999999/",
        "http://127.0.0.1:x/",
        "http:///metrics",
        "http://[::1/metrics",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/ä",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"is no URL: .*; give one such as http://HOST:8000/metrics"):
        fetch(url, 100)


def test_a_redirect_to_no_url_is_one_error() -> None:
    answer = sends(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:99999999999999999999/\r\n\r\n")
    with serving(answer) as url, pytest.raises(UnavailableError, match="cannot be fetched"):
        fetch(url, 100)


def test_what_is_no_http_is_one_error() -> None:
    with serving(sends(b"SSH-2.0-x\r\n")) as url, pytest.raises(UnavailableError, match="cannot be fetched"):
        fetch(url, 100)


@pytest.mark.parametrize("place", ["ftp://127.0.0.1/metrics", "file:///etc/hostname"])
def test_a_redirect_to_what_is_no_http_is_refused(place: str) -> None:
    answer = sends(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())
    with serving(answer) as url, pytest.raises(UsageError, match="answered"):
        fetch(url, 100)


@pytest.mark.parametrize("status", [b"204 No Content", b"206 Partial Content", b"404 Not Found"])
def test_an_answer_that_is_not_the_text_is_refused(status: bytes) -> None:
    answer = sends(b"HTTP/1.1 ", status, b"\r\nContent-Length: 0\r\n\r\n")
    with serving(answer) as url, pytest.raises(UsageError, match=f"answered {status.decode()}; vLLM's is"):
        fetch(url, 100)


def test_what_a_server_says_is_not_told_without_end() -> None:
    answer = sends(b"HTTP/1.1 404 ", b"x" * 60_000, b"\r\n\r\n")
    with serving(answer) as url, pytest.raises(UsageError, match="answered 404 xxx") as caught:
        fetch(url, 100)
    assert len(str(caught.value)) < 200


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="the URL of 'host' has a user name") as caught:
        fetch("http://user:secret@host/metrics", 100)
    assert "secret" not in str(caught.value)
