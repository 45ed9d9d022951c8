"""TCP segments in IPv4 packets, as they are on the wire."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

_IP = struct.Struct("!BBHHHBBH4s4s")
_TCP = struct.Struct("!HHIIBBHHH")
_PSEUDO = struct.Struct("!4s4sBBH")
_TCP_PROTOCOL = 6

_AROUND = 1 << 32

End = tuple[bytes, int]
"""Address and port."""


@dataclass(frozen=True)
class Segment:
    """What of a segment can be changed. bytes() gives it the checksums that it then needs."""

    source: End
    target: End
    seq: int
    ack: int
    flags: int
    window: int
    options: bytes
    payload: bytes

    @property
    def length(self) -> int:
        """What it takes of the numbers that count the bytes of a direction: SYN and FIN take one each."""
        return len(self.payload) + bool(self.flags & SYN) + bool(self.flags & FIN)

    @property
    def end(self) -> int:
        """The number that follows it."""
        return (self.seq + self.length) % _AROUND

    def changed(self, **fields: int | bytes) -> Segment:
        return replace(self, **fields)  # type: ignore[arg-type]

    def bytes(self) -> bytes:
        """The packet."""
        words = (_TCP.size + len(self.options)) // 4
        head = [self.source[1], self.target[1], self.seq, self.ack, words << 4, self.flags, self.window, 0, 0]
        size = words * 4 + len(self.payload)
        pseudo = _PSEUDO.pack(self.source[0], self.target[0], 0, _TCP_PROTOCOL, size)
        head[7] = checksum(pseudo + _TCP.pack(*head) + self.options + self.payload)
        ip = [0x45, 0, _IP.size + size, 0, 0x4000, 64, _TCP_PROTOCOL, 0, self.source[0], self.target[0]]
        ip[7] = checksum(_IP.pack(*ip))
        return _IP.pack(*ip) + _TCP.pack(*head) + self.options + self.payload


def parsed(packet: bytes) -> Segment | None:
    """Nothing when it is no TCP over IPv4."""
    if packet[0] >> 4 != 4 or packet[9] != _TCP_PROTOCOL:
        return None
    at = (packet[0] & 15) * 4
    *_, source, target = _IP.unpack_from(packet)
    from_port, to_port, seq, ack, words, flags, window, _, _ = _TCP.unpack_from(packet, at)
    body = at + (words >> 4) * 4
    options, payload = packet[at + _TCP.size : body], packet[body:]
    return Segment((source, from_port), (target, to_port), seq, ack, flags, window, options, payload)


def is_later(number: int, than: int) -> bool:
    """Whether it comes after the other one, of numbers that begin again after the last."""
    return 0 < (number - than) % _AROUND < _AROUND // 2


def checksum(data: bytes) -> int:
    """Of the Internet (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
