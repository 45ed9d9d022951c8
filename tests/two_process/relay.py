"""A relay between the two real processes, on the way of the data connections, that can spoil or delay what it carries.

Payload flows from the prefill side, which connects, to the decode side in a push as in a pull. Each connection begins
with a token and a hello; lane 0 then carries notices, the others chunks: a header, and the payload it announces.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TOKEN_BYTES = 32
HELLO = struct.Struct("<IHHHHIQ")  # magic, protocol, lane, lanes, reserved, reserved, client
CHUNK = struct.Struct("<IIQQQQB7x")  # magic, plan, tag, from, bytes, total, op

Hello = bytes
Tamper = Callable[["Chunk", bytes], Iterator[bytes]]


@dataclass(frozen=True)
class Chunk:
    """What a header says of the payload that follows."""

    plan: int
    tag: int
    start: int  # position in the request's bytes
    bytes: int
    total: int


def untouched(_: Chunk, payload: bytes) -> Iterator[bytes]:
    yield payload


def same(hello: Hello) -> Hello:
    return hello


class Relay:
    """Listens until closed and connects every client on to `port`.

    `tamper` yields what is sent in place of a chunk's payload, and may wait between two pieces; it is called by one
    thread per lane. `client_hello` and `server_hello` see the greetings of both sides. With `mute` everything is taken
    and nothing passed on.
    """

    def __init__(
        self,
        port: int,
        tamper: Tamper = untouched,
        client_hello: Callable[[Hello], Hello] = same,
        server_hello: Callable[[Hello], Hello] = same,
        mute: bool = False,
    ) -> None:
        self._target = port
        self._tamper = tamper
        self._client_hello = client_hello
        self._server_hello = server_hello
        self._mute = mute
        self._sockets: list[socket.socket] = []
        self.connected = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _start(self, action: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=self._quietly, args=(action, *arguments), daemon=True).start()

    @staticmethod
    def _quietly(action: Callable[..., None], *arguments: object) -> None:
        """Either side may go away at any time."""
        with contextlib.suppress(OSError, EOFError):
            action(*arguments)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._sockets.append(client)
            self.connected.set()
            if self._mute:
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._upstream, client, server)
            self._start(self._downstream, server, client)

    def _upstream(self, client: socket.socket, server: socket.socket) -> None:
        try:
            token, hello = _exactly(client, TOKEN_BYTES), _exactly(client, HELLO.size)
            server.sendall(token + self._client_hello(hello))
            if HELLO.unpack(hello)[2] == 0:
                _copy(client, server)
            while True:
                header = _exactly(client, CHUNK.size)
                _, plan, tag, start, size, total, _ = CHUNK.unpack(header)
                payload = _exactly(client, size)
                server.sendall(header)
                for piece in self._tamper(Chunk(plan, tag, start, size, total), payload):
                    server.sendall(piece)
        finally:
            _end(server)

    def _downstream(self, server: socket.socket, client: socket.socket) -> None:
        try:
            client.sendall(self._server_hello(_exactly(server, HELLO.size)))
            _copy(server, client)
        finally:
            _end(client)


def other_protocol(hello: Hello) -> Hello:
    """The hello of a version to come."""
    magic, protocol, *rest = HELLO.unpack(hello)
    return HELLO.pack(magic, protocol + 1, *rest)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while piece := source.recv(1 << 16):
        target.sendall(piece)
    raise EOFError


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
