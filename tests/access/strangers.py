"""Those who have no business at a port, in number; and a gate that holds the data connections of a run meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
SPARE_DESCRIPTORS = 200
"""What a test process needs beside its strangers' sockets."""

TOKEN_BYTES = 32
UCX_FIRST = 0xCAFEBABE12345678.to_bytes(8, "little")
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def long_frame(size: int) -> bytes:
    """The head of a ZMTP command frame that is said to have so many bytes."""
    return b"\x06" + size.to_bytes(8, "big")


def noise(count: int) -> Iterator[bytes]:
    """Random strings, many of which begin like something that one who listens may know."""
    rng = random.Random(4)
    beginnings = (b"", b"", b"\xff", ZMTP_GREETING, ZMTP_GREETING + long_frame(1 << 40), b"GET / HTTP/1.1\r\n\r\n")
    for _ in range(count):
        yield rng.choice(beginnings) + rng.randbytes(rng.randrange(120))


def ucx_frames(count: int) -> Iterator[bytes]:
    """What UCX takes over TCP for messages of its own, as far as their heads go; a worker that reads them may crash."""
    rng = random.Random(4)
    for _ in range(count):
        body = rng.randbytes(rng.randrange(60))
        yield UCX_FIRST + bytes([rng.randrange(32)]) + len(body).to_bytes(4, "little") + body


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Room for so many sockets in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_DESCRIPTORS
    assert hard == resource.RLIM_INFINITY or hard >= wanted, f"this test needs `ulimit -Hn` of {wanted}, it is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


Found = tuple[str, int] | str
"""A TCP port of an address, or the name of an abstract Unix socket."""

Door = int | Found
"""A number alone is a TCP port on loopback."""

CONNECT_S = 20

LISTENS = "0A"
ACCEPTS = 0x10000
"""How /proc/net marks those that connections can be made to: of TCP, and of Unix sockets."""


def doors(pid: int) -> list[Found]:
    """All that a process listens on."""
    held = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(entry.path))
    found: list[Found] = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in _rows(name):
            if row[3] == LISTENS and f"socket:[{row[9]}]" in held:
                address, port = row[1].split(":")
                words = struct.unpack(f"<{len(address) // 8}I", bytes.fromhex(address))
                found.append((socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words)), int(port, 16)))
    for row in _rows("unix"):
        if int(row[3], 16) & ACCEPTS and f"socket:[{row[6]}]" in held:
            assert row[7][0] == "@", f"a socket with a file: {row[7]}"
            found.append(row[7][1:])
    return found


def _rows(name: str) -> list[list[str]]:
    try:
        with open(f"/proc/net/{name}") as file:
            return [line.split() for line in file.readlines()[1:]]
    except FileNotFoundError:  # a kernel without that family
        return []


def connect(door: Door) -> socket.socket:
    """Waits where the listener's backlog is full."""
    if not isinstance(door, str):
        return socket.create_connection((LOOPBACK, door) if isinstance(door, int) else door, timeout=CONNECT_S)
    one = socket.socket(socket.AF_UNIX)
    try:
        # Not settimeout(): a Unix socket that does not block refuses at once where it would have to wait.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_S, 0))
        one.connect("\0" + door)
        one.settimeout(CONNECT_S)
    except BaseException:
        one.close()
        raise
    return one


class Crowd:
    """Connections to one door that stay until the server drops them."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._drop(key.fileobj)
        self._selector.close()

    def __len__(self) -> int:
        """Connections that the server has not dropped yet."""
        for key, _ in self._selector.select(0):
            self._read(key.fileobj)
        return len(self._selector.get_map())

    def join(self, count: int, says: bytes = b"") -> None:
        """So many more."""
        for _ in range(count):
            one = connect(self._door)
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.send(says)
            self._selector.register(one, selectors.EVENT_READ)

    def say(self, data: bytes) -> None:
        """Each of them."""
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.send(data)  # type: ignore[union-attr]

    def say_slowly(self, data: bytes, seconds: float) -> None:
        """A byte per second, until the server has dropped every one of them, which it has to within so many seconds."""
        began = time.monotonic()
        for at in range(len(data)):
            self.say(data[at : at + 1])
            if not len(self):
                return
            assert time.monotonic() - began < seconds, f"{len(self)} slow ones are still connected"
            time.sleep(1)

    def wait_until_dropped(self, seconds: float, left: int = 0) -> None:
        give_up_at = time.monotonic() + seconds
        while len(self) > left:
            assert time.monotonic() < give_up_at, f"{len(self)} strangers are still connected after {seconds} s"
            time.sleep(0.02)

    def _read(self, one: socket.socket) -> None:
        """What a server greets with is of no interest; its end of the connection is."""
        try:
            while one.recv(4096):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        one.close()


def knock(door: Door, says: bytes) -> bool:
    """One connection that says something, and reads until the server has dropped it. False: it could not connect."""
    try:
        with connect(door) as one:
            one.sendall(says)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    except OSError as error:
        return error.errno not in (errno.ECONNREFUSED, errno.ETIMEDOUT)
    return True


def throw(door: Found, says: bytes) -> socket.socket:
    """A connection that says something, whether or not anybody takes it. The door has to be there."""
    if isinstance(door, str):
        family, address = socket.AF_UNIX, "\0" + door
    else:
        family, address = socket.AF_INET6 if ":" in door[0] else socket.AF_INET, door
    one = socket.socket(family)
    one.setblocking(False)
    code = one.connect_ex(address)
    assert code != errno.ECONNREFUSED, f"nobody listens at {door!r} any more"
    with contextlib.suppress(OSError):
        one.send(says)
    return one


class Gate:
    """On the way of a run's data connections: passes on to `port` from the address `source`, once it is open.

    With `greets` it lets connections through at once, and so many bytes of what the server says first on each: what
    follows waits until it is open, and sets `held`.

    `arrived` is set when the run's first data connection waits at the gate: its server is accepting by then. `tokens`
    are what the connections began with, `passed` is about how many bytes they have carried.
    """

    def __init__(self, port: int, source: str = LOOPBACK, *, is_open: bool = False, greets: int | None = None) -> None:
        self._target = (LOOPBACK, port)
        self._source = source
        self._greets = greets
        self.held = threading.Event()
        self._open = threading.Event()
        if is_open:
            self._open.set()
        self._sockets: list[socket.socket] = []
        self.arrived = threading.Event()
        self.tokens: list[bytes] = []
        self.passed = 0
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self._open.set()

    def first_token(self) -> bytes:
        """What the first connection says, read while it waits here."""
        return self._sockets[0].recv(TOKEN_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                self.arrived.set()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        if self._greets is None:
            self._open.wait()
        with contextlib.suppress(OSError):
            token = client.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            self.tokens.append(token)
            server = socket.create_connection(self._target, source_address=(self._source, 0))
            self._sockets.append(server)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.sendall(token)
            threading.Thread(target=self._copy, args=(server, client, self._greets), daemon=True).start()
            self._copy(client, server)

    def _copy(self, source: socket.socket, target: socket.socket, free: int | None = None) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(free or 1 << 16):
                if free == 0:
                    self.held.set()
                    self._open.wait()
                    free = None
                elif free is not None:
                    free -= len(piece)
                target.sendall(piece)
                self.passed += len(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
