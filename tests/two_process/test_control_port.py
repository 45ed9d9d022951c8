"""The control port: other versions and other servers are told so, one run at a time, and by which name it is reached.

Strangers at the ports: tests/access/.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvxfer import __version__
from kvxfer.control import messages as m
from kvxfer.measure.host import host_info

from .processes import Place, Server, free_port
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
        ([m.encode(m.Failed(0, 3, "no\x1b[2Jroom\n\nfor you"))], 3, ["no?[2Jroom for you"]),
        ([welcome(protocol=NEXT, version="9\x1b]0;x\x07")], 2, ["kvxfer 9?]0;x? ", "install the same version"]),
        ([m.encode(m.Launched())], 2, ["out of turn"]),
        ([b"garbage"], 2, ["does not understand", "install the same version"]),
        ([b"\x81\xa4type\xa6Future"], 2, ["does not understand", "install the same version"]),
        ([welcome(), m.encode(m.Failed(0, 5, "gone again"))], 5, ["gone again"]),
        ([welcome(), b"\xff"], 5, ["malformed"]),
    ],
    ids=[
        "version",
        "failed",
        "status",
        "escapes",
        "escapes-in-version",
        "turn",
        "garbage",
        "unknown-type",
        "failed-later",
        "garbage-later",
    ],
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
    assert done.seconds < 15


def test_one_run_at_a_time(place: Place) -> None:
    server = place.serve()
    first = place.start_bench("--peer", server.address, "--max-seconds", "1", "--min-samples", "1000000")
    server.says("a run begins")
    place.bench("--peer", server.address).failed(3, "busy", "try again")
    assert first.wait().status == 0
    place.serves(server)


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
