"""The process that holds one side's pool and moves its blocks: python -m kvxfer.measure.worker FD SIDE.

It obeys commands from the process that started it, over an inherited socket, until that is closed. It is started
fresh for every pair, so that setup is measured from nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvxfer.cache.layout import Slice
from kvxfer.cache.plan import Offsets, TransferPlan, transfer_plan
from kvxfer.cache.sends import sends
from kvxfer.cache.tables import Table
from kvxfer.control import messages as m
from kvxfer.control.pipe import Pipe, PipeClosedError
from kvxfer.errors import ExitStatus, KvxferError, UsageError, is_short_of_memory
from kvxfer.measure.host import CpuMeter, usable_bytes
from kvxfer.measure.layers import Layers
from kvxfer.measure.prefill import computing

if TYPE_CHECKING:
    from kvxfer import _native

COPY_MAX_SAMPLES = 20

ONCE = (m.Open, m.Allocate, m.Register, m.Connect)
"""Commands that a worker obeys once; after a failure they may be tried again."""

MOST_UNITS = 1 << 18
"""Layers of compute of a request, those of all its chunks."""

FIRST_REGION = 1
"""Number of the first region of a pool among a context's; 0 is the whole pool."""


class Worker:
    """One side of a pair; a method per command."""

    def __init__(self, side: str) -> None:
        self.prefill = side == "prefill"
        self._actions: dict[type[m.Message], Callable[[Any], m.WorkerAnswer]] = {
            m.Open: self.open,
            m.Allocate: self.allocate,
            m.Register: self.register,
            m.Connect: self.connect,
            m.ExportKeys: self.export_keys,
            m.ImportKeys: self.import_keys,
            m.Prepare: self.prepare,
            m.Fill: self.fill,
            m.Verify: self.verify,
            m.Run: self.run,
            m.BuildLayers: self.build_layers,
            m.Pipeline: self.pipeline,
            m.Copy: self.copy,
            m.Describe: self.describe,
            m.Ping: self.ping,
        }
        self._done: set[type[m.Message]] = set()
        self.kinds = 0  # of layers that were built
        self._bulk: list[_native.LoopRequest] = []
        self._sets: dict[int, PlanSet] = {}

    def do(self, command: m.WorkerCommand) -> m.WorkerAnswer:
        """Raises KvxferError when the command fails, UsageError when it comes too early or again."""
        kind = type(command)
        if kind in self._done:  # what came of it holds addresses of what came of the first
            raise UsageError(f"command {kind.__name__} came again; a worker is set up once")
        try:
            answer = self._actions[kind](command)
        except AttributeError as error:
            raise UsageError(f"command {kind.__name__} came before what it needs: {error}") from error
        if kind in ONCE:
            self._done.add(kind)
        return answer

    # --- setup, phase by phase

    def open(self, command: m.Open) -> m.Opened:
        began = time.monotonic_ns()
        from kvxfer import _native

        self.native = _native
        probe = _native.probe(command.backend)
        library_ns = time.monotonic_ns() - began
        self.context = _native.open_context(command.backend, command.token, command.options)
        endpoint = "" if self.prefill else self.context.listen(command.address, command.port)
        can = self.context.capabilities
        return m.Opened(
            library_path=probe.library_path,
            library_version=probe.library_version,
            endpoint=endpoint,
            needs_arm=can.needs_arm,
            moves_data=can.moves_data,
            max_inflight=can.max_inflight,
            library_ns=library_ns,
            warning=probe.warning,
        )

    def allocate(self, command: m.Allocate) -> m.Done:
        self.legs = [[Slice(*numbers) for numbers in leg] for leg in command.legs]
        self.decode_region_bytes = command.decode_regions
        self._prefill_bytes = sum(command.prefill_regions)
        self._decode_bytes = sum(command.decode_regions)
        self.region_bytes = command.prefill_regions if self.prefill else command.decode_regions
        self.whole = self.context.allocate(sum(self.region_bytes))
        return m.Done()

    def register(self, _: m.Register) -> m.Done:
        extents = [(0, 0)]  # region 0 is the whole pool, for bulk transfers: it has no pattern of its own
        address = self.whole.address
        self.regions = []
        for size in self.region_bytes:
            self.regions.append(self.context.register_memory(address, size))
            extents.append((address, size))
            address += size
        self.pattern = self.native.Regions(extents)
        return m.Done()

    def connect(self, command: m.Connect) -> m.Done:
        self.peers = [
            self.context.connect(command.endpoint, command.timeout_ns)
            if command.endpoint
            else self.context.accept(command.timeout_ns)
            for _ in self.legs
        ]
        return m.Done()

    def export_keys(self, _: m.ExportKeys) -> m.Keys:
        return m.Keys(self.context.export_keys([self.whole, *self.regions]))

    def import_keys(self, command: m.ImportKeys) -> m.Done:
        for peer in self.peers:
            peer.import_keys(command.keys)
        return m.Done()

    def prepare(self, command: m.Prepare) -> m.Prepared:
        if command.bulk:
            return self._prepare_bulk(command.timeout_ns)
        prefill = [_tables(raw, blocks) for raw, blocks in zip(command.tables_prefill, command.blocks, strict=True)]
        decode = [_tables(raw, blocks) for raw, blocks in zip(command.tables_decode, command.blocks, strict=True)]
        descriptors, size = [], 0
        plans = self._sets.setdefault(command.plan_set, PlanSet())
        for number in range(len(prefill[0])):
            ours, theirs = ([table[number] for table in tables] for tables in (prefill, decode))
            placed = [Placed(slices, ours, theirs, command.chunks) for slices in self.legs]
            legs = [self._leg(peer, one.plan, command.timeout_ns) for peer, one in zip(self.peers, placed, strict=True)]
            plans.requests.append(self.native.LoopRequest(legs))
            plans.legs.append(legs)
            plans.placed.append(placed)
            descriptors.append(sum(one.plan.descriptors for one in placed))
            size = sum(one.plan.bytes for one in placed)
        return m.Prepared(descriptors, size)

    def _leg(self, peer: _native.Peer, plan: TransferPlan, timeout_ns: int) -> _native.Leg:
        first = np.uint32(FIRST_REGION)
        prefill = plan.prefill_regions + first, plan.prefill_offsets
        own, other = (prefill, (plan.decode_regions + first, plan.decode_offsets))[:: 1 if self.prefill else -1]
        prepared = self.context.prepare(peer, *own, *other, plan.lengths, plan.segment_starts, timeout_ns)
        return self.native.Leg(peer, prepared, *own, *prefill, plan.lengths)

    def _prepare_bulk(self, timeout_ns: int) -> m.Prepared:
        """One descriptor per leg over the whole pools; as many requests as have room, to be as cold as the others."""
        placed = self._plans(0).placed
        lengths = [one.plan.bytes for one in placed[0]]
        room = min(len(placed), self._decode_bytes // sum(lengths))
        at = 0
        for _ in range(max(1, room)):
            legs = []
            for peer, length in zip(self.peers, lengths, strict=True):
                legs.append(self._bulk_leg(peer, at, length, timeout_ns))
                at += length
            self._bulk.append(self.native.LoopRequest(legs))
        return m.Prepared([len(lengths)] * len(self._bulk), sum(lengths))

    def _bulk_leg(self, peer: _native.Peer, at: int, length: int, timeout_ns: int) -> _native.Leg:
        """The bytes from `at` on of the decode side's pool; replicated ones come from the same place at prefill."""
        whole = np.array([self.whole.id], np.uint32)
        decode = np.array([at], np.uint64)
        prefill = np.array([at % max(1, self._prefill_bytes - length + 1)], np.uint64)
        own, other = (prefill, decode) if self.prefill else (decode, prefill)
        size, start = np.array([length], np.uint64), np.zeros(1, np.uint32)
        plan = self.context.prepare(peer, whole, own, whole, other, size, start, timeout_ns)
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
        return self.native.Leg(peer, plan, *nothing, *nothing, nothing[1])

    # --- data

    def fill(self, command: m.Fill) -> m.Done:
        if command.poison:
            self.native.poison(self.whole.address, self.whole.bytes)
        else:
            self.native.fill(self.pattern, command.seed)
        return m.Done()

    def verify(self, command: m.Verify) -> m.Verified:
        """Leg after leg; the first wrong place is that of the first leg that has one."""
        checked, wrong, where = 0, 0, ""
        plans = self._plans(command.plan_set)
        for leg, placed in zip(plans.legs[command.request], plans.placed[command.request], strict=True):
            found = self.native.verify(self.pattern, leg, command.seed, command.epoch, command.every)
            checked += found.bytes_checked
            if found.wrong_words and not where:
                where = placed.place(found.piece, found.word)
            wrong += found.wrong_words
        return m.Verified(checked, wrong, where)

    def run(self, command: m.Run) -> m.Ran:
        meter, began = CpuMeter(), time.monotonic_ns()
        result = self.native.run_loop(
            self.context,
            self._bulk if command.bulk else self._plans(0).requests,
            self.pattern,
            self.native.Side.prefill if self.prefill else self.native.Side.decode,
            self.native.Op[command.op],
            command.first_epoch,
            command.count,
            command.inflight,
            command.check,
            command.seed,
            command.stall_ns,
        )
        own, others, steal = meter.read()
        return m.Ran(
            transfer_ns=result.transfer_ns,
            post_ns=result.post_ns,
            handover_ns=result.handover_ns,
            wall_ns=result.wall_ns,
            wrong_epochs=result.wrong_epochs,
            cpu_ns=own,
            checking_cpu_ns=result.checking_cpu_ns,
            elapsed_ns=time.monotonic_ns() - began,
            other_cpu_ns=others,
            steal_ns=steal,
        )

    def pipeline(self, command: m.Pipeline) -> m.Pipelined:
        plans = self._plans(command.plan_set)
        _require_units(command)
        found = sends([one.plan.segments for one in plans.placed[0]], command.layers, command.layers_per_send)
        chosen = {"all": found, "first": found[:1], "none": []}[command.sends]
        meter = CpuMeter()
        with self._compute(command) as compute:
            result = self.native.run_pipeline(
                self.context,
                plans.requests,
                self.pattern,
                [(one.ready_after, one.segments) for one in chosen],
                compute,
                self.native.Side.prefill if self.prefill else self.native.Side.decode,
                self.native.Op[command.op],
                command.first_epoch,
                command.count,
                command.check,
                command.seed,
                command.stall_ns,
            )
        return m.Pipelined(
            total_ns=result.total_ns,
            compute_ns=result.compute_ns,
            ready_ns=result.ready_ns,
            usable_ns=result.usable_ns,
            ready_after=[one.ready_after for one in chosen],
            sizes=[plans.send_bytes(one.segments) for one in chosen],
            wrong_epochs=result.wrong_epochs,
            cpu_ns=meter.read()[0],
        )

    def build_layers(self, command: m.BuildLayers) -> m.LayersBuilt:
        if not self.prefill:
            raise UsageError("only the prefill side computes")
        self.layers = Layers(command.shares, command.tokens, usable_bytes())
        self.kinds = len(command.shares[self.layers.chosen])
        times = self.layers.measure(command.tokens)
        return m.LayersBuilt(self.layers.chosen, times.samples_ns, times.peak_flop_s, times.how, times.on_gpu)

    @contextlib.contextmanager
    def _compute(self, command: m.Pipeline) -> Iterator[_native.Compute | None]:
        """What the prefill side computes; decode has none."""
        if not self.prefill:
            yield None
        elif command.compute == "layers":
            if len(command.order) != command.layers or not all(0 <= kind < self.kinds for kind in command.order):
                raise UsageError("compute of layers that were not built")
            with computing(self.layers, command.order, command.chunk_tokens) as external:
                yield external
        else:
            kind = self.native.TimedCompute if command.compute == "timed" else self.native.SpinCompute
            yield kind([ns for ns in command.layer_ns for _ in range(command.layers)])

    def _plans(self, number: int) -> PlanSet:
        if number not in self._sets:
            raise UsageError(f"no plans were prepared as set {number}")
        return self._sets[number]

    def copy(self, command: m.Copy) -> m.Copied:
        """Into fresh memory laid out as the decode side's pool, as many whole regions as max_bytes allows.

        Memory of the kind that the backend's pools are of. Cycles through the requests as the transfers do.
        """
        ends = np.cumsum(self.decode_region_bytes)
        regions = int(np.searchsorted(ends, command.max_bytes, side="right"))
        pieces = [self._copied_pieces(placed, regions) for placed in self._plans(0).placed]
        if regions == 0 or len(pieces[0][2]) == 0:
            return m.Copied(0, 0, b"")
        target = self.native.Mapping(int(ends[regions - 1]), self.context.capabilities.backing)
        samples: list[int] = []
        began = time.monotonic_ns()
        while not samples or (len(samples) < COPY_MAX_SAMPLES and time.monotonic_ns() - began < command.max_ns):
            to, source, lengths = pieces[len(samples) % len(pieces)]
            samples.append(self.native.copy_pieces(target.address, to, self.whole.address, source, lengths))
        lengths = pieces[0][2]
        return m.Copied(int(lengths.sum()), len(lengths), np.array(samples, np.int64).tobytes())

    def _copied_pieces(self, legs: list[Placed], regions: int) -> tuple[Offsets, Offsets, Offsets]:
        """(to, from, lengths) of what a request moves into the first `regions` regions of the decode side."""
        decode_starts = np.concatenate([[0], np.cumsum(self.decode_region_bytes)]).astype(np.uint64)
        own_starts = np.concatenate([[0], np.cumsum(self.region_bytes)]).astype(np.uint64)
        plans = [placed.plan for placed in legs]
        chosen = [plan.decode_regions < regions for plan in plans]
        to = [decode_starts[plan.decode_regions] + plan.decode_offsets for plan in plans]
        source = [own_starts[plan.prefill_regions] + plan.prefill_offsets for plan in plans]
        lengths = [plan.lengths for plan in plans]
        joined = [
            np.concatenate([part[mask] for part, mask in zip(parts, chosen, strict=True)])
            for parts in (to, source, lengths)
        ]
        return joined[0], joined[1], joined[2]

    def describe(self, _: m.Describe) -> m.Described:
        return m.Described([lane for peer in self.peers for lane in peer.describe()], self.context.details())

    def ping(self, _: m.Ping) -> m.Done:
        return m.Done()


def _tables(raw: bytes, blocks: int) -> Table:
    """Tables [request, block] of one group."""
    flat = np.frombuffer(raw, np.uint32)
    if blocks < 1 or len(flat) == 0 or len(flat) % blocks:
        raise UsageError("block tables that do not hold whole requests")
    return flat.reshape(-1, blocks)


def _require_units(command: m.Pipeline) -> None:
    """Raises UsageError when the compute of a request has no sensible number of layers and chunks."""
    if not (
        1 <= command.layers_per_send <= command.layers <= MOST_UNITS
        and 1 <= len(command.layer_ns) <= MOST_UNITS // command.layers
    ):
        raise UsageError(f"a request has from 1 to {MOST_UNITS} layers, all chunks together, and a send some of them")


@dataclass
class PlanSet:
    """Requests whose plans are cut alike, in the order of preparation; per request what every leg moves."""

    requests: list[_native.LoopRequest] = field(default_factory=list)
    legs: list[list[_native.Leg]] = field(default_factory=list)
    placed: list[list[Placed]] = field(default_factory=list)

    def send_bytes(self, segments: list[list[int]]) -> int:
        """Bytes of these segments of every leg."""
        return sum(int(one.segment_bytes[chosen].sum()) for one, chosen in zip(self.placed[0], segments, strict=True))


class Placed:
    """What one leg moves of one request, and where that lies."""

    def __init__(
        self,
        slices: Sequence[Slice],
        prefill: Sequence[Table],
        decode: Sequence[Table],
        chunks: Sequence[Sequence[int]] = (),
    ) -> None:
        self.plan = transfer_plan(slices, prefill, decode, chunks)
        self.segment_bytes = np.add.reduceat(self.plan.lengths, self.plan.segment_starts)
        self._slices = slices
        self._decode = decode

    def place(self, piece: int, word: int) -> str:
        """A word of a piece in terms of the decode side's cache."""
        region = int(self.plan.decode_regions[piece])
        here = [one for one in self._slices if one.decode_region == region]
        block, within = divmod(int(self.plan.decode_offsets[piece]) + 8 * word, here[0].decode_block)
        # The slice that begins last before the place; pieces of one slice may lie between those of others.
        start = int(self.plan.decode_offsets[piece]) % here[0].decode_block
        slice_ = max((one for one in here if one.decode_offset <= start), key=lambda one: one.decode_offset)
        position = int(np.flatnonzero(self._decode[slice_.group] == block)[0])
        last = slice_.layer + slice_.layers - 1
        layer = f"layer {slice_.layer}" if slice_.layers == 1 else f"layers {slice_.layer} to {last}"
        return f"region {region} ({layer}), block {position} of the request, word {within // 8}"


class Link:
    """This process's end of the socket to its starter; heartbeats go out by themselves."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Pipe(socket.socket(fileno=descriptor), send_timeout_s=30)
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: m.Message) -> None:
        try:
            with self._lock:
                self._pipe.send(m.encode(message))
        except PipeClosedError:
            os._exit(ExitStatus.PEER_LOST)  # nobody is left to tell

    def receive(self) -> m.Command | None:
        """None when the starter closed the socket."""
        try:
            while not self._waiting:
                self._waiting = self._pipe.receive(None)
        except PipeClosedError:
            return None
        return m.decode_to_worker(self._waiting.pop(0))

    def _beat(self) -> None:
        with _no_memory_told():
            while True:
                self.send(m.Heartbeat())
                time.sleep(m.HEARTBEAT_S)


@contextlib.contextmanager
def _no_memory_told() -> Iterator[None]:
    """When there is not even memory for a message, the exit status has to tell."""
    try:
        yield
    except MemoryError:
        os._exit(ExitStatus.UNAVAILABLE)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starter decides
    link = Link(int(sys.argv[1]))
    worker = Worker(sys.argv[2])
    with _no_memory_told():
        while (command := link.receive()) is not None:
            link.send(_answer(worker, command))
    # Not through the interpreter's end: threads of a backend may still wait for a peer that is gone.
    os._exit(0)


def _answer(worker: Worker, command: m.Command) -> m.Answer | m.Failed:
    try:
        return m.Answer(command.seq, worker.do(command.body))
    except KvxferError as error:
        return m.Failed(command.seq, error.status, str(error))
    except (Exception, msgspec.MsgspecError) as error:
        if is_short_of_memory(error):
            return m.Failed(command.seq, ExitStatus.UNAVAILABLE, "not enough memory in the worker process")
        return m.Failed(command.seq, ExitStatus.UNEXPECTED, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
