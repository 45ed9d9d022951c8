"""The process that holds one side's pool and moves its blocks: python -m kvxfer.measure.worker FD SIDE.

It obeys commands from the process that started it, over an inherited socket, until that is closed. It is started
fresh for every pair, so that setup is measured from nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.spec import region_addresses
from kvxfer.cache.tables import Table
from kvxfer.control import messages as m
from kvxfer.control.pipe import Pipe, PipeClosedError
from kvxfer.errors import ExitStatus, KvxferError, UsageError
from kvxfer.measure.host import CpuMeter

if TYPE_CHECKING:
    from kvxfer import _native

COPY_MAX_SAMPLES = 20


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
            m.Copy: self.copy,
            m.Describe: self.describe,
            m.Ping: self.ping,
        }
        self._bulk: list[_native.LoopRequest] = []
        self._requests: list[_native.LoopRequest] = []
        self._tables: list[tuple[Table, Table]] = []  # prefill's and decode's, per request

    def do(self, command: m.WorkerCommand) -> m.WorkerAnswer:
        """Raises KvxferError when the command fails, UsageError when it comes too early."""
        try:
            return self._actions[type(command)](command)
        except AttributeError as error:
            raise UsageError(f"command {type(command).__name__} came before what it needs: {error}") from error

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
        )

    def allocate(self, command: m.Allocate) -> m.Done:
        self.block_bytes = command.block_bytes
        self.blocks = command.blocks
        self.whole = self.context.allocate(sum(command.block_bytes) * command.blocks)
        return m.Done()

    def register(self, _: m.Register) -> m.Done:
        addresses = region_addresses(self.whole.address, self.block_bytes, self.blocks)
        self.regions = [
            self.context.register_memory(address, size * self.blocks)
            for address, size in zip(addresses, self.block_bytes, strict=True)
        ]
        self.pool = self.native.PoolView(list(zip(addresses, self.block_bytes, strict=True)), self.blocks)
        return m.Done()

    def connect(self, command: m.Connect) -> m.Done:
        if command.endpoint:
            self.peer = self.context.connect(command.endpoint, command.timeout_ns)
        else:
            self.peer = self.context.accept(command.timeout_ns)
        return m.Done()

    def export_keys(self, _: m.ExportKeys) -> m.Keys:
        return m.Keys(self.context.export_keys([self.whole, *self.regions]))

    def import_keys(self, command: m.ImportKeys) -> m.Done:
        self.peer.import_keys(command.keys)
        return m.Done()

    def prepare(self, command: m.Prepare) -> m.Prepared:
        if command.bulk_bytes:
            return self._prepare_bulk(command)
        tables_prefill = _tables(command.tables_prefill, command.blocks, self.blocks)
        tables_decode = _tables(command.tables_decode, command.blocks, self.blocks)
        first_region = self.regions[0].id
        descriptors, size = [], 0
        for prefill, decode in zip(tables_prefill, tables_decode, strict=True):
            local, remote = (prefill, decode) if self.prefill else (decode, prefill)
            plan = transfer_plan(local, remote, self.block_bytes, command.regions_per_layer)
            regions = plan.regions + np.uint32(first_region)
            prepared = self.context.prepare(
                self.peer,
                regions,
                plan.local_offsets,
                regions,
                plan.remote_offsets,
                plan.lengths,
                plan.segment_starts,
                command.timeout_ns,
            )
            self._requests.append(self.native.LoopRequest(prepared, prefill, decode))
            self._tables.append((prefill, decode))
            descriptors.append(prepared.descriptors)
            size = prepared.bytes
        return m.Prepared(descriptors, size)

    def _prepare_bulk(self, command: m.Prepare) -> m.Prepared:
        region = np.array([self.whole.id], np.uint32)
        start = np.zeros(1, np.uint64)
        plan = self.context.prepare(
            self.peer,
            region,
            start,
            region,
            start,
            np.array([command.bulk_bytes], np.uint64),
            np.zeros(1, np.uint32),
            command.timeout_ns,
        )
        nothing = np.zeros(0, np.uint32)
        self._bulk = [self.native.LoopRequest(plan, nothing, nothing)]
        return m.Prepared([1], plan.bytes)

    # --- data

    def fill(self, command: m.Fill) -> m.Done:
        if command.poison:
            self.native.poison(self.whole.address, self.whole.bytes)
        else:
            self.native.fill(self.pool, command.seed)
        return m.Done()

    def verify(self, command: m.Verify) -> m.Verified:
        source, own = self._tables[command.request]
        found = self.native.verify(self.pool, own, source, command.seed, command.epoch, command.every)
        where = ""
        if found.wrong_words:
            where = f"region {found.region}, block {found.block} of the request, word {found.word}"
        return m.Verified(found.bytes_checked, found.wrong_words, where)

    def run(self, command: m.Run) -> m.Ran:
        meter = CpuMeter()
        result = self.native.run_loop(
            self.context,
            self.peer,
            self._bulk if command.bulk else self._requests,
            self.pool,
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
            other_cpu_ns=others,
            steal_ns=steal,
        )

    def copy(self, command: m.Copy) -> m.Copied:
        """Into fresh memory laid out as the decode side's pool, as many whole regions as max_bytes allows."""
        pool_bytes = np.cumsum([size * self.blocks for size in self.block_bytes])
        regions = int(np.searchsorted(pool_bytes, command.max_bytes, side="right"))
        if regions == 0:
            return m.Copied(0, b"")
        plan = transfer_plan(*self._tables[0], self.block_bytes[:regions], 1)
        starts = np.concatenate([[0], pool_bytes[: regions - 1]]).astype(np.uint64)[plan.regions]
        target = self.native.Mapping(int(pool_bytes[regions - 1]))
        samples: list[int] = []
        began = time.monotonic_ns()
        while not samples or (len(samples) < COPY_MAX_SAMPLES and time.monotonic_ns() - began < command.max_ns):
            samples.append(
                self.native.copy_pieces(
                    target.address,
                    starts + plan.remote_offsets,
                    self.whole.address,
                    starts + plan.local_offsets,
                    plan.lengths,
                )
            )
        return m.Copied(plan.bytes, np.array(samples, np.int64).tobytes())

    def describe(self, _: m.Describe) -> m.Described:
        return m.Described(self.peer.describe())

    def ping(self, _: m.Ping) -> m.Done:
        return m.Done()


def _tables(raw: bytes, blocks: int, pool_blocks: int) -> Table:
    flat = np.frombuffer(raw, np.uint32)
    if blocks < 1 or len(flat) == 0 or len(flat) % blocks or int(flat.max()) >= pool_blocks:
        raise UsageError("block tables that do not fit the pool")
    return flat.reshape(-1, blocks)


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
        while True:
            self.send(m.Heartbeat())
            time.sleep(m.HEARTBEAT_S)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starter decides
    link = Link(int(sys.argv[1]))
    worker = Worker(sys.argv[2])
    while (command := link.receive()) is not None:
        link.send(_answer(worker, command))
    # Not through the interpreter's end: threads of a backend may still wait for a peer that is gone.
    os._exit(0)


def _answer(worker: Worker, command: m.Command) -> m.Answer | m.Failed:
    try:
        return m.Answer(command.seq, worker.do(command.body))
    except KvxferError as error:
        return m.Failed(command.seq, error.status, str(error))
    except MemoryError:
        return m.Failed(command.seq, ExitStatus.UNAVAILABLE, "not enough memory in the worker process")
    except (Exception, msgspec.MsgspecError) as error:
        return m.Failed(command.seq, ExitStatus.UNEXPECTED, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
