"""The parts of a control connection: ZMTP 3, which ZeroMQ speaks (https://rfc.zeromq.org/spec/23).

A greeting in three parts, of which each side sends the next one only when it has the other's; then frames. They are
named by what they carry: a command of the handshake, a message, or what CURVE has sealed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from kvxfer.control import messages as m

from .spoiling import Part, read_part

GREETING = {"signature": 10, "version": 1, "mechanism": 53}
"""Bytes of each."""

LONG, COMMAND = 2, 4
"""Flags of a frame, which begins with them; then come its size, in one byte or eight, and its body."""

SEALED = "sealed"


def control_parts(source: socket.socket, up: bool) -> Iterator[Part]:
    for name, size in GREETING.items():
        yield read_part(source, name, size)
    while True:
        frame = read_part(source, "", 2)
        flags, size = frame.data
        if flags & LONG:
            frame.data += read_part(source, "", 7).data
            (size,) = struct.unpack_from("!Q", frame.data, 1)
        body = read_part(source, "", size).data
        frame.name = body[1 : 1 + body[0]].decode() if flags & COMMAND else _name(body, up)
        frame.data += body
        yield frame


def _name(body: bytes, up: bool) -> str:
    try:
        message: m.Message = m.decode_to_server(body) if up else m.decode_from_server(body)
    except msgspec.DecodeError:
        return SEALED
    return type(message.body if isinstance(message, (m.Command, m.Answer)) else message).__name__
