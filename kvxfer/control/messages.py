"""The messages of the control channel: msgpack-encoded, typed, one union per direction.

A run has a coordinator (the `bench` process), and two workers, one per side. The coordinator starts the prefill
worker itself and asks a `serve` process to start the decode worker; serve passes commands and answers on unread. A
command is answered by exactly one `Answer` or `Failed` with the same `seq`. Integers are bytes and nanoseconds.
Nothing in a message is a path, a program or code.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from kvxfer.model.widths import Widths

PROTOCOL = 1
"""Raised when a message changes so that an older side would misread it; both sides must have the same."""

HEARTBEAT_S = 0.5
"""Every process of a run says at least this often that it lives."""

MAX_PAIRS = 16
"""Workers of one run at a time: one for each backend that is compared side by side."""

LOCAL_ENDPOINT = "unix:"
"""How the endpoint of a backend begins whose two sides run on one host: its name is good there and nowhere else."""

SILENCE_S = 3.0
"""A process from which nothing was heard for so long is taken for dead."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of all messages; the msgpack map carries the class name under `type`."""


class HostInfo(msgspec.Struct, frozen=True):
    """What a result says about a host."""

    hostname: str
    kernel: str
    cpu_model: str
    cpus: int
    memory_bytes: int
    llc_bytes: int  # last-level cache, 0 when unknown
    boot_id: str  # equal on both sides: the same running kernel
    netns: str  # equal too: the same network stack
    python: str
    load_average: float = 0.0  # over one minute, at the start
    kvxfer_version: str = ""
    uid: int | None = None  # of the user under whom the process runs


# --- what a worker is told, and what it answers ---


class Open(Message, frozen=True):
    """Phases library and context: load the backend and open a context. Answered by Opened."""

    backend: str
    token: bytes  # 32 bytes; a data connection must begin with them
    options: dict[str, int]
    address: str  # local address of the data listener (listening side)
    port: int  # 0: any


class Opened(Message, frozen=True):
    library_path: str
    library_version: str
    endpoint: str  # where the listening side accepts data connections: host:port or unix:@name, "" when it does not
    needs_arm: bool
    moves_data: bool
    max_inflight: int
    library_ns: int = 0  # how much of the phase went into loading code
    warning: str = ""  # what nobody should overlook about the library


SliceNumbers = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The fields of a kvxfer.cache.layout.Slice, in order."""


class Allocate(Message, frozen=True):
    """Phase allocate: one pool with regions of so many bytes; what goes from the one side's to the other's.

    `legs` hold the slices of every rank pair; each pair is a peer of its own. Answered by Done.
    """

    prefill_regions: list[int]
    decode_regions: list[int]
    legs: list[list[SliceNumbers]]


class Register(Message, frozen=True):
    """Phase register: every region of the pool. Answered by Done."""


class Connect(Message, frozen=True):
    """Phase connect: prefill connects to `endpoint` once per leg, decode ("") accepts. Answered by Done."""

    endpoint: str
    timeout_ns: int


class ExportKeys(Message, frozen=True):
    """Phase exchange, first half. Answered by Keys."""


class ImportKeys(Message, frozen=True):
    """Phase exchange, second half: the keys of the other side, for every peer. Answered by Done."""

    keys: bytes


class Keys(Message, frozen=True):
    keys: bytes


class Prepare(Message, frozen=True):
    """Phase prepare: transfer plans of more requests, from both sides' block tables.

    `blocks` are a request's in each group of layers; the tables of a group hold uint32 little-endian block numbers,
    request after request. With `bulk`, instead one descriptor per leg of as many bytes as it moves. `chunks` holds, for
    each chunk of the prompt, how many blocks of each group there are at its end (none: one chunk); plans that are cut
    into other chunks are another `plan_set`. Answered by Prepared.
    """

    blocks: list[int]
    tables_prefill: list[bytes]
    tables_decode: list[bytes]
    timeout_ns: int
    bulk: bool = False
    chunks: list[list[int]] = []
    plan_set: int = 0


class Prepared(Message, frozen=True):
    descriptors: list[int]  # per request of this command, all legs together
    bytes_per_request: int


class Fill(Message, frozen=True):
    """Write the pattern into the whole pool (prefill side), or the poison (decode side). Answered by Done."""

    seed: int
    poison: bool


class Verify(Message, frozen=True):
    """Compare a request on the decode side with the pattern, every `every`-th block of it. Answered by Verified."""

    seed: int
    request: int
    epoch: int
    every: int  # 1: every block, n: every n-th
    plan_set: int = 0  # that the request is of


class Verified(Message, frozen=True):
    bytes_checked: int
    wrong_words: int
    where: str  # the first wrong place, "" when there is none


class Run(Message, frozen=True):
    """Move `count` requests with epochs first_epoch… (request = epoch modulo the number of plans). Answered by Ran."""

    op: Literal["push", "pull"]
    first_epoch: int
    count: int
    inflight: int
    check: bool  # stamp and check an epoch word in every block of every region
    bulk: bool
    stall_ns: int  # give up when nothing moves for so long
    seed: int = 0


class Ran(Message, frozen=True):
    """Samples as int64 little-endian; transfer and post are the initiator's, hand-over is the prefill side's."""

    transfer_ns: bytes
    post_ns: bytes
    handover_ns: bytes
    wall_ns: int
    wrong_epochs: int
    cpu_ns: int  # user + system time of this worker, stamping and checking included
    checking_cpu_ns: int  # of that, what stamping and checking took
    elapsed_ns: int  # of the whole loop; what the CPU times were counted over
    other_cpu_ns: int  # what the rest of this host used meanwhile (the peer's worker included when it runs here)
    steal_ns: int


class BuildLayers(Message, frozen=True):
    """Build layers for prompts of so many tokens, and time them. Answered by LayersBuilt.

    Those of the first share that there is memory for: each is one layer of each kind.
    """

    shares: list[list[Widths]]
    tokens: int


class LayersBuilt(Message, frozen=True):
    share: int  # which was built
    samples_ns: list[list[int]]  # of each kind of layer over the whole prompt
    peak_flop_s: float
    how: str
    on_gpu: bool


class Pipeline(Message, frozen=True):
    """Move `count` requests of a plan set whose segments leave as they are computed. Answered by Pipelined.

    Every chunk of the prompt has a layer take its `layer_ns`, one layer after another, chunk after chunk; or with
    `layers` what the layers that were built take for its `chunk_tokens`, those of the kinds in `order`.
    """

    plan_set: int
    op: Literal["push", "pull"]
    first_epoch: int
    count: int
    layers: int
    layers_per_send: int
    sends: Literal["all", "first", "none"]  # first: one send alone; none: compute alone
    compute: Literal["timed", "spin", "layers"]
    layer_ns: list[int]  # of each chunk
    chunk_tokens: list[int]
    order: list[int]  # of each layer, with `layers`
    check: bool
    stall_ns: int  # give up when nothing moves and nothing is computed for so long
    seed: int = 0


class Pipelined(Message, frozen=True):
    """Times as int64 little-endian from the start of each request's compute; empty on the decode side."""

    total_ns: bytes  # per request: to the end of compute, or to all of it usable
    compute_ns: bytes
    ready_ns: bytes  # per request and send
    usable_ns: bytes
    ready_after: list[int]  # of each send: layers computed, those of earlier chunks included
    sizes: list[int]  # of each send: bytes
    wrong_epochs: int
    cpu_ns: int  # user + system time of this worker


class Copy(Message, frozen=True):
    """The memcpy reference: one thread copies the pieces of request 0 within host memory. Answered by Copied."""

    max_bytes: int
    max_ns: int


class Copied(Message, frozen=True):
    bytes_copied: int
    descriptors: int
    samples_ns: bytes


class Describe(Message, frozen=True):
    """Ask what carried the bytes. Answered by Described."""


class Described(Message, frozen=True):
    lanes: list[str]  # one transport per lane, e.g. "tcp/lo"
    details: dict[str, str] = {}  # settings that the backend found, choices that it made


class Ping(Message, frozen=True):
    """Answered by Done; the coordinator times it."""


class Done(Message, frozen=True):
    pass


WorkerCommand = (
    Open
    | Allocate
    | Register
    | Connect
    | ExportKeys
    | ImportKeys
    | Prepare
    | Fill
    | Verify
    | Run
    | BuildLayers
    | Pipeline
    | Copy
    | Describe
    | Ping
)
WorkerAnswer = Opened | Done | Keys | Prepared | Verified | Ran | LayersBuilt | Pipelined | Copied | Described


class Command(Message, frozen=True):
    """`seq` is unique in a run; `pair` says which of the run's workers is meant."""

    seq: int
    body: WorkerCommand
    pair: int = 0


class Answer(Message, frozen=True):
    seq: int
    body: WorkerAnswer


class Failed(Message, frozen=True):
    """The command (or, with seq 0, the worker or the whole run) failed; `status` is the exit status it deserves."""

    seq: int
    status: int
    message: str


class Heartbeat(Message, frozen=True):
    pass


# --- what the coordinator and serve say to each other beside that ---


class Hello(Message, frozen=True):
    """The first message of a client. Answered by Welcome or Failed, and by Heartbeat while it has to wait for that."""

    protocol: int
    version: str


class Welcome(Message, frozen=True):
    protocol: int
    version: str
    host: HostInfo
    usable_bytes: int  # memory that pools may take there
    backends: list[str]
    data_address: str  # where its workers listen for data connections
    max_pool_bytes: int | None = None  # the largest pool that its operator allows


class Launch(Message, frozen=True):
    """Start a fresh worker (ending an earlier one of this number). Answered by Launched or Failed."""

    pair: int = 0


class Launched(Message, frozen=True):
    pass


class Dismiss(Message, frozen=True):
    """End the worker of this number. Answered by Dismissed when it is gone."""

    pair: int = 0


class Dismissed(Message, frozen=True):
    pass


class Bye(Message, frozen=True):
    """The client is done; serve is free for the next one. Not answered."""


ToWorker = Command
FromWorker = Answer | Failed | Heartbeat
ToServer = Hello | Launch | Command | Dismiss | Heartbeat | Bye
FromServer = Welcome | Launched | Answer | Failed | Dismissed | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises msgspec.DecodeError (or ValidationError, its subclass) on anything else."""
    return _decode(_to_worker, data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises msgspec.DecodeError on anything else."""
    return _decode(_from_worker, data)


def decode_to_server(data: bytes) -> ToServer:
    """Raises msgspec.DecodeError on anything else."""
    return _decode(_to_server, data)


def decode_from_server(data: bytes) -> FromServer:
    """Raises msgspec.DecodeError on anything else."""
    return _decode(_from_server, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("the message nests too deeply") from error
