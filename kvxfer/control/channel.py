"""The two ends of the control channel: ZeroMQ sockets, encrypted and authenticated by CURVE wherever they leave this
host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from kvxfer import __version__
from kvxfer.control.keys import KeyPair
from kvxfer.control.messages import (
    FromServer,
    Message,
    decode_from_server,
    encode,
)
from kvxfer.errors import PeerLostError, UnavailableError, UsageError

MAX_MESSAGE_BYTES = 64 << 20
CONNECT_S = 5.0
"""How long a client waits for the first answer."""


def is_loopback(host: str) -> bool:
    """Whether packets to that address never leave this host; names other than localhost count as leaving."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_host_port(text: str, option: str) -> tuple[str, int]:
    """host:port, an IPv6 host in brackets."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isascii() or not port.isdigit():
        raise UsageError(f"{option} '{text}': give host:port, such as 10.0.0.2:7420 or [fd00::2]:7420")
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"{option} '{text}': a port is a number from 1 to 65535")
    return host, int(port)


@contextlib.contextmanager
def server_socket(endpoint: str, keys: KeyPair | None, allowed: frozenset[str]) -> Iterator[zmq.Socket[bytes]]:
    """A bound ROUTER socket that admits only clients with an allowed public key (anyone when keys is None)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = None
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)  # a connection that does not finish the handshake is dropped
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        if keys is not None:
            authenticator = ThreadAuthenticator(context)
            authenticator.start()
            authenticator.configure_curve_callback("*", credentials_provider=_Allowed(allowed))
            socket.curve_server = True
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise UnavailableError(
                f"cannot listen on {endpoint.removeprefix('tcp://')}: {error.strerror}; choose another --bind or --port"
            ) from error
        yield socket
    finally:
        socket.close()
        if authenticator is not None:
            authenticator.stop()
        context.term()


@dataclass(frozen=True)
class _Allowed:
    keys: frozenset[str]

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with that Z85-encoded public key may come in."""
        return key.decode() in self.keys


class Client:
    """The coordinator's end: one server, messages in order."""

    def __init__(self, endpoint: str, keys: KeyPair | None, server_key: str | None) -> None:
        self.name = endpoint.removeprefix("tcp://")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        if keys is not None and server_key is not None:
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
            self.socket.curve_serverkey = server_key.encode()
        self._encrypted = keys is not None
        self._monitor = self.socket.get_monitor_socket()
        self._events: set[int] = set()
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot connect to {self.name}: {error.strerror}") from error

    def send(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):  # a full queue means a dead peer, which its silence will tell
            self.socket.send(encode(message), zmq.DONTWAIT)

    def receive(self, timeout_s: float) -> FromServer | None:
        """The next message, None when none came. Raises PeerLostError on a malformed one."""
        if not self.socket.poll(max(0, round(timeout_s * 1000))):
            return None
        try:
            return decode_from_server(self.socket.recv())
        except msgspec.DecodeError as error:
            raise PeerLostError(f"{self.name} sent a malformed message: {error}") from error

    def first_answer(self, hello: Message) -> FromServer:
        """Say hello and wait for the answer. Raises PeerLostError that says how far the connection came.

        An answer that makes no sense here is most likely that of another version, and so a UsageError.
        """
        self.send(hello)
        give_up_at = time.monotonic() + CONNECT_S
        while (left := give_up_at - time.monotonic()) > 0:
            if self.socket.poll(round(min(left, 0.1) * 1000)):
                return self._first(self.socket.recv())
            self._note_events()
            if zmq.EVENT_HANDSHAKE_FAILED_AUTH in self._events:
                break
        raise PeerLostError(self._why_silent())

    def _first(self, data: bytes) -> FromServer:
        try:
            return decode_from_server(data)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self.name} gave an answer that kvxfer {__version__} does not understand ({error}); install the same "
                "version on both hosts"
            ) from error

    def _note_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._events.add(int(event["event"]))

    def _why_silent(self) -> str:
        if zmq.EVENT_CONNECTED not in self._events:
            return f"cannot reach {self.name}: nothing accepts connections there; is `kvxfer serve --bind` running?"
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in self._events:
            return f"{self.name} refused our key: have its operator put our public key into its --allow directory"
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in self._events:
            return f"{self.name} accepted the connection but did not answer within {CONNECT_S:.0f} s"
        wanted = "with another key than --server-key" if self._encrypted else "that wants keys (--key, --server-key)"
        return f"{self.name} is not a kvxfer serve we can talk to: perhaps one {wanted}, or another program"

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()
