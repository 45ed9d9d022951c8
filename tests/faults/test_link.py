"""The link of test_packets.py does to packets what its rules say, and counts them as it says."""

from __future__ import annotations

import fcntl
import select
import socket
import termios
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hosts.two_hosts import Host
from two_process.processes import wait_until

from . import packets
from .packets import DESTROYING, REPAIRED, Link, Rule
from .segments import ACK, FIN, RST, SYN, Segment, checksum, parsed

CONTROL = 7420
CLIENT = (b"\xc6\x12\x00\x01", 40_000)
SERVER = (b"\xc6\x12\x00\x02", 9)


def up(seq: int, payload: bytes = b"", flags: int = ACK, port: int = CLIENT[1]) -> Segment:
    return Segment((CLIENT[0], port), SERVER, seq, 501, flags, 1000, b"", payload)


def down(ack: int, flags: int = ACK, payload: bytes = b"", seq: int = 501) -> Segment:
    return Segment(SERVER, CLIENT, seq, ack, flags, 1000, b"", payload)


OPEN, OPENED = up(100, flags=SYN), down(101, flags=SYN | ACK, seq=500)
A, B, C = up(101, b"first"), up(106, b"second"), up(112, b"third")
RULED = 2  # B is the segment of that number


@dataclass
class Wire:
    """A link between two sockets in place of hosts."""

    link: Link
    ends: dict[bool, socket.socket]  # by what is sent there: upwards or downwards

    def sends(self, upwards: bool, *segments: Segment) -> None:
        """The link has taken them then."""
        end = self.ends[upwards]
        for segment in segments:
            end.send(segment.bytes())
        wait_until(lambda: not any(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4))), 10, "the link takes what was sent")
        with self.link.lock:
            pass

    def gets(self, upwards: bool, *segments: Segment) -> None:
        """Assert that this is what arrives next at the end of that direction."""
        found = [self.ends[not upwards].recv(packets.MOST_BYTES) for _ in segments]
        assert found == [segment.bytes() for segment in segments], [parsed(packet) for packet in found]

    def gets_nothing(self, upwards: bool) -> None:
        """Assert that nothing more has arrived."""
        assert not select.select([self.ends[not upwards]], [], [], 0)[0]

    def opens(self, rule: Rule | None) -> None:
        """A run with a connection over which the first bytes have come."""
        self.link.begin(rule, CONTROL)
        self.sends(True, OPEN)
        self.gets(True, OPEN)
        self.sends(False, OPENED)
        self.gets(False, OPENED)
        self.sends(True, A)
        self.gets(True, A)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(packets, "LATE_S", 0.05)
    monkeypatch.setattr(packets, "HOLD_S", 0.05)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for ours, theirs in pairs:
        ours.settimeout(10)
        theirs.setblocking(False)
    hosts = [(Host(side, "", ""), theirs.fileno()) for side, (_, theirs) in zip(("p", "d"), pairs, strict=True)]
    with Link(hosts[0], hosts[1]) as link:
        yield Wire(link, {True: pairs[0][0], False: pairs[1][0]})
    for pair in pairs:
        for each in pair:
            each.close()


ARRIVES = {
    "lose": (C,),
    "twice": (B, B, C),
    "late": (C, B),
    "swap": (C, B),
    "hold": (B, C),
    "reset": (up(106, flags=RST | ACK).changed(window=0),),
    "end": (B.changed(flags=ACK | FIN),),
    "truncate": (B.changed(flags=ACK | FIN, payload=b"sec"),),
    "cut": (),
    "unplug": (),
}
"""What comes of B and C."""


def test_every_action_is_tried() -> None:
    assert {*ARRIVES, "corrupt"} == {*REPAIRED, *DESTROYING}


@pytest.mark.parametrize("action", ARRIVES)
def test_a_rule_does_what_it_says(wire: Wire, action: str) -> None:
    wire.opens(Rule(action, RULED))
    wire.sends(True, B, C)
    wire.gets(True, *ARRIVES[action])
    assert wire.link.struck
    if action == "reset":
        wire.gets(False, down(112, flags=RST | ACK).changed(window=0))
    wire.gets_nothing(True)
    wire.gets_nothing(False)


@pytest.mark.parametrize("upwards", [True, False])
def test_a_corrupted_segment_has_the_checksum_of_the_right_one(wire: Wire, upwards: bool) -> None:
    wire.opens(Rule("corrupt", RULED if upwards else 1, upwards))
    sent = B if upwards else down(106, payload=b"answer")
    wire.sends(upwards, sent)
    packet = wire.ends[not upwards].recv(packets.MOST_BYTES)
    differing = [one ^ other for one, other in zip(packet, sent.bytes(), strict=True) if one != other]
    assert differing == [1]
    assert not has_right_checksums(packet)


def test_what_is_made_has_right_checksums() -> None:
    for segment in (OPEN, A, B, B.changed(options=b"\x01\x01\x01\x01", payload=b"odd")):
        assert has_right_checksums(segment.bytes())
        assert parsed(segment.bytes()) == segment


def has_right_checksums(packet: bytes) -> bool:
    pseudo = packet[12:20] + b"\0\x06" + (len(packet) - 20).to_bytes(2, "big")
    return checksum(packet[:20]) == 0 and checksum(pseudo + packet[20:]) == 0


def test_what_the_sender_did_not_send_is_not_acknowledged_to_it(wire: Wire) -> None:
    wire.opens(Rule("truncate", RULED))
    wire.sends(True, B)
    wire.gets(True, *ARRIVES["truncate"])
    wire.sends(False, down(110))  # three bytes and a FIN
    wire.gets(False, down(109))


@pytest.mark.parametrize("action", ["reset", "cut"])
def test_of_a_connection_without_a_way_nothing_passes_and_of_others_all_does(wire: Wire, action: str) -> None:
    wire.opens(Rule(action, RULED))
    wire.sends(True, B)
    wire.gets(True, *ARRIVES[action])
    other = up(7, flags=SYN, port=40_001)
    wire.sends(True, C, other)
    wire.gets(True, other)
    if action == "cut":
        wire.sends(False, down(106))
        wire.gets_nothing(False)


def test_an_unplugged_link_carries_nothing_until_it_is_mended(wire: Wire) -> None:
    wire.opens(Rule("unplug", RULED))
    control = up(7, flags=SYN).changed(target=(SERVER[0], CONTROL))
    wire.sends(True, B, control)
    wire.sends(False, down(106))
    wire.gets_nothing(True)
    wire.gets_nothing(False)
    wire.link.mend()
    wire.sends(True, C)
    wire.gets(True, C)


def test_what_is_sent_again_and_what_only_acknowledges_do_not_count(wire: Wire) -> None:
    wire.opens(None)
    wire.sends(True, A, up(106), OPEN, B)
    wire.gets(True, A, up(106), OPEN, B)
    wire.sends(False, down(112))
    wire.gets(False, down(112))
    assert wire.link.sizes == {True: [0, 5, 6], False: [0]}


def test_neither_the_control_port_nor_connections_of_the_run_before_count(wire: Wire) -> None:
    wire.opens(None)
    wire.link.begin(None, CONTROL)
    control = up(7, b"control").changed(target=(SERVER[0], CONTROL))
    fresh = up(9, flags=SYN)
    wire.sends(True, B, control)
    wire.gets(True, B, control)
    assert wire.link.sizes == {True: [], False: []}
    wire.sends(True, fresh)  # from the same port
    wire.gets(True, fresh)
    assert wire.link.sizes == {True: [0], False: []}
