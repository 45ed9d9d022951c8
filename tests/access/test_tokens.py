"""The data port: a token opens it, whoever has it, for one pair of workers of one run and no longer."""

from __future__ import annotations

import socket

import pytest
from two_process.processes import Place, free_port, wait_until
from two_process.relay import HELLO

from .strangers import LOOPBACK, Door, Gate, connect
from .test_ports import serves_and_verifies

HELLO_MAGIC = 0x4658564B
OTHER_ADDRESS = "127.0.0.2"
PAYLOAD = 1 << 20
"""More than hellos and plans: every lane has been taken by then."""


def lane(door: Door, token: bytes, lanes: int = 2) -> bytes:
    """What a data port answers to a proper hello that begins with this token; nothing when it drops the connection."""
    with connect(door) as one:
        try:
            one.sendall(token + HELLO.pack(HELLO_MAGIC, 1, 0, lanes, 0, 0, 1234))
            return one.recv(HELLO.size, socket.MSG_WAITALL)
        except (ConnectionResetError, BrokenPipeError):
            return b""


def test_a_token_of_an_ended_run(place: Place) -> None:
    """Recorded on the wire, where it can be read by all, and said again to the next run at the same port."""
    port = free_port()
    with Gate(port, is_open=True) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        place.serves(server)
        (token,) = set(gate.tokens)
    with Gate(port) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        bench = place.start_bench("--peer", server.address)
        assert gate.arrived.wait(30), bench.err
        assert lane(port, token) == b""
        assert lane(port, bytes(32)) == b""
        gate.open()
        done = bench.wait()
        assert (done.status, done.err) == (0, ""), done
        assert set(gate.tokens) != {token}
        serves_and_verifies(place, server)


def test_a_token_that_is_said_again_during_its_run(place: Place) -> None:
    """By then every lane is taken: the connection waits in the kernel, and nothing of it is ever read."""
    port = free_port()
    with Gate(port, is_open=True) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        bench = place.start_bench("--peer", server.address, "--max-seconds", "2", "--min-samples", "1000000")
        assert gate.arrived.wait(30), bench.err
        wait_until(lambda: gate.passed > PAYLOAD, 30, "payload at the gate")
        with socket.create_connection((LOOPBACK, port), timeout=20) as again:
            again.sendall(gate.tokens[0] + HELLO.pack(HELLO_MAGIC, 1, 0, 2, 0, 0, 1234) + bytes(1000))
            done = bench.wait()
            assert (done.status, done.err) == (0, ""), done
        serves_and_verifies(place, server)


def test_a_data_connection_from_another_address(place: Place) -> None:
    """The token is what counts: data may come by another interface than control, or through a forwarder."""
    port = free_port()
    with Gate(port, source=OTHER_ADDRESS, is_open=True) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        (row,) = place.measure("--peer", server.address)["results"]
        assert (row["status"], row["verified"], row["transport"]) == ("ok", "full", "tcp/lo")
        assert gate.tokens


@pytest.mark.slow
def test_one_who_reads_the_token_on_the_wire_first(place: Place) -> None:
    """What it is worth to him: he spoils the run that he watches, and that run says so. The next one is served."""
    port = free_port()
    with Gate(port) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        bench = place.start_bench("--peer", server.address)
        assert gate.arrived.wait(30), bench.err
        token = gate.first_token()
        thieves = [socket.create_connection((LOOPBACK, port), timeout=20) for _ in range(2)]
        for number, thief in enumerate(thieves):
            thief.sendall(token + HELLO.pack(HELLO_MAGIC, 1, number, 2, 0, 0, 1234))
        for thief in thieves:
            assert len(thief.recv(HELLO.size, socket.MSG_WAITALL)) == HELLO.size, "accepted: he knows the token"
        gate.open()
        for thief in thieves:
            thief.close()
        bench.wait().failed(5)
        place.left_alone(server)
        serves_and_verifies(place, server)
