"""A fresh pair of workers, set up phase by phase with every phase timed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import gcd
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.backend.probe import is_one_host
from kvxfer.cache.sends import Cut, chunk_lengths
from kvxfer.cache.tables import BlockTables
from kvxfer.control import messages as m
from kvxfer.errors import WrongBytesError
from kvxfer.measure.endpoint import reachable
from kvxfer.measure.libraries import at_decode, told, warning_of
from kvxfer.measure.request import ComputeKind, Effort, Row
from kvxfer.measure.session import Session
from kvxfer.model.widths import Share

PHASES = ("library", "context", "allocate", "register", "connect", "exchange", "prepare", "first", "other")
CONNECT_NS = 10_000_000_000
STALL_NS = 10_000_000_000
"""TCP sends again after 0.2 s, 0.4 s, 0.8 s and so on: a link that was away for 5 s moves data again after 6.4."""

SLOWEST = 20
"""A compute that shares its core with others may take so many times as long before it is taken for stuck."""

SAMPLED_PIECES = 64  # --verify sample compares about so many pieces


@dataclass(frozen=True)
class Batch:
    """Samples of requests that ran one after another (or in flight together)."""

    transfer_ns: npt.NDArray[np.int64]
    post_ns: npt.NDArray[np.int64]
    handover_ns: npt.NDArray[np.int64]
    wall_ns: int
    prefill: m.Ran
    decode: m.Ran


class Pair:
    """Both workers of a row, ready to run. Made by set_up()."""

    def __init__(
        self, session: Session, number: int, row: Row, tables: list[BlockTables], effort: Effort, peer_host: str
    ) -> None:
        self.row = row
        self._number = number
        self.setup_ns: dict[str, int] = {}
        self.descriptors = 0
        self.verified_bytes = 0
        self._session = session
        self._tables = tables
        self._verify = effort.verify
        self._peer_host = peer_host
        self._epoch = 0
        self._prepared = 0
        self._chunked: dict[int, int] = {}  # plan set of the plans that are cut into chunks of so many tokens
        self._last = 0, 0  # plan set and number of the request that ran last
        self.opened: m.Opened

    def set_up(self) -> None:
        """All phases up to the first confirmed transfer; setup_ns then holds each of them, and cold_ns, their sum.

        The clock stands while test data is written: an engine's cache is filled by its prefill.
        """
        session, row = self._session, self.row
        session.dismiss(self._number)  # an earlier pair's end is none of this one's start
        began = time.monotonic_ns()
        phases: dict[str, int] = {}
        session.launch(self._number)
        session.both(self._number, m.Ping(), m.Ping(), m.Done)  # until both processes have started: part of other
        token = secrets.token_bytes(32)

        start = time.monotonic_ns()
        command = m.Open(row.backend, token, row.options, "", 0)
        prefill, decode = session.both(self._number, command, command, m.Opened)
        self.opened, self._opened_there = prefill, decode
        self.warning = prefill.warning or decode.warning
        phases["library"] = max(prefill.library_ns, decode.library_ns)
        phases["context"] = max(0, time.monotonic_ns() - start - phases["library"])

        allocate = self._allocation()
        phases["allocate"] = self._timed(allocate, allocate)
        phases["register"] = self._timed(m.Register(), m.Register())
        endpoint = reachable(decode.endpoint, self._peer_host, is_one_host(row.backend))
        phases["connect"] = self._timed(m.Connect(endpoint, CONNECT_NS), m.Connect("", CONNECT_NS))
        phases["exchange"] = self._exchange()
        start = time.monotonic_ns()
        self._prepare(1)
        prepared = time.monotonic_ns()
        phases["prepare"] = prepared - start

        self._fill()
        first = self.run(1)
        phases["first"] = int(first.transfer_ns[0])
        cold = prepared - began + phases["first"]
        phases["other"] = cold - sum(phases.values())
        self.setup_ns = {f"{phase}_ns": phases[phase] for phase in PHASES} | {"cold_ns": cold}
        self.verify_last()

    def prepare_rest(self) -> None:
        """The plans of the other requests of the rotation; a first request waits for its own only."""
        if self._prepared < self.plans:
            self._prepare(self.plans - self._prepared)

    @property
    def plans(self) -> int:
        """Requests of the whole rotation."""
        return len(self._tables[0].prefill)

    def run(self, count: int, *, bulk: bool = False) -> Batch:
        """Move `count` requests. Raises WrongBytesError when an epoch word did not arrive."""
        command = m.Run(
            op=self.row.op,
            first_epoch=self._epoch + 1,
            count=count,
            inflight=1 if bulk else self.row.inflight,
            check=self._verifies and not bulk,
            bulk=bulk,
            stall_ns=STALL_NS,
            seed=self.row.seed,
        )
        self._ran(count, 0)
        prefill, decode = self._session.both(self._number, command, command, m.Ran)
        self._require_epochs(decode.wrong_epochs, count)
        initiator = prefill if self.row.op == "push" else decode
        return Batch(
            transfer_ns=np.frombuffer(initiator.transfer_ns, np.int64),
            post_ns=np.frombuffer(initiator.post_ns, np.int64),
            handover_ns=np.frombuffer(prefill.handover_ns, np.int64),
            wall_ns=initiator.wall_ns,
            prefill=prefill,
            decode=decode,
        )

    def pipelined(
        self,
        cut: Cut,
        layer_ns: list[int],
        compute: ComputeKind = "timed",
        sends: Literal["all", "first", "none"] = "all",
        order: Sequence[int] = (),
    ) -> m.Pipelined:
        """Move a request whose sends leave as they are computed; `layer_ns` is each chunk's compute of one layer.

        `order` has the kind of each layer, of those that were built.

        Raises WrongBytesError when an epoch word did not arrive.
        """
        command = m.Pipeline(
            plan_set=self._plan_set(cut.chunk_tokens),
            op=self.row.op,
            first_epoch=self._epoch + 1,
            count=1,
            layers=self.row.layers,
            layers_per_send=cut.layers,
            sends=sends,
            compute=compute,
            layer_ns=layer_ns,
            chunk_tokens=chunk_lengths(self.row.tokens, cut.chunk_tokens),
            order=list(order),
            check=self._verifies and sends == "all",
            stall_ns=STALL_NS + SLOWEST * self.row.layers * sum(layer_ns),
            seed=self.row.seed,
        )
        self._ran(1, command.plan_set)
        prefill, decode = self._session.both(self._number, command, command, m.Pipelined)
        self._require_epochs(decode.wrong_epochs, 1)
        return prefill

    def build_layers(self, candidates: Sequence[Share]) -> m.LayersBuilt:
        """A layer of each kind at prefill, for compute `layers`, of the first share that there is memory for."""
        command = m.BuildLayers([list(share.kinds) for share in candidates], self.row.tokens)
        return self._session.prefill(self._number, command, m.LayersBuilt)

    def _plan_set(self, chunk_tokens: int | None) -> int:
        """The plans that are cut into chunks of so many tokens, prepared when they are asked for first."""
        if chunk_tokens is None or chunk_tokens >= self.row.tokens:
            return 0
        if chunk_tokens not in self._chunked:
            self._chunked[chunk_tokens] = 1 + len(self._chunked)
            command = msgspec.structs.replace(
                self._prepare_command(slice(0, self._prepared)),
                chunks=self.row.chunk_ends(chunk_tokens),
                plan_set=self._chunked[chunk_tokens],
            )
            self._session.both(self._number, command, command, m.Prepared)
        return self._chunked[chunk_tokens]

    def _ran(self, count: int, plan_set: int) -> None:
        self._epoch += count
        self._last = plan_set, self._epoch % self._prepared

    def _require_epochs(self, wrong: int, count: int) -> None:
        if wrong:
            raise WrongBytesError(
                f"{self.row.id}: {wrong} pieces of {count} requests did not carry their request's epoch: "
                "old or misplaced bytes were confirmed as delivered" + self._first_wrong_place()
            )

    def run_verified(self, run: Callable[[], object] | None = None) -> None:
        """One more request (or what `run` runs) into a poisoned pool, compared byte by byte."""
        if not self._verifies:
            return
        self._session.decode(self._number, m.Fill(self.row.seed, poison=True), m.Done)
        if run is None:
            self.run(1)
        else:
            run()
        self.verify_last()

    def verify_last(self) -> None:
        """Compare the request that ran last. Raises WrongBytesError."""
        if not self._verifies:
            return
        found = self._compare_last(1 if self._verify == "full" else self._sampling_step())
        if found.wrong_words:
            raise WrongBytesError(
                f"{self.row.id}: {found.wrong_words} words of 8 bytes arrived wrong or in the wrong place, the first "
                f"in {found.where}; nothing measured over this path can be trusted"
            )
        self.verified_bytes += found.bytes_checked

    def _sampling_step(self) -> int:
        """Compare every so many-th piece: not always the same blocks of every layer."""
        step = max(1, self.descriptors // SAMPLED_PIECES)
        while gcd(step, self.row.blocks[0]) != 1:
            step += 1
        return step

    def _compare_last(self, every: int) -> m.Verified:
        """Every so many-th piece of the request that ran last, with what it should hold."""
        plan_set, request = self._last
        command = m.Verify(self.row.seed, request, self._epoch, every, plan_set)
        return self._session.decode(self._number, command, m.Verified)

    def _first_wrong_place(self) -> str:
        """Where the request that ran last is wrong; of those before it only the count is known."""
        where = self._compare_last(1).where
        return f"; the last request is wrong first in {where}" if where else ""

    def end(self) -> None:
        """End both workers."""
        self._session.dismiss(self._number)

    def prepare_bulk(self) -> None:
        """A plan of one descriptor per rank pair with as many bytes as the request."""
        command = m.Prepare([], [], [], CONNECT_NS, bulk=True)
        self._session.both(self._number, command, command, m.Prepared)

    def copy(self, max_bytes: int, max_ns: int) -> m.Copied:
        """The memcpy reference."""
        return self._session.prefill(self._number, m.Copy(max_bytes, max_ns), m.Copied)

    def described(self) -> m.Described:
        """What carried the bytes, each kind once, and how; with what differs at the decode side, which is a warning."""
        found, there = self._session.both(self._number, m.Describe(), m.Describe(), m.Described)
        differences = at_decode((self.opened, self._opened_there), (found, there))
        self.warning = "; ".join(filter(None, (self.warning, warning_of(differences))))
        return told(found, there, differences)

    def control_rtt_ns(self, pings: int = 21) -> int:
        """Median round trip to the decode worker over the control channel."""
        times = []
        for _ in range(pings):
            began = time.monotonic_ns()
            self._session.decode(self._number, m.Ping(), m.Done)
            times.append(time.monotonic_ns() - began)
        return int(np.median(times))

    @property
    def _verifies(self) -> bool:
        return self.opened.moves_data and self._verify != "off"

    def _allocation(self) -> m.Allocate:
        row = self.row
        slots = self._tables[0].pool_blocks // row.blocks[0]
        return m.Allocate(
            row.region_bytes(row.prefill_regions, slots),
            row.region_bytes(row.decode_regions, slots),
            [[astuple(one) for one in pair.slices] for pair in row.pairs],
        )

    def _timed(self, prefill: m.WorkerCommand, decode: m.WorkerCommand) -> int:
        start = time.monotonic_ns()
        self._session.both(self._number, prefill, decode, m.Done)
        return time.monotonic_ns() - start

    def _exchange(self) -> int:
        start = time.monotonic_ns()
        ours, theirs = self._session.both(self._number, m.ExportKeys(), m.ExportKeys(), m.Keys)
        self._session.both(self._number, m.ImportKeys(theirs.keys), m.ImportKeys(ours.keys), m.Done)
        return time.monotonic_ns() - start

    def _prepare(self, count: int) -> None:
        """The next `count` requests' plans."""
        command = self._prepare_command(slice(self._prepared, self._prepared + count))
        prefill, _ = self._session.both(self._number, command, command, m.Prepared)
        self.descriptors = max(self.descriptors, *prefill.descriptors)
        self._prepared += count

    def _prepare_command(self, chosen: slice) -> m.Prepare:
        return m.Prepare(
            self.row.blocks,
            [group.prefill[chosen].tobytes() for group in self._tables],
            [group.decode[chosen].tobytes() for group in self._tables],
            CONNECT_NS,
        )

    def _fill(self) -> None:
        if self._verifies:
            self._session.both(
                self._number, m.Fill(self.row.seed, poison=False), m.Fill(self.row.seed, poison=True), m.Done
            )
