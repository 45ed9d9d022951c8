"""Strangers at the control port, while a proper client is served: noise, silence, slowness, in number.

What data goes over is attacked in test_doors.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from two_process.processes import Place, Server

from kvxfer.control.channel import HANDSHAKE_S

from .strangers import ZMTP_GREETING, Crowd, descriptors, knock, long_frame, noise

LATE_S = 20.0
"""What a loaded machine may take longer than the server's own clock says."""

STRINGS = 10_000
THOUSAND = 1100
"""Somewhat more, so that descriptors beyond 1023 (which select() does not know) are used."""

SLOW = 32
"""Connections that each say a byte per second."""

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


def serves_and_verifies(place: Place, server: Server) -> None:
    assert server.process.poll() is None, server.err
    (row,) = place.measure("--peer", server.address)["results"]
    assert (row["status"], row["verified"]) == ("ok", "full"), row


@pytest.mark.slow
def test_ten_thousand_random_strings(place: Place) -> None:
    def attack(port: int) -> None:
        for says in noise(STRINGS):
            assert knock(port, says)

    at_the_control_port(place, attack)


def test_a_thousand_that_say_nothing(place: Place) -> None:
    """Half-open ones: they are dropped after the server's patience."""

    def attack(port: int) -> None:
        with descriptors(THOUSAND), Crowd(port) as crowd:
            crowd.join(THOUSAND)
            crowd.wait_until_dropped(HANDSHAKE_S + LATE_S)

    at_the_control_port(place, attack)


@pytest.mark.slow
@pytest.mark.parametrize("says", [ZMTP_GREETING, bytes(100)], ids=["greeting", "noise"])
def test_a_byte_per_second(place: Place, says: bytes) -> None:
    """Each byte is fresh hope; the server's patience is with the whole of a handshake."""

    def attack(port: int) -> None:
        with Crowd(port) as crowd:
            crowd.join(SLOW)
            crowd.say_slowly(says, HANDSHAKE_S + LATE_S)

    at_the_control_port(place, attack)


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
