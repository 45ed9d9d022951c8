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
