"""Strangers at every port and socket that the workers of a run listen on, over every backend that can be used here.

What these are is found in /proc: of the decode worker while it accepts, and while both sides wire up; of both workers
while data moves. The run has to succeed and to verify, and the next one too. (The control port: test_ports.py.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from two_process.processes import Place, Server
from two_process.relay import HELLO

from kvxfer.backend.probe import MEASURES_NOTHING, probe_all
from kvxfer.cache.spec import CacheSpec
from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.measure.endpoint import LOCAL
from kvxfer.measure.pair import Pair
from kvxfer.measure.request import Effort, Row, tables
from kvxfer.measure.session import Session
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

from .strangers import TOKEN_BYTES, Crowd, Found, Gate, descriptors, doors, knock, noise, throw, ucx_frames
from .test_ports import LATE_S, SLOW, STRINGS, THOUSAND, serves_and_verifies
from .test_tokens import lane

BACKENDS = [found.name for found in probe_all() if found.available and found.name not in MEASURES_NOTHING]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

PENDING = 64
"""Most connections that are kept waiting for their token, whatever listens there; the oldest makes room."""

PATIENCE_S = 2.0
"""How long a token is waited for (csrc/backend/lane.cpp)."""

CONNECT_NS = 200_000_000_000
"""How long the workers wait for each other: longer than any attack takes on a loaded machine."""

UCX_FRAMES = 300
"""A tenth of that ended every worker that heard them."""

REQUESTS = 8
"""So many at a time while data moves under attack."""

Attack = Callable[[Sequence[Found]], None]


def nothing(_: Sequence[Found]) -> None:
    """No attack."""


@dataclass(frozen=True)
class Attacks:
    """What happens at the doors of the decode worker while it `accepts` and while both sides are `wiring` up, where a
    backend has more to do for that than to accept; and at the doors of both workers while data is `moving`."""

    accepting: Attack = nothing
    wiring: Attack = nothing
    moving: Attack = nothing


class Held(Session):
    """A session that holds its workers up while strangers are at their doors."""

    def __init__(self, server: Server, attacks: Attacks, stack: contextlib.ExitStack) -> None:
        super().__init__(Client(f"tcp://{server.address}", None, None))
        self._server = server
        self._attacks = attacks
        self._stack = stack
        self.token = b""

    def both(self, pair: int, prefill: m.WorkerCommand, decode: m.WorkerCommand, answer: type[Any]) -> tuple[Any, Any]:
        if isinstance(prefill, m.Open):
            self.token = prefill.token
        if not isinstance(prefill, m.Connect):
            return super().both(pair, prefill, decode, answer)
        self._seq += 1
        self._send_decode(pair, m.Connect("", CONNECT_NS))
        worker = self._server.worker()
        with meanwhile(lambda: self._attacks.accepting(doors(worker))) as attack:
            while attack.is_alive():
                self.keep_alive()
                attack.join(0.1)
        if LOCAL.fullmatch(prefill.endpoint):
            return self._connect(pair, prefill.endpoint)
        gate = self._stack.enter_context(Gate(int(prefill.endpoint.rpartition(":")[2]), greets=HELLO.size))
        connected = threading.Event()

        def wire_up() -> None:
            while not gate.held.wait(0.02):
                if connected.is_set():
                    return
            self._attacks.wiring(doors(worker))
            gate.open()

        with meanwhile(wire_up):
            answers = self._connect(pair, gate.address)
            connected.set()
        gate.open()
        return answers

    def _connect(self, pair: int, endpoint: str) -> tuple[Any, Any]:
        self._send_prefill(pair, m.Connect(endpoint, CONNECT_NS))
        answers = self._answers({"prefill", "decode"})
        return answers["prefill"], answers["decode"]

    def move_under_attack(self, pair: Pair) -> None:
        def attack() -> None:
            for pid in (self._prefill[0].pid, self._server.worker()):
                self._attacks.moving(doors(pid))

        with meanwhile(attack) as under_way:
            while under_way.is_alive():
                pair.run(REQUESTS)
        pair.run(REQUESTS)
        pair.verify_last()


@contextlib.contextmanager
def meanwhile(do: Callable[[], None]) -> Iterator[threading.Thread]:
    """Done by another thread; what that fails with fails the test."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    assert not failed, failed[0]


def attacked(place: Place, backend: str, attacks: Attacks, server: Server | None = None) -> bytes:
    """A run that has to succeed and to verify nevertheless; its token."""
    server = server or place.serve()
    row = Row(CacheSpec(load_model(place.model), resolve_dtype("bf16"), 16, 1, "nhd"), backend, "push", 64)
    with contextlib.ExitStack() as stack:
        session = Held(server, attacks, stack)
        stack.callback(session.close)
        pair = Pair(session, 0, row, tables(row, 1), Effort(), "127.0.0.1")
        pair.set_up()
        assert pair.verified_bytes == row.bytes
        session.move_under_attack(pair)
    place.left_alone(server)
    serves_and_verifies(place, server)
    return session.token


def test_a_wrong_token_half_a_token_and_a_thousand_that_say_nothing(place: Place, backend: str) -> None:
    """The token of an ended run is a wrong one. The worker's patience is with the whole of a token."""
    server = place.serve()
    ended = attacked(place, backend, Attacks(), server)
    assert len(ended) == TOKEN_BYTES

    def attack(found: Sequence[Found]) -> None:
        assert found
        for door in found:
            for token in (bytes(TOKEN_BYTES), ended):
                assert lane(door, token) == b""
            with Crowd(door) as crowd:
                crowd.join(SLOW, bytes(TOKEN_BYTES // 2))
                crowd.wait_until_dropped(PATIENCE_S + LATE_S)
            with descriptors(THOUSAND), Crowd(door) as crowd:
                crowd.join(THOUSAND)
                crowd.wait_until_dropped(LATE_S, left=PENDING)

    attacked(place, backend, Attacks(accepting=attack), server)


@pytest.mark.slow
def test_ten_thousand_random_strings_and_more_at_each_door(place: Place, backend: str) -> None:
    """A byte per second before the token has come. Afterwards nobody is to be let in, or UCX listens: nothing says when
    a stranger is dropped, and a thousand stay while others come and go. Once data moves, even those who speak UCX's
    language are not heard."""

    def accepting(found: Sequence[Found]) -> None:
        for door in found:
            for says in noise(STRINGS):
                assert knock(door, says)
            with Crowd(door) as crowd:
                crowd.join(SLOW)
                crowd.say_slowly(bytes(100), PATIENCE_S + LATE_S)

    def later(found: Sequence[Found]) -> None:
        for door in found:
            with descriptors(THOUSAND), contextlib.ExitStack() as staying:
                for _ in range(THOUSAND):
                    staying.enter_context(throw(door, bytes(5)))
                for says in noise(STRINGS):
                    throw(door, says).close()

    def moving(found: Sequence[Found]) -> None:
        later(found)
        for door in found:
            for says in ucx_frames(UCX_FRAMES):
                with throw(door, says):
                    time.sleep(0.002)  # a connection that was made is gone before UCX looks at it otherwise

    attacked(place, backend, Attacks(accepting, later, moving))
