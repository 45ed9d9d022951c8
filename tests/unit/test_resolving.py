"""The name of a server becomes a number within the time that connecting may take, at both ends."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer import serve
from kvxfer.control import channel
from kvxfer.control.channel import Client, numeric
from kvxfer.errors import PeerLostError

V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::7", 0, 0, 0))


@pytest.mark.parametrize("number", ["127.0.0.1", "[::1]", "10.1.2.3"])
def test_a_number_asks_nobody(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.delattr(socket, "getaddrinfo")
    assert numeric(number) == number


@pytest.mark.parametrize(("found", "number"), [([V6, V4], "192.0.2.7"), ([V6], "[2001:db8::7]"), ([V4], "192.0.2.7")])
def test_a_name(monkeypatch: pytest.MonkeyPatch, found: list[Any], number: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert numeric("somehost") == number


def test_localhost() -> None:
    assert numeric("localhost") in ("127.0.0.1", "[::1]")


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "label" * 20])
def test_no_such_name(host: str) -> None:
    with pytest.raises(PeerLostError, match=f"cannot resolve '{re.escape(host)}': "):
        Client(f"tcp://{host}:7420", None, None)


def test_a_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silence.wait(60) and [V4])
    monkeypatch.setattr(channel, "CONNECT_S", 0.1)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="cannot resolve 'somehost': no name server answers in time"):
        Client("tcp://somehost:7420", None, None)
    assert time.monotonic() - began < 30
    silence.set()


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """Options with which a server may let other hosts in; it does not get so far as to read them."""
    return ["--key", str(tmp_path / "ours"), "--allow", str(tmp_path)]


def test_a_server_does_not_wait_for_a_silent_name_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    silence = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silence.wait(60) and [V4])
    monkeypatch.setattr(channel, "CONNECT_S", 0.1)
    began = time.monotonic()
    assert serve.main(["--bind", "somehost", *keys]) == 3
    assert time.monotonic() - began < 30
    assert "--bind: cannot resolve 'somehost': no name server answers in time; give a number" in capsys.readouterr().err
    silence.set()


def test_a_server_without_keys_stays_on_loopback_whatever_that_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V4])
    assert serve.main(["--bind", "localhost"]) == 2
    assert "--bind localhost lets other hosts in" in capsys.readouterr().err
