"""A relay that knows what passes on its connections, and does one thing to one byte of it.

What passes is a series of parts. On a data connection these are token, hello, answer (the listener's hello), on lane 0
notices by their kind and their payload, on the others chunk headers and payload; over Unix sockets a descriptor may
come along with a part, and is passed on with its first byte. On the control connection: zmtp.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from two_process.relay import CHUNK, HELLO, TOKEN_BYTES

NOTICE = struct.Struct("<IIIB3xQQQQ")  # magic, kind, plan, op, tag, count, total, payload bytes
KINDS = (
    *("none", "prepare", "arm", "release", "bye", "request", "confirm", "delivered", "cancel_request"),
    *("cancelled", "cancel_seen", "progress", "written", "pool_wanted", "pool"),
)
"""By their number on the wire."""

CREDENTIALS = struct.Struct("iii")  # pid, uid, gid

DELAY_S = 0.3

MOST_DESCRIPTORS = 4  # that are taken from one receive; a second one would be a fault worth seeing


@dataclass(frozen=True)
class Spoil:
    """What is done where: to the `nth` part (from 0) of that name and direction, before its byte at `offset`.

    A negative offset counts from the end; None is the middle. Actions: drop (no more of this direction passes), delay,
    truncate (both connections are closed in order), reset (by RST; over Unix sockets with what is unread), duplicate
    (the byte comes twice), strip (the part comes without its descriptor), kill (over Unix sockets: whoever sends it).
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
    """Each part waits for a random time, on a connection for itself, and comes in pieces of random size.

    What comes to a control connection meanwhile goes on together, whatever parts it has.
    """

    seed: int
    notices_s: float  # the longest wait of a part on lane 0
    data_s: float  # and of one on the others


class Connection:
    """Two sockets, each read by one thread, that both can end at once."""

    def __init__(self, one: socket.socket, other: socket.socket) -> None:
        self.sockets = (one, other)
        for each in self.sockets:
            if each.family != socket.AF_UNIX:
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


class Part:
    """Bytes that belong together, and the descriptors that came with them, which it owns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data = b""
        self.descriptors: list[int] = []

    def drop_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


Parser = Callable[[socket.socket, bool], Iterator[Part]]
"""The parts that come from a socket, upwards or not, without an end but an EOFError."""


class Relay:
    """Passes on what comes to a listener, but for what the rule says."""

    def __init__(
        self,
        listener: socket.socket,
        onward: Callable[[], socket.socket],
        rule: Spoil | Shuffle | None,
        parser: Parser,
        seen: Callable[[str, bool], None] = lambda name, up: None,
    ) -> None:
        """`onward` makes a connection to the target; `seen` is called with each part's name and direction."""
        self._listener = listener
        self._onward = onward
        self._rule = rule
        self._parser = parser
        self._seen = seen
        self._numbers: dict[tuple[str, bool], Iterator[int]] = {}
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def run(self) -> None:
        """Until the listener is shut down."""
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = self._onward()
            except OSError:
                one.close()
                continue
            connection = Connection(one, other)
            self._connections.append(connection)
            for up in (True, False):
                self._threads.append(threading.Thread(target=self._pass, args=(connection, up), daemon=True))
                self._threads[-1].start()

    def end(self) -> None:
        """Of all connections, once run() has returned."""
        self._ended.set()
        for connection in self._connections:
            connection.end(reset=False)
        for thread in self._threads:
            thread.join()

    def _pass(self, connection: Connection, up: bool) -> None:
        rule = self._rule
        source, sink = connection.sockets if up else connection.sockets[::-1]
        random_source = random.Random(f"{rule} {up}")
        try:
            for part in self._parser(source, up):
                with self._lock:
                    number = next(self._numbers.setdefault((part.name, up), itertools.count()))
                    self._seen(part.name, up)
                try:
                    if isinstance(rule, Shuffle):
                        _dribble(sink, part, rule, random_source)
                    elif rule is not None and (rule.part, rule.up, rule.nth) == (part.name, up, number):
                        self._spoil(connection, source, sink, part, rule)
                    else:
                        _send(sink, part, part.data)
                finally:
                    part.drop_descriptors()
        except (OSError, EOFError):
            connection.end(reset=False)

    def _spoil(
        self, connection: Connection, source: socket.socket, sink: socket.socket, part: Part, rule: Spoil
    ) -> None:
        at = len(part.data) // 2 if rule.offset is None else rule.offset % len(part.data)
        if rule.action == "strip":
            assert part.descriptors, f"{part.name} came without a descriptor"
            part.drop_descriptors()
        _send(sink, part, part.data[:at])
        if rule.action == "drop":
            self._ended.wait()
        elif rule.action == "delay":
            time.sleep(DELAY_S)
        elif rule.action in ("truncate", "reset"):
            connection.end(reset=rule.action == "reset")
        elif rule.action == "kill":
            os.kill(_process_behind(source), signal.SIGKILL)
        elif rule.action == "duplicate":
            _send(sink, part, part.data[at : at + 1])
        _send(sink, part, part.data[at:])


def _process_behind(connection: socket.socket) -> int:
    pid, _, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(pid)


def _dribble(sink: socket.socket, part: Part, rule: Shuffle, source: random.Random) -> None:
    time.sleep(source.uniform(0, rule.data_s if part.name in ("header", "payload") else rule.notices_s))
    data = part.data
    while data:
        size = source.choice((1, 2, 7, 100, 5000, 1 << 16))
        _send(sink, part, data[:size])
        data = data[size:]


def data_parts(source: socket.socket, up: bool) -> Iterator[Part]:
    """Of a data connection."""
    lane = 0
    if up:
        yield read_part(source, "token", TOKEN_BYTES)
        hello = read_part(source, "hello", HELLO.size)
        yield hello
        lane = HELLO.unpack(hello.data)[2]
    else:
        yield read_part(source, "answer", HELLO.size)
    while True:
        head = read_part(source, "header", CHUNK.size if lane else NOTICE.size)
        if lane:
            size = CHUNK.unpack(head.data)[4]
        else:
            fields = NOTICE.unpack(head.data)
            head.name, size = KINDS[fields[1]], fields[7]
        yield head
        if size:
            yield read_part(source, "payload" if lane else f"payload of {head.name}", size)


def any_parts(source: socket.socket, _: bool) -> Iterator[Part]:
    """Whatever it is, as it comes."""
    while True:
        part = Part("bytes")
        _receive(source, 1 << 16, part)
        yield part


def read_part(source: socket.socket, name: str, size: int) -> Part:
    """The next `size` bytes."""
    part = Part(name)
    while len(part.data) < size:
        _receive(source, size - len(part.data), part)
    return part


def _receive(source: socket.socket, most: int, part: Part) -> None:
    while True:
        with contextlib.suppress(TimeoutError):
            data, descriptors, _, _ = socket.recv_fds(source, most, MOST_DESCRIPTORS)
            part.descriptors += descriptors
            part.data += data
            if not data:
                raise EOFError
            return


def _send(sink: socket.socket, part: Part, data: bytes) -> None:
    """These bytes of the part. Its descriptors go with the first of them."""
    while data:
        with contextlib.suppress(TimeoutError):
            sent = socket.send_fds(sink, [data], part.descriptors) if part.descriptors else sink.send(data)
            part.drop_descriptors()
            data = data[sent:]
