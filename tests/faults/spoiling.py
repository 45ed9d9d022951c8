"""A relay on the way of the data connections that knows what passes, and does one thing to one byte of it.

What passes on a connection is a series of parts: token, hello, answer (the listener's hello), on lane 0 notices by
their kind and their payload, on the others chunk headers and payload.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from two_process.relay import CHUNK, HELLO, TOKEN_BYTES

NOTICE = struct.Struct("<IIIB3xQQQQ")  # magic, kind, plan, op, tag, count, total, payload bytes
KINDS = {1: "prepare", 2: "arm", 3: "release", 4: "bye", 5: "request", 6: "confirm", 7: "delivered"}

DELAY_S = 0.3


@dataclass(frozen=True)
class Spoil:
    """What is done where: to the `nth` part (from 0) of that name and direction, before its byte at `offset`.

    A negative offset counts from the end; None is the middle. Actions: drop (no more of this direction passes), delay,
    truncate (both connections are closed in order), reset (by RST), duplicate (the byte comes twice).
    """

    action: str
    part: str
    up: bool = True  # from the one that connects
    offset: int | None = 0
    nth: int = 0

    def __str__(self) -> str:
        where = "the middle" if self.offset is None else f"byte {self.offset}"
        return f"{self.action} at {where} of {self.part} number {self.nth} {'up' if self.up else 'down'}"


@dataclass(frozen=True)
class Shuffle:
    """Each part waits for a random time, on a connection for itself, and comes in pieces of random size."""

    seed: int
    notices_s: float  # the longest wait of a part on lane 0
    data_s: float  # and of one on the others


class Connection:
    """Two sockets, each read by one thread, that both can end at once."""

    def __init__(self, one: socket.socket, other: socket.socket) -> None:
        self.sockets = (one, other)
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(0.05)  # nobody stays in a system call on a socket that is being closed

    def end(self, reset: bool) -> None:
        for each in self.sockets:
            with contextlib.suppress(OSError):
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    each.shutdown(socket.SHUT_RDWR)
            each.close()


def serve(port: int, target: int, ready: Path, rule: Spoil | Shuffle) -> None:
    """Relay from the port to the target until killed."""
    seen: dict[tuple[str, bool], Iterator[int]] = {}
    lock = threading.Lock()
    with socket.create_server(("127.0.0.1", port)) as listener:
        ready.touch()
        while True:
            one, _ = listener.accept()
            try:
                other = socket.create_connection(("127.0.0.1", target))
            except OSError:
                one.close()
                continue
            connection = Connection(one, other)
            for up in (True, False):
                threading.Thread(target=_pass, args=(connection, up, rule, seen, lock), daemon=True).start()


def _pass(
    connection: Connection,
    up: bool,
    rule: Spoil | Shuffle,
    seen: dict[tuple[str, bool], Iterator[int]],
    lock: threading.Lock,
) -> None:
    source, sink = connection.sockets if up else connection.sockets[::-1]
    random_source = random.Random(f"{rule} {up}")
    try:
        for name, data in _parts(source, up):
            with lock:
                number = next(seen.setdefault((name, up), itertools.count()))
            if isinstance(rule, Shuffle):
                _dribble(sink, name, data, rule, random_source)
            elif (rule.part, rule.up, rule.nth) == (name, up, number):
                _spoil(connection, sink, data, rule)
            else:
                _send(sink, data)
    except (OSError, EOFError):
        connection.end(reset=False)


def _spoil(connection: Connection, sink: socket.socket, data: bytes, rule: Spoil) -> None:
    at = len(data) // 2 if rule.offset is None else rule.offset % len(data)
    _send(sink, data[:at])
    if rule.action == "drop":
        threading.Event().wait()
    elif rule.action == "delay":
        time.sleep(DELAY_S)
    elif rule.action in ("truncate", "reset"):
        connection.end(reset=rule.action == "reset")
    elif rule.action == "duplicate":
        _send(sink, data[at : at + 1])
    _send(sink, data[at:])


def _dribble(sink: socket.socket, name: str, data: bytes, rule: Shuffle, source: random.Random) -> None:
    time.sleep(source.uniform(0, rule.data_s if name in ("header", "payload") else rule.notices_s))
    while data:
        size = source.choice((1, 2, 7, 100, 5000, 1 << 16))
        _send(sink, data[:size])
        data = data[size:]


def _parts(source: socket.socket, up: bool) -> Iterator[tuple[str, bytes]]:
    lane = 0
    if up:
        yield "token", _exactly(source, TOKEN_BYTES)
        hello = _exactly(source, HELLO.size)
        yield "hello", hello
        lane = HELLO.unpack(hello)[2]
    else:
        yield "answer", _exactly(source, HELLO.size)
    while True:
        head = _exactly(source, CHUNK.size if lane else NOTICE.size)
        if lane:
            name, size = "header", CHUNK.unpack(head)[4]
        else:
            fields = NOTICE.unpack(head)
            name, size = KINDS.get(fields[1], "other"), fields[7]
        yield name, head
        if size:
            yield "payload" if lane else f"payload of {name}", _exactly(source, size)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = source.recv(size - len(data))
        except TimeoutError:
            continue
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _send(sink: socket.socket, data: bytes) -> None:
    while data:
        with contextlib.suppress(TimeoutError):
            data = data[sink.send(data) :]
