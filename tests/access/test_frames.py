"""Malformed, oversized and forged frames in every state of a server; and whoever may do so asking for too much."""

from __future__ import annotations

import itertools
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from two_process.processes import Place, Running, Server

from kvxfer import __version__
from kvxfer.cache.layout import Slice
from kvxfer.control import messages as m
from kvxfer.control.channel import MAX_MESSAGE_BYTES, Client
from kvxfer.errors import PeerLostError
from kvxfer.measure.session import Session, open_session

from .test_ports import resident_bytes, serves_and_verifies

POOL_BYTES = 1 << 20
BLOCK_BYTES = 1 << 12
TIMEOUT_NS = 20_000_000_000

MALFORMED = {
    "nothing": b"",
    "noise": b"\xc1\xff\x00garbage",
    "cut": m.encode(m.Command(1, m.Allocate([1] * 50, [1] * 50, [])))[:-20],
    "unknown": msgspec.msgpack.encode({"type": "Execute", "command": "true"}),
    "mistyped": msgspec.msgpack.encode({"type": "Command", "seq": "one", "body": {"type": "Ping"}}),
    "foreign": m.encode(m.Launched()),
    "nested": b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4type\xa5Hello",
    "announced": b"\xdd\xff\xff\xff\xff",
}


class Steps:
    """A client of our own, which can stop in any state of the server and its worker and say something else there."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, state: str) -> None:
        """Go there from the beginning."""
        for name, step in self._steps().items():
            step()
            if name == state:
                return
        raise AssertionError(f"no state {state}")

    @classmethod
    def names(cls) -> list[str]:
        return list(cls._steps(cls.__new__(cls)))

    def _steps(self) -> dict[str, Callable[[], Any]]:
        command = m.Open("tcp", secrets.token_bytes(32), {}, "", 0)
        numbers = np.arange(4, dtype=np.uint32).tobytes()
        return {
            "welcomed": lambda: None,
            "launched": lambda: self.session.launch(0),
            "open": lambda: self._open(command),
            "allocated": lambda: self._both(m.Allocate([POOL_BYTES], [POOL_BYTES], [[_slice()]])),
            "registered": lambda: self._both(m.Register()),
            "accepting": lambda: self.session._send_decode(0, m.Connect("", TIMEOUT_NS)),
            "connected": self._connect,
            "exchanged": self._exchange,
            "prepared": lambda: self._both(m.Prepare([4], [numbers], [numbers], TIMEOUT_NS), m.Prepared),
            "filled": lambda: self._both(m.Fill(0, poison=False)),
            "moving": self._move,
        }

    def _both(self, command: m.WorkerCommand, answer: Any = m.Done) -> Any:
        return self.session.both(0, command, command, answer)

    def _open(self, command: m.Open) -> None:
        _, opened = self._both(command, m.Opened)
        self._endpoint = opened.endpoint

    def _connect(self) -> None:
        self.session._send_prefill(0, m.Connect(self._endpoint, TIMEOUT_NS))
        self.session._answers({"prefill", "decode"})

    def _exchange(self) -> None:
        ours, theirs = self._both(m.ExportKeys(), m.Keys)
        self.session.both(0, m.ImportKeys(theirs.keys), m.ImportKeys(ours.keys), m.Done)

    def _move(self) -> None:
        """A loop without an end worth mentioning; nobody waits for it."""
        run = m.Run("push", 1, 1 << 20, 1, False, False, TIMEOUT_NS)
        self.session._seq += 1
        self.session._send_prefill(0, run)
        self.session._send_decode(0, run)


def _slice() -> m.SliceNumbers:
    """Whole blocks from region 0 to region 0."""
    numbers: m.SliceNumbers = astuple(Slice(0, 0, 0, 0, BLOCK_BYTES, BLOCK_BYTES, 0, 0, BLOCK_BYTES))
    return numbers


@contextmanager
def welcomed(server: Server) -> Iterator[Session]:
    with open_session(Client(f"tcp://{server.address}", None, None)) as session:
        yield session


def is_free(server: Server) -> None:
    with welcomed(server):
        pass


def test_one_who_was_not_welcomed_gets_no_answer(place: Place) -> None:
    server = place.serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 20_000
        dealer.connect(f"tcp://{server.address}")
        for data in MALFORMED.values():
            dealer.send(data)
        dealer.send_multipart([MALFORMED["noise"]] * 3)
        for message in (m.Launch(), m.Dismiss(), m.Bye(), m.Heartbeat(), m.Command(1, m.Ping())):
            dealer.send(m.encode(message))
        dealer.send(m.encode(m.Hello(m.PROTOCOL, __version__)))
        assert isinstance(m.decode_from_server(dealer.recv()), m.Welcome), "the first answer is to the first hello"
        dealer.send(m.encode(m.Bye()))
    serves_and_verifies(place, server)
    assert server.err.count("a run begins") == 2


def test_a_client_that_sends_a_malformed_frame(place: Place) -> None:
    """The run is over, which it is told; the server is free."""
    server = place.serve()
    for kind, data in MALFORMED.items():
        with welcomed(server) as session:
            session._client.socket.send(data)
            told = session._client.receive(20)
            assert isinstance(told, m.Failed), kind
            assert (told.seq, told.status) == (0, 2), kind
            assert "malformed" in told.message, kind
            is_free(server)
    serves_and_verifies(place, server)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "kind"), list(zip(Steps.names()[1:], itertools.cycle(MALFORMED), strict=False)))
def test_a_malformed_frame_in_every_state(place: Place, state: str, kind: str) -> None:
    """Its worker goes with the run, whatever that was doing; and the next client is served at once."""
    server = place.serve()
    with welcomed(server) as session:
        Steps(session)(state)
        session._client.socket.send(MALFORMED[kind])
        server.says("sent a malformed message")
        is_free(server)
        assert server.workers() == []
    serves_and_verifies(place, server)
    place.left_alone(server)


@pytest.mark.slow
@pytest.mark.parametrize("state", Steps.names())
def test_an_oversized_frame(place: Place, state: str) -> None:
    """The connection is cut before the frame is read, and with it the run ends."""
    server = place.serve()
    before = resident_bytes(server.pid)
    with welcomed(server) as session:
        Steps(session)(state)
        session._client.socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        server.says("closed its connection")
        assert resident_bytes(server.pid) - before < MAX_MESSAGE_BYTES
        is_free(server)
    serves_and_verifies(place, server)
    place.left_alone(server)


@pytest.mark.slow
def test_more_workers_than_a_run_may_have(place: Place) -> None:
    server = place.serve()
    with welcomed(server) as session:
        for pair in range(m.MAX_PAIRS + 1):
            session._client.send(m.Launch(pair))
        told = session._client.receive(20)
        while isinstance(told, (m.Launched, m.Heartbeat)):
            told = session._client.receive(20)
        assert isinstance(told, m.Failed)
        assert (told.status, told.message) == (3, f"a run has at most {m.MAX_PAIRS} workers at a time")
        assert len(server.workers()) == m.MAX_PAIRS
    place.left_alone(server)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["launched", "open", "connected", "prepared"])
def test_commands_out_of_turn(place: Place, state: str) -> None:
    """Each is answered, with what is wrong or with what it asks for; the worker lives, and goes on from there."""
    server = place.serve()
    commands: tuple[m.WorkerCommand, ...] = (
        m.Prepare([4], [b"abc"], [b"abc"], 1),
        m.Prepare([0, -1], [], [], 1, bulk=True),
        m.Verify(0, 1 << 40, 1, 1),
        m.Run("pull", 1 << 63, -1, 0, True, True, 0),
        m.Run("push", 0, 1 << 31, 1 << 31, True, False, 1),
        m.Fill(-1, poison=False),
        m.Copy(-1, -1),
        m.ImportKeys(b"x" * 1001),
        m.Connect("127.0.0.1:1", 1),
        m.Describe(),
    )
    with welcomed(server) as session:
        Steps(session)(state)
        pid = server.worker()
        for seq, command in enumerate(commands, 1000):
            session._client.send(m.Command(seq, command))
            answered(session, seq)
        assert server.workers() == [pid]
    serves_and_verifies(place, server)


def answered(session: Session, seq: int) -> m.FromServer:
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at:
        session.keep_alive()
        message = session._client.receive(0.2)
        if isinstance(message, m.Failed):
            assert message.seq in (0, seq), message
            assert message.seq == seq, f"the worker did not survive: {message}"
        if isinstance(message, m.Failed | m.Answer) and message.seq == seq:
            return message
    raise AssertionError(f"no answer to command {seq}")


@pytest.mark.slow
def test_a_client_sends_a_worker_nowhere(place: Place) -> None:
    """Its worker accepts data connections; what a client names as their other end is dropped."""
    server = place.serve()
    with socket.create_server(("127.0.0.1", 0)) as listener, welcomed(server) as session:
        Steps(session)("registered")
        port = listener.getsockname()[1]
        with pytest.raises(PeerLostError, match="data connection"):
            session.decode(0, m.Connect(f"127.0.0.1:{port}", 1_000_000_000), m.Done)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    serves_and_verifies(place, server)


def test_one_pool_of_each_worker_and_no_larger_than_allowed(place: Place) -> None:
    server = place.serve("--max-gib", "0.01")
    half = [5 << 20]
    with welcomed(server) as session:
        steps = Steps(session)
        steps("open")
        for seq, regions, status in ((1001, [11 << 20], 3), (1002, half, None), (1003, half, 2)):
            session._client.send(m.Command(seq, m.Allocate([1], regions, [])))
            told = answered(session, seq)
            assert (told.status if isinstance(told, m.Failed) else None) == status, told
    serves_and_verifies(place, server)


@pytest.mark.slow
def test_a_worker_gets_no_more_memory_than_its_share(place: Place) -> None:
    """Whatever it is asked for: 6 GiB of samples, here."""
    server = place.serve("--max-gib", "0.01")
    with welcomed(server) as session:
        Steps(session)("filled")
        session._client.send(m.Command(1000, m.Run("push", 1, 1 << 27, 1, True, False, 1)))
        told = answered(session, 1000)
        assert isinstance(told, m.Failed)
        assert told.status == 3
        assert "memory" in told.message
    serves_and_verifies(place, server)


# --- strangers during a run


def during_a_run(place: Place, server: Server, disturb: Callable[[], None]) -> None:
    """A proper run goes on undisturbed while something else happens; and another one after it."""
    running: Running = place.start_bench("--peer", server.address, "--max-seconds", "1.5", "--min-samples", "1000000")
    server.says("a run begins", times=server.err.count("a run begins") + 1)
    disturb()
    done = running.wait()
    assert (done.status, done.err) == (0, ""), done
    serves_and_verifies(place, server)


@contextmanager
def stranger(server: Server) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 20_000
        dealer.connect(f"tcp://{server.address}")
        yield dealer


def test_ten_thousand_messages_of_a_stranger(place: Place) -> None:
    """Noise of one part and of several, malformed and forged messages; at the end he is told that it is busy."""
    server = place.serve()
    rng = random.Random(1)
    forged = [m.encode(one) for one in (m.Launch(), m.Dismiss(), m.Bye(), m.Heartbeat(), m.Command(1, m.Ping()))]

    def disturb() -> None:
        with stranger(server) as dealer:
            for number in range(10_000):
                if number % 10 == 0:
                    dealer.send(rng.choice((*forged, *MALFORMED.values())))
                else:
                    dealer.send_multipart([rng.randbytes(rng.randrange(64)) for _ in range(rng.choice((1, 1, 1, 3)))])
            dealer.send(m.encode(m.Hello(m.PROTOCOL, "x")))
            busy = m.decode_from_server(dealer.recv())
            assert isinstance(busy, m.Failed)
            assert "busy" in busy.message

    during_a_run(place, server, disturb)


@pytest.mark.slow
def test_a_flood_of_messages(place: Place) -> None:
    """One who never stops talking does not keep the server from the run it serves."""
    server = place.serve()
    stop = threading.Event()

    def flood() -> None:
        with stranger(server) as dealer:
            dealer.sndtimeo = 100
            while not stop.is_set():
                try:
                    dealer.send(b"\xc1" * 20)
                except zmq.Again:
                    time.sleep(0.001)

    thread = threading.Thread(target=flood)
    try:
        during_a_run(place, server, thread.start)
    finally:
        stop.set()
        thread.join()
