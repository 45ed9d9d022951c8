"""What a session makes of what both sides say: while something else takes long, and when a side is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.errors import ExitStatus, PeerLostError, UsageError, WrongBytesError
from kvxfer.measure.host import host_info
from kvxfer.measure.session import Session


class Minded(Session):
    """Hears `heard`, one at a time, and nothing more; `minded` is set when it has looked so often."""

    def __init__(self, *heard: tuple[str, m.Message] | Exception, looks: int = 1) -> None:
        self.heard = list(heard)
        self.looks = looks
        self.minded = threading.Event()

    def _messages(self) -> Iterator[tuple[str, m.Message]]:
        self.looks -= 1
        if self.looks <= 0:
            self.minded.set()
        if self.heard:
            one = self.heard.pop(0)
            if isinstance(one, Exception):
                raise one
            yield one

    def work(self) -> str:
        assert self.minded.wait(60)
        return "done"


def test_both_sides_are_minded_until_the_work_is_done() -> None:
    session = Minded(("decode", m.Heartbeat()), looks=3)
    assert session.minding(session.work) == "done"


@pytest.mark.parametrize(
    ("heard", "wanted"),
    [
        (PeerLostError("gone"), PeerLostError),
        (("decode", m.Failed(0, ExitStatus.PEER_LOST, "ended")), PeerLostError),
        (("prefill", m.Failed(3, ExitStatus.USAGE, "broken")), UsageError),
    ],
)
def test_a_side_that_is_lost_meanwhile_ends_it(heard: Any, wanted: type[Exception]) -> None:
    session = Minded(heard)
    with pytest.raises(wanted):
        session.minding(session.work)


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise UsageError("too few points")

    with pytest.raises(UsageError, match="too few points"):
        Minded().minding(work)


@pytest.mark.parametrize(
    ("heard", "says"),
    [
        ([("decode", "hung up"), ("prefill", "cannot put")], r"^cannot put \(the decode side: hung up\)$"),
        ([("decode", "hung up"), ("prefill", "hung up")], "^hung up$"),
        ([("decode", "cannot get")], "^cannot get$"),
    ],
)
def test_when_each_has_lost_the_other_both_are_quoted(
    heard: list[tuple[str, str]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order whichever came first."""
    monkeypatch.setattr("kvxfer.measure.session.GRACE_S", 0.01)
    session = Minded(*((side, m.Failed(1, ExitStatus.PEER_LOST, why)) for side, why in heard))
    session._seq = 1
    with pytest.raises(PeerLostError, match=says):
        session._answers({"prefill", "decode"})


def test_a_side_that_fails_by_itself_is_the_reason() -> None:
    lost = m.Failed(1, ExitStatus.PEER_LOST, "hung up")
    session = Minded(("decode", lost), ("prefill", m.Failed(1, ExitStatus.WRONG_BYTES, "wrong bytes")))
    session._seq = 1
    with pytest.raises(WrongBytesError, match="wrong bytes"):
        session._answers({"prefill", "decode"})


class Gone:
    """A client whose connection is closed, with last messages that have not been taken."""

    name = "there:1"

    def __init__(self, *last: m.Message) -> None:
        self.last = list(last)
        self.socket, self._other = socket.socketpair()
        self._other.close()

    def first_answer(self, _: m.Message) -> m.Message:
        return m.Welcome(m.PROTOCOL, "1", host_info(), 0, [], "")

    def lost(self) -> bool:
        return True

    def receive(self, _: float) -> m.Message | None:
        return self.last.pop(0) if self.last else None

    def send(self, _: m.Message) -> None:
        pass


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ([], "^the connection to the decode side at there:1 was closed$"),
        ([m.Heartbeat()], "^the connection to the decode side at there:1 was closed$"),
        ([m.Heartbeat(), m.Failed(0, ExitStatus.PEER_LOST, "the server was stopped")], "^the server was stopped$"),
    ],
)
def test_the_last_word_of_a_connection_that_is_closed_is_the_reason(last: list[m.Message], says: str) -> None:
    session = Session(cast(Client, Gone(*last)))
    with pytest.raises(PeerLostError, match=says):
        session._answers({"decode"})
