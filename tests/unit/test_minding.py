"""A session while something else takes long: both sides are minded, and a side that is lost ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.control import messages as m
from kvxfer.errors import ExitStatus, PeerLostError, UsageError
from kvxfer.measure.session import Session


class Minded(Session):
    """Hears these, one at a time."""

    def __init__(self, *heard: tuple[str, m.Message] | Exception) -> None:
        self.heard = list(heard)
        self.times = 0

    def _messages(self) -> Iterator[tuple[str, m.Message]]:
        self.times += 1
        if self.heard:
            one = self.heard.pop(0)
            if isinstance(one, Exception):
                raise one
            yield one


def test_both_sides_are_minded_until_the_work_is_done() -> None:
    session, enough = Minded(("decode", m.Heartbeat())), threading.Event()

    def work() -> str:
        assert enough.wait(60)
        return "done"

    def messages() -> Iterator[tuple[str, m.Message]]:
        if session.times >= 3:
            enough.set()
        return Minded._messages(session)

    session._messages = messages  # type: ignore[method-assign]
    assert session.minding(work) == "done"
    assert session.times >= 3


@pytest.mark.parametrize(
    ("heard", "wanted"),
    [
        (PeerLostError("gone"), PeerLostError),
        (("decode", m.Failed(0, ExitStatus.PEER_LOST, "ended")), PeerLostError),
        (("prefill", m.Failed(3, ExitStatus.USAGE, "broken")), UsageError),
    ],
)
def test_a_side_that_is_lost_meanwhile_ends_it(heard: Any, wanted: type[Exception]) -> None:
    session, heard_of = Minded(heard), threading.Event()

    def work() -> None:
        assert heard_of.wait(60)

    def messages() -> Iterator[tuple[str, m.Message]]:
        heard_of.set()
        return Minded._messages(session)

    session._messages = messages  # type: ignore[method-assign]
    with pytest.raises(wanted):
        session.minding(work)


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise UsageError("too few points")

    with pytest.raises(UsageError, match="too few points"):
        Minded().minding(work)
