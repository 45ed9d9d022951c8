"""Strangers at the Unix socket over which the sides of a one-host backend meet: its token alone protects it.

Whoever is on the host finds its name in /proc/net/unix. A run of our own is held where its decode worker accepts.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from two_process.processes import Place, Server

from kvxfer import _native
from kvxfer.backend.probe import probe_all
from kvxfer.cache.spec import CacheSpec
from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.measure.pair import Pair
from kvxfer.measure.request import Effort, Row, tables
from kvxfer.measure.session import Session
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

from .strangers import TOKEN_BYTES, Crowd, descriptors, knock
from .test_ports import AT_A_TIME_S, LATE_S, PENDING, THOUSAND, serves_and_verifies
from .test_tokens import lane

BACKENDS = [found.name for found in probe_all() if found.available and _native.one_host(found.name)]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

Attack = Callable[[str], None]


def abstract_socket(pid: int) -> str:
    """The name of the abstract Unix socket that a process listens on."""
    held = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    (name,) = [row[7][1:] for row in rows if len(row) > 7 and row[7][0] == "@" and f"socket:[{row[6]}]" in held]
    return name


class Held(Session):
    """A session whose prefill worker connects only after an attack on the socket where the decode worker accepts."""

    def __init__(self, server: Server, attack: Attack) -> None:
        super().__init__(Client(f"tcp://{server.address}", None, None))
        self._server = server
        self._attack = attack
        self.token = b""

    def both(self, pair: int, prefill: m.WorkerCommand, decode: m.WorkerCommand, answer: type[Any]) -> tuple[Any, Any]:
        if isinstance(prefill, m.Open):
            self.token = prefill.token
        if not isinstance(prefill, m.Connect):
            return super().both(pair, prefill, decode, answer)
        name = abstract_socket(self._server.worker())
        assert prefill.endpoint == f"unix:@{name}"
        self._seq += 1
        self._send_decode(pair, decode)
        self._attacked(name)
        self._send_prefill(pair, prefill)
        answers = self._answers({"prefill", "decode"})
        return answers["prefill"], answers["decode"]

    def _attacked(self, name: str) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self._attack(name)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.keep_alive()
            thread.join(0.1)
        assert not failed, failed[0]


def attacked(place: Place, backend: str, attack: Attack, server: Server | None = None) -> bytes:
    """A run that has to succeed and to verify nevertheless; its token."""
    server = server or place.serve()
    row = Row(CacheSpec(load_model(place.model), resolve_dtype("bf16"), 16, 1, "nhd"), backend, "push", 64)
    session = Held(server, attack)
    try:
        pair = Pair(session, 0, row, tables(row, 1), Effort(), "127.0.0.1")
        pair.set_up()
        assert pair.verified_bytes == row.bytes
    finally:
        session.close()
    place.left_alone(server)
    serves_and_verifies(place, server)
    return session.token


def test_a_thousand_that_say_nothing(place: Place, backend: str) -> None:
    def attack(name: str) -> None:
        with descriptors(THOUSAND), Crowd(name) as crowd:
            crowd.join(THOUSAND)
            crowd.wait_until_dropped(LATE_S, left=PENDING)

    attacked(place, backend, attack)


def test_half_a_token(place: Place, backend: str) -> None:
    """The server's patience is with the whole of it."""

    def attack(name: str) -> None:
        with Crowd(name) as crowd:
            crowd.join(PENDING // 2, bytes(TOKEN_BYTES // 2))
            crowd.wait_until_dropped(LATE_S)

    attacked(place, backend, attack)


def test_noise(place: Place, backend: str) -> None:
    rng = random.Random(4)

    def attack(name: str) -> None:
        give_up_at = time.monotonic() + AT_A_TIME_S / 2
        while time.monotonic() < give_up_at:
            assert knock(name, rng.randbytes(rng.randrange(200)))

    attacked(place, backend, attack)


def test_a_wrong_token_and_that_of_an_ended_run(place: Place, backend: str) -> None:
    server = place.serve()
    ended = attacked(place, backend, lambda _: None, server)
    assert len(ended) == TOKEN_BYTES

    def attack(name: str) -> None:
        for token in (bytes(TOKEN_BYTES), ended):
            assert lane(name, token, lanes=1) == b""

    attacked(place, backend, attack, server)
