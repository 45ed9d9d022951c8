"""The control port: other versions are told so, and whatever else arrives there disturbs nobody."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvxfer import __version__
from kvxfer.control import messages as m
from kvxfer.measure.host import host_info

from .processes import Place, Running, Server, free_port
from .relay import Relay, other_protocol

NEXT = m.PROTOCOL + 1


@contextmanager
def fake_server(answer: Callable[[bytes], list[bytes]]) -> Iterator[str]:
    """Something on a control port that answers every message with these; yields its address."""
    done = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def talk() -> None:
            while not done.is_set():
                if router.poll(50):
                    client, data = router.recv_multipart()
                    for one in answer(data):
                        router.send_multipart([client, one])

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            done.set()
            thread.join()


def welcome(**changes: object) -> bytes:
    told = m.Welcome(
        protocol=m.PROTOCOL,
        version=__version__,
        host=host_info(),
        usable_bytes=1 << 30,
        backends=["tcp"],
        data_address="127.0.0.1",
    )
    return m.encode(msgspec.structs.replace(told, **changes))


@contextmanager
def client(server: Server) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 10_000
        dealer.connect(f"tcp://{server.address}")
        yield dealer


@pytest.mark.parametrize(
    ("answers", "status", "says"),
    [
        ([welcome(protocol=NEXT, version="9.9.9")], 2, ["9.9.9", f"protocol {NEXT}", "install the same version"]),
        ([m.encode(m.Failed(0, 3, "no room today"))], 3, ["no room today"]),
        ([m.encode(m.Failed(0, 99, "strange"))], 1, ["strange"]),
        ([m.encode(m.Launched())], 2, ["out of turn"]),
        ([b"garbage"], 2, ["does not understand", "install the same version"]),
        ([b"\x81\xa4type\xa6Future"], 2, ["does not understand", "install the same version"]),
        ([welcome(), m.encode(m.Failed(0, 5, "gone again"))], 5, ["gone again"]),
        ([welcome(), b"\xff"], 5, ["malformed"]),
    ],
    ids=["version", "failed", "status", "turn", "garbage", "unknown-type", "failed-later", "garbage-later"],
)
def test_a_peer_that_answers_otherwise(place: Place, answers: list[bytes], status: int, says: list[str]) -> None:
    waiting = list(answers)

    def answer(_: bytes) -> list[bytes]:
        return [waiting.pop(0)] if waiting else []

    with fake_server(answer) as address:
        place.bench("--peer", address).failed(status, *says)


@pytest.mark.slow
def test_a_peer_that_falls_silent(place: Place) -> None:
    """After its welcome nothing more comes, not even a heartbeat."""
    waiting = [welcome()]
    with fake_server(lambda _: [waiting.pop()] if waiting else []) as address:
        done = place.bench("--peer", address)
    done.failed(5, "has not answered for 3 s")
    assert done.seconds < 8


def test_a_client_of_another_version(place: Place) -> None:
    server = place.serve()
    with client(server) as dealer:
        dealer.send(m.encode(m.Hello(NEXT, "9.9.9")))
        refused = m.decode_from_server(dealer.recv())
        assert isinstance(refused, m.Failed)
        assert (refused.seq, refused.status) == (0, 2)
        for words in (__version__, "9.9.9", f"protocol {NEXT}", "install the same version"):
            assert words in refused.message
    place.serves(server)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_data_connection_of_another_version(place: Place, side: str) -> None:
    port = free_port()
    with Relay(port, **{f"{side}_hello": other_protocol}) as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        done = place.bench("--peer", server.address)
        done.failed(2, "protocol", "install the same kvxfer on both")
    place.left_alone(server)
    assert done.seconds < 5


def test_one_run_at_a_time(place: Place) -> None:
    server = place.serve()
    first = place.start_bench("--peer", server.address, "--max-seconds", "1", "--min-samples", "1000000")
    server.says("a run begins")
    place.bench("--peer", server.address).failed(3, "busy", "try again")
    assert first.wait().status == 0
    place.serves(server)


def during_a_run(place: Place, server: Server, disturb: Callable[[], None]) -> None:
    """A proper run goes on undisturbed while something else happens; and another one after it."""
    running: Running = place.start_bench("--peer", server.address, "--max-seconds", "1.5", "--min-samples", "1000000")
    server.says("a run begins", times=server.err.count("a run begins") + 1)
    disturb()
    done = running.wait()
    assert (done.status, done.err) == (0, ""), done
    place.serves(server)


def test_garbage_messages(place: Place) -> None:
    """Random bytes, and proper messages from one who has not been welcomed."""
    server = place.serve()
    rng = random.Random(1)
    forged = [
        m.encode(message)
        for message in (m.Launch(), m.Dismiss(), m.Bye(), m.Heartbeat(), m.Command(1, m.Ping()), m.Launched())
    ]

    def disturb() -> None:
        with client(server) as dealer:
            for number in range(10_000):
                if number % 10 == 0:
                    dealer.send(rng.choice(forged))
                else:
                    parts = [rng.randbytes(rng.randrange(64)) for _ in range(rng.choice((1, 1, 1, 3)))]
                    dealer.send_multipart(parts)
            dealer.send(b"\xdd\xff\xff\xff\xff")  # an array that is said to have four billion entries
            dealer.send(b"\x91" * 100_000)
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
        with client(server) as dealer:
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


@pytest.mark.slow
def test_raw_garbage(place: Place) -> None:
    """What does not even speak ZeroMQ: bytes of all kinds, and connections that say nothing."""
    server = place.serve()
    rng = random.Random(2)
    idle: list[socket.socket] = []

    def disturb() -> None:
        for kind in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", rng.randbytes(1000)):
            for _ in range(20):
                connection = socket.create_connection(("127.0.0.1", server.port))
                connection.sendall(kind)
                idle.append(connection)

    try:
        during_a_run(place, server, disturb)
    finally:
        for connection in idle:
            connection.close()


def test_garbage_on_the_data_port(place: Place) -> None:
    """Strangers connect first, in number, and say nothing or the wrong thing: the run's own connections get through."""
    port = free_port()
    idle: list[socket.socket] = []
    rng = random.Random(3)

    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            try:
                connection = socket.create_connection(("127.0.0.1", port), 1)
                connection.sendall(rng.randbytes(rng.choice((0, 10, 56, 500))))
                idle.append(connection)
            except OSError:
                time.sleep(0.001)
            if len(idle) > 200:
                idle.pop(0).close()

    server = place.serve("--data-port", str(port))
    thread = threading.Thread(target=knock)
    thread.start()
    try:
        place.serves(server)
    finally:
        stop.set()
        thread.join()
        for connection in idle:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["localhost", "::1", "[::1]", "127.0.0.2"])
def test_every_way_to_name_this_host(place: Place, address: str) -> None:
    server = place.serve("--bind", address)
    host = "[::1]" if address == "::1" else address
    (row,) = place.measure("--peer", f"{host}:{server.port}")["results"]
    assert row["transport"] == "tcp/lo"


@pytest.mark.slow
def test_a_server_whose_log_nobody_reads(place: Place) -> None:
    port = free_port()
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "kvxfer.serve", "--port", str(port)]
    with subprocess.Popen(command, stderr=writer, env=place.environment) as server:
        os.close(writer)
        assert b"waiting on" in os.read(reader, 1000)
        os.close(reader)
        for _ in range(2):
            place.measure("--peer", f"127.0.0.1:{port}")
        server.send_signal(signal.SIGINT)
        server.wait(5)
