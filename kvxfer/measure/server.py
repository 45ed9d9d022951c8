"""What `kvxfer serve` does: start a worker for one client at a time, and pass commands and answers on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from kvxfer import __version__
from kvxfer.control import messages as m
from kvxfer.errors import ExitStatus
from kvxfer.measure.host import host_info, usable_bytes
from kvxfer.measure.process import WorkerProcess

POLL_MS = 100

MESSAGES_AT_ONCE = 256
"""Messages taken before workers and heartbeats get their turn: nobody may keep the server busy by talking."""


WORKER_ROOM_BYTES = 4 << 30
"""What a worker may use beside its pool, where the operator bounds that: code, thread stacks, plans, samples."""


@dataclass(frozen=True)
class Settings:
    """What the operator of a server decides."""

    data_address: str  # where workers listen for data connections
    data_port: int = 0  # 0: any free one; else of the first worker, the next ones use the ports that follow
    advertise: str = ""  # host:port that clients connect to instead, counted on in the same way
    max_bytes: int | None = None  # the largest pool a client may ask for
    owner_fd: int | None = None  # end when this descriptor is closed at the other end


class Server:
    """One client at a time; others are told to come later. Survives whatever a client or worker does."""

    def __init__(self, socket: zmq.Socket[bytes], settings: Settings, say: Callable[[str], None]) -> None:
        self._socket = socket
        self._settings = settings
        self._say = say
        self._client: bytes | None = None
        self._client_gone = False  # its connection is closed
        self._heard_at = 0.0
        self._told_at = 0.0  # our client
        self._others_told_at = 0.0
        self._set_aside: deque[tuple[bytes, bytes]] = deque()  # what came while a worker's memory was freed
        self._workers: dict[int, WorkerProcess] = {}
        self._with_pool: set[int] = set()  # workers that were told to allocate
        self._opening: set[int] = set()  # seqs of Open commands, whose answers hold an endpoint
        self._backends = _backends()  # at once: too little memory to load them is no first client's doing

    def run(self) -> None:
        """Until interrupted, or until the owner is gone. Ends the worker and tells the client in any case."""
        try:
            while not self._owner_gone():
                self._wait()
                self._take_messages()
                self._pass_on()
                self._watch_client()
        finally:
            if self._client is not None:
                self._tell(m.Failed(0, ExitStatus.PEER_LOST, "the server was stopped"))
            self._end_workers()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for worker in self._workers.values():
            poller.register(worker.fileno(), zmq.POLLIN)
        if self._settings.owner_fd is not None:
            poller.register(self._settings.owner_fd, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _owner_gone(self) -> bool:
        fd = self._settings.owner_fd
        return fd is not None and bool(zmq.zmq_poll([(fd, zmq.POLLIN)], 0))  # nothing is ever written there

    # --- from the client

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if self._set_aside:
                self._take(*self._set_aside.popleft())
            elif self._socket.poll(0):
                self._take(*self._receive())
            else:
                return

    def _receive(self) -> tuple[bytes, bytes]:
        """Who sent a message, and its first frame."""
        client, data, *_ = [*self._socket.recv_multipart(), b""]
        return client, data

    def _take(self, client: bytes, data: bytes) -> None:
        try:
            message = m.decode_to_server(data)
        except msgspec.DecodeError as error:
            if client == self._client:
                self._tell(m.Failed(0, ExitStatus.USAGE, f"malformed message: {error}"))
                self._part("sent a malformed message")
            return
        if isinstance(message, m.Hello):
            self._greet(client, message)
        elif client == self._client:
            self._heard_at = time.monotonic()
            self._obey(message)

    def _greet(self, client: bytes, hello: m.Hello) -> None:
        refusal = self._refusal(client, hello)
        if refusal is not None:
            self._tell(refusal, client)
            return
        try:
            welcome = self._welcome()
        except OSError as error:  # strangers may hold every descriptor, until their handshakes time out
            refusal = m.Failed(0, ExitStatus.UNAVAILABLE, f"the server cannot serve now: {error.strerror}; try again")
            self._tell(refusal, client)
            return
        self._client = client
        self._heard_at = time.monotonic()
        self._say("a run begins")
        self._tell(welcome)

    def _welcome(self) -> m.Welcome:
        return m.Welcome(
            protocol=m.PROTOCOL,
            version=__version__,
            host=host_info(),
            usable_bytes=usable_bytes(),
            backends=self._backends,
            data_address=self._settings.data_address,
            max_pool_bytes=self._settings.max_bytes,
        )

    def _refusal(self, client: bytes, hello: m.Hello) -> m.Failed | None:
        if hello.protocol != m.PROTOCOL:
            return m.Failed(
                0,
                ExitStatus.USAGE,
                f"the server is kvxfer {__version__} (control protocol {m.PROTOCOL}), this is {hello.version} "
                f"(protocol {hello.protocol}); install the same version on both hosts",
            )
        if self._client not in (None, client):
            return m.Failed(0, ExitStatus.UNAVAILABLE, "the server is busy with another run; try again when it is over")
        return None

    def _obey(self, message: m.ToServer) -> None:
        if isinstance(message, m.Launch):
            self._launch(message.pair)
        elif isinstance(message, m.Command):
            self._command(message)
        elif isinstance(message, m.Dismiss):
            self._end_worker(message.pair)
            self._tell(m.Dismissed())
        elif isinstance(message, m.Bye):
            self._part("is done")

    def _launch(self, pair: int) -> None:
        self._end_worker(pair)
        if not 0 <= pair < m.MAX_PAIRS:
            self._tell(m.Failed(0, ExitStatus.UNAVAILABLE, f"a run has at most {m.MAX_PAIRS} workers at a time"))
            return
        try:
            self._workers[pair] = worker = WorkerProcess("decode")
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "not enough memory"
            self._tell(m.Failed(0, ExitStatus.UNAVAILABLE, f"the server cannot start a worker: {why}"))
            return
        if self._settings.max_bytes is not None:  # whatever a client asks for, by whatever command
            worker.limit_memory(self._settings.max_bytes + WORKER_ROOM_BYTES)
        self._tell(m.Launched())

    def _command(self, command: m.Command) -> None:
        body = command.body
        worker = self._workers.get(command.pair)
        if worker is None:
            self._tell(m.Failed(command.seq, ExitStatus.USAGE, "a command before a worker was launched"))
            return
        if isinstance(body, m.Allocate):
            if refusal := self._too_large(body):
                self._tell(m.Failed(command.seq, ExitStatus.UNAVAILABLE, refusal))
                return
            if command.pair in self._with_pool:
                self._tell(m.Failed(command.seq, ExitStatus.USAGE, "a worker has one pool, and this one has it"))
                return
            self._with_pool.add(command.pair)
        if isinstance(body, m.Open):
            self._opening.add(command.seq)
            port = self._settings.data_port and self._settings.data_port + command.pair
            body = msgspec.structs.replace(body, address=self._settings.data_address, port=port)
            command = m.Command(command.seq, body, command.pair)
        elif isinstance(body, m.Connect):  # our side accepts; a client cannot send it anywhere
            command = m.Command(command.seq, msgspec.structs.replace(body, endpoint=""), command.pair)
        worker.send(command)

    def _too_large(self, body: m.Allocate) -> str:
        wanted = sum(body.decode_regions)
        limit = self._settings.max_bytes
        if limit is not None and wanted > limit:
            return f"the server allows {limit / 2**30:.3g} GiB (--max-gib), the pool would take {wanted / 2**30:.3g}"
        return ""

    # --- from the worker

    def _pass_on(self) -> None:
        for pair, worker in list(self._workers.items()):
            for message in worker.receive():
                if isinstance(message, m.Answer) and message.seq in self._opening:
                    self._opening.discard(message.seq)
                    message = self._with_endpoint(message, pair)
                self._tell(message)
                if isinstance(message, m.Failed) and message.seq == 0:
                    self._end_worker(pair)
                    break

    def _with_endpoint(self, answer: m.Answer, pair: int) -> m.Answer:
        body, advertise = answer.body, self._settings.advertise
        if advertise and isinstance(body, m.Opened) and not body.endpoint.startswith(m.LOCAL_ENDPOINT):
            host, _, port = advertise.rpartition(":")
            return m.Answer(answer.seq, msgspec.structs.replace(body, endpoint=f"{host}:{int(port) + pair}"))
        return answer

    # --- both

    def _watch_client(self) -> None:
        if self._client is None:
            return
        now = time.monotonic()
        if self._client_gone:
            self._part("closed its connection")
        elif now - self._heard_at > m.SILENCE_S:
            self._part(f"was not heard for {m.SILENCE_S:.0f} s")
        else:
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Send the client a heartbeat if one is due."""
        if self._client is not None and time.monotonic() - self._told_at > m.HEARTBEAT_S:
            self._tell(m.Heartbeat())

    def _while_memory_is_freed(self) -> None:
        """What our client says waits, and so does who comes when it has gone; others are told as ever that we are busy.

        Those who wait hear that we are there, or they would give us up.
        """
        self._keep_alive()
        while len(self._set_aside) < MESSAGES_AT_ONCE and self._socket.poll(0):
            client, data = self._receive()
            if self._client in (None, client):
                self._set_aside.append((client, data))
            else:
                self._take(client, data)
        if self._client is None and time.monotonic() - self._others_told_at > m.HEARTBEAT_S:
            self._others_told_at = time.monotonic()
            for client in {client for client, _ in self._set_aside}:
                self._tell(m.Heartbeat(), client)

    def _part(self, why: str) -> None:
        self._client, self._client_gone = None, False
        self._end_workers()
        self._say(f"the run is over: the client {why}")

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.kill()  # all at once: each takes its time to free its memory
        for pair in list(self._workers):
            self._end_worker(pair)
        self._opening.clear()

    def _end_worker(self, pair: int) -> None:
        self._with_pool.discard(pair)
        if (worker := self._workers.pop(pair, None)) is not None:
            began = time.monotonic()
            worker.end(self._while_memory_is_freed)
            self._heard_at += time.monotonic() - began  # nobody was listened to meanwhile

    def _tell(self, message: m.Message, client: bytes | None = None) -> None:
        to = client or self._client or b""
        if to == self._client:
            self._told_at = time.monotonic()
        try:
            self._socket.send_multipart([to, m.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:  # gone; or not reading, and then its silence will end the run
            if error.errno == zmq.EHOSTUNREACH and to == self._client:
                self._client_gone = True


def _backends() -> list[str]:
    from kvxfer import _native

    return [name for name, _ in _native.backends() if _native.present(name)]
