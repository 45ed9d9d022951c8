"""The two ends of the control channel: ZeroMQ sockets, encrypted and authenticated by CURVE wherever they leave this
host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import threading
import time
from collections import Counter
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
    Heartbeat,
    Message,
    decode_from_server,
    encode,
)
from kvxfer.errors import PeerLostError, UnavailableError, UsageError

MAX_MESSAGE_BYTES = 64 << 20
ZMQ_THREADS = 4
ZMQ_DESCRIPTORS = 16
"""More than a context takes with a socket, its monitor and a connection."""

CONNECT_S = 5.0
"""How long a client waits for the first answer, and a thread for a name server."""

FREEING_S = 120.0
"""And how long while the server frees the memory of the run before, which goes at some GiB per second."""

HANDSHAKE_S = 5.0
"""A server drops a connection that has not finished the handshake by then, however slowly it goes on talking."""

BACKLOG = 1024
"""Connections that may wait to be accepted (the kernel takes the smaller of this and net.core.somaxconn)."""

BROKEN_HANDSHAKES = 3
"""So many handshakes in a row that the server broke off are no accident."""


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


def numeric(host: str) -> str:
    """A host's address as a number, IPv4 before IPv6, which stays in brackets.

    Raises PeerLostError when it has none, or when no name server answers within CONNECT_S: the C library waits longer
    than that, and cannot be told to stop, so a thread is left to it.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return host
    answers: queue.Queue[str | OSError | UnicodeError] = queue.Queue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
            answers.put(str(address[0]) if family == socket.AF_INET else f"[{address[0]}]")
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=CONNECT_S)
    except queue.Empty:
        raise PeerLostError(f"cannot resolve '{host}': no name server answers in time; give a number") from None
    if not isinstance(answer, str):
        why = answer.strerror if isinstance(answer, OSError) else "that is no name"
        raise PeerLostError(f"cannot resolve '{host}': {why}") from answer
    return answer


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """libzmq ends the process when it gets no thread or descriptor, so whether there are any is tried before.

    Raises RuntimeError when there is no thread, OSError when there is no descriptor.
    """
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(ZMQ_THREADS)]
    started: list[threading.Thread] = []
    with contextlib.ExitStack() as stack:
        for _ in range(ZMQ_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
        finally:
            done.set()
            for thread in started:
                thread.join()
    return zmq.Context()


@contextlib.contextmanager
def server_socket(endpoint: str, keys: KeyPair | None, allowed: frozenset[str]) -> Iterator[zmq.Socket[bytes]]:
    """A bound ROUTER socket that admits only clients with an allowed public key (anyone when keys is None)."""
    context = _context()
    authenticator = None
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.LINGER, 600)  # for the last word to clients, on a host that is busy too
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a client whose connection is gone is an error
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
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
        if endpoint.startswith("tcp://"):
            host, _, port = self.name.rpartition(":")
            endpoint = f"tcp://{numeric(host)}:{port}"  # ZeroMQ would wait for a name server however long that takes
        self._context = _context()
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
        self._events: Counter[zmq.Event] = Counter()
        self._mismatch = False  # the server speaks, but with another security mechanism
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
        """Say hello and wait for the answer; a server that is freeing memory for us says so by heartbeats.

        Raises UsageError where the two keys do not fit each other, which both sides notice at once, and PeerLostError
        that says how far the connection came. An answer that makes no sense here is most likely that of another
        version, and so a UsageError.
        """
        self.send(hello)
        began = time.monotonic()
        give_up_at = began + CONNECT_S
        while (left := give_up_at - time.monotonic()) > 0:
            if self.socket.poll(round(min(left, 0.1) * 1000)):
                self._note_events()
                del self._events[zmq.Event.DISCONNECTED]  # of an attempt before this one
                answer = self._first(self.socket.recv())
                if not isinstance(answer, Heartbeat):
                    return answer
                give_up_at = min(time.monotonic() + CONNECT_S, began + FREEING_S)
            self._note_events()
            if refusal := self._refusal():
                raise UsageError(refusal)
        raise PeerLostError(self._why_silent())

    def _first(self, data: bytes) -> FromServer:
        try:
            return decode_from_server(data)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self.name} gave an answer that kvxfer {__version__} does not understand ({error}); install the same "
                "version on both hosts"
            ) from error

    def lost(self) -> bool:
        """Whether the connection is gone since the first answer; it stays so, as the server knows us by it alone."""
        self._note_events()
        return self._events[zmq.Event.DISCONNECTED] > 0

    def _note_events(self) -> None:
        while self._monitor.poll(0):
            told = parse_monitor_message(self._monitor.recv_multipart())
            self._events[zmq.Event(told["event"])] += 1
            if told["event"] == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._mismatch |= told["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

    def _refusal(self) -> str:
        """Why the handshake fails and will go on to fail; nothing while it may still succeed."""
        if self._events[zmq.Event.HANDSHAKE_FAILED_AUTH]:
            return f"{self.name} refused our key: have its operator put our public key into its --allow directory"
        broken = self._events[zmq.Event.HANDSHAKE_FAILED_NO_DETAIL] >= BROKEN_HANDSHAKES
        if self._encrypted and self._mismatch:
            return f"{self.name} is a server without keys: leave out --key and --server-key, or start it with keys"
        if self._encrypted and broken:
            return (
                f"{self.name} broke the handshake off: it has another key than --server-key or none, or is no kvxfer "
                "serve; get the .key file of that server, or start it with keys"
            )
        if self._mismatch or broken:
            return (
                f"{self.name} broke the handshake off: it is a server that wants keys (--key, --server-key), or no "
                "kvxfer serve"
            )
        return ""

    def _why_silent(self) -> str:
        if not self._events[zmq.Event.CONNECTED]:
            return f"cannot reach {self.name}: nothing accepts connections there; is `kvxfer serve --bind` running?"
        if self._events[zmq.Event.HANDSHAKE_SUCCEEDED]:
            return f"{self.name} accepted the connection but did not answer within {CONNECT_S:.0f} s"
        return f"{self.name} is not a kvxfer serve we can talk to: what listens there said nothing that it would say"

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()
