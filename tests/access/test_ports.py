"""Strangers at both ports, while a proper client is served: noise, silence, slowness, in number."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from two_process.processes import Place, Server, free_port

from kvxfer.control.channel import HANDSHAKE_S

from .strangers import ZMTP_GREETING, Crowd, Gate, descriptors, knock, long_frame

DATA_PATIENCE_S = 2.0
"""How long a data port waits for a token (csrc/backend/lane.cpp)."""

LATE_S = 20.0
"""What a loaded machine may take longer than the server's own clock says."""

STRINGS = 10_000
AT_A_TIME_S = 4.0
"""An attack on a data port has to be over before the worker gives its client up (CONNECT_NS of measure/pair.py)."""

THOUSAND = 1100
"""Somewhat more, so that descriptors beyond 1023 (which select() does not know) are used."""

PENDING = 64
"""Most connections that a data port keeps waiting for their token; the oldest makes room."""

Attack = Callable[[int], None]


def at_the_control_port(place: Place, attack: Attack) -> None:
    """The attack goes on while benches run, at least one from begin to end; each has to succeed and to verify."""
    server = place.serve()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            attack(server.port)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        serves_and_verifies(place, server)
        while thread.is_alive():
            serves_and_verifies(place, server)
    finally:
        thread.join()
    assert not failed, failed[0]
    serves_and_verifies(place, server)
    place.left_alone(server)
    server.stop()  # whoever needs longer comes again, to another one


def at_the_data_port(place: Place, attack: Attack) -> None:
    """The attack happens while the server's worker accepts data connections, before the client's own get there."""
    port = free_port()
    with Gate(port) as gate:
        server = place.serve("--data-port", str(port), "--advertise", gate.address)
        bench = place.start_bench("--peer", server.address, "--json", str(place.directory / "attacked.json"))
        assert gate.arrived.wait(30), bench.err
        attack(port)
        gate.open()
        done = bench.wait()
        assert (done.status, done.err) == (0, ""), done
        place.left_alone(server)
        serves_and_verifies(place, server)
        server.stop()


def serves_and_verifies(place: Place, server: Server) -> None:
    assert server.process.poll() is None, server.err
    (row,) = place.measure("--peer", server.address)["results"]
    assert (row["status"], row["verified"]) == ("ok", "full"), row


BOTH_PORTS = pytest.mark.parametrize("attacked", [at_the_control_port, at_the_data_port], ids=["control", "data"])


@pytest.mark.slow
@BOTH_PORTS
def test_ten_thousand_random_strings(place: Place, attacked: Callable[[Place, Attack], None]) -> None:
    rng = random.Random(4)
    sent = 0
    beginnings = (b"", b"", b"\xff", ZMTP_GREETING, ZMTP_GREETING + long_frame(1 << 40), b"GET / HTTP/1.1\r\n\r\n")

    def attack(port: int) -> None:
        nonlocal sent
        give_up_at = time.monotonic() + AT_A_TIME_S
        while sent < STRINGS and time.monotonic() < give_up_at:
            assert knock(port, rng.choice(beginnings) + rng.randbytes(rng.randrange(120)))
            sent += 1

    while sent < STRINGS:
        attacked(place, attack)


@BOTH_PORTS
def test_a_thousand_that_say_nothing(place: Place, attacked: Callable[[Place, Attack], None]) -> None:
    """Half-open ones: the control port drops them after its patience, the data port keeps the youngest only."""
    on_data = attacked is at_the_data_port

    def attack(port: int) -> None:
        with descriptors(THOUSAND), Crowd(port) as crowd:
            crowd.join(THOUSAND)
            if on_data:
                crowd.wait_until_dropped(LATE_S, left=PENDING)
            else:
                crowd.wait_until_dropped(HANDSHAKE_S + LATE_S)

    attacked(place, attack)


@pytest.mark.slow
@pytest.mark.parametrize("says", [ZMTP_GREETING, bytes(100)], ids=["greeting", "noise"])
@BOTH_PORTS
def test_a_byte_per_second(place: Place, attacked: Callable[[Place, Attack], None], says: bytes) -> None:
    """Each byte is fresh hope; the server's patience is with the whole of a handshake or token."""
    patience = DATA_PATIENCE_S if attacked is at_the_data_port else HANDSHAKE_S

    def attack(port: int) -> None:
        with Crowd(port) as crowd:
            crowd.join(PENDING // 2)
            began = time.monotonic()
            for at in range(len(says)):
                crowd.say(says[at : at + 1])
                if not len(crowd):
                    break
                assert time.monotonic() - began < patience + LATE_S, f"{len(crowd)} slow ones are still connected"
                time.sleep(1)

    attacked(place, attack)


@pytest.mark.slow
def test_more_strangers_than_a_server_may_have_descriptors(place: Place) -> None:
    """It accepts nobody while they are there, ends none of its own, and serves again once their patience is over."""
    import resource

    server = place.serve(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)))
    with descriptors(300), Crowd(server.port) as crowd:
        crowd.join(300)
        crowd.wait_until_dropped(4 * HANDSHAKE_S + LATE_S)
    serves_and_verifies(place, server)


@pytest.mark.slow
def test_frames_that_are_announced_cost_nothing_until_they_come(place: Place) -> None:
    """A hundred connections that each announce as much as the server would take, before any handshake."""
    from kvxfer.control.channel import MAX_MESSAGE_BYTES

    server = place.serve()
    before = resident_bytes(server.pid)
    with Crowd(server.port) as crowd:
        crowd.join(100, ZMTP_GREETING + long_frame(MAX_MESSAGE_BYTES))
        serves_and_verifies(place, server)
        assert resident_bytes(server.pid) - before < MAX_MESSAGE_BYTES
        crowd.wait_until_dropped(HANDSHAKE_S + LATE_S)
    serves_and_verifies(place, server)


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
