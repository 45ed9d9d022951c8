"""A row from its first process pair to its references, and how it stands in the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.errors import UnavailableError
from kvxfer.measure.host import NOISY_SHARE
from kvxfer.measure.hosts import Hosts
from kvxfer.measure.pair import PHASES, Pair
from kvxfer.measure.pipeline import PipelineRun
from kvxfer.measure.request import Effort, Pipelining, Row, tables
from kvxfer.measure.session import Session
from kvxfer.measure.steady import SteadyState, Totals
from kvxfer.result import statistics
from kvxfer.result.cold import cold_pair, summary

GIB = 1 << 30
BULK_SAMPLES = 20
REFERENCE_NS = 1_000_000_000

Say = Callable[[str], None]


class RowRun:
    """One row being measured: set_up(), then step() until it says False, then finish()."""

    def __init__(
        self,
        session: Session,
        number: int,
        row: Row,
        effort: Effort,
        hosts: Hosts,
        pipelining: Pipelining | None = None,
    ) -> None:
        self.row = row
        self._session = session
        self._number = number
        self._effort = effort
        self._hosts = hosts
        self._pipelining = pipelining
        self._setups: list[dict[str, int]] = []
        self._steady: SteadyState
        self.references: list[dict[str, Any]] = []
        self.failed = False

    def set_up(self, say: Say) -> None:
        """Fresh pairs, one after another; the last one stays for the steady state."""
        block_tables = tables(self.row, self._hosts.slots(self.row))
        for repeat in range(self._effort.setup_repeats):
            say(f"{self.row.id}: setup {repeat + 1}/{self._effort.setup_repeats}")
            pair = Pair(self._session, self._number, self.row, block_tables, self._effort, self._hosts.peer_host)
            pair.set_up()
            self._setups.append(pair.setup_ns)
        if self.row.inflight > pair.opened.max_inflight:
            raise UnavailableError(
                f"backend {self.row.backend} has at most {pair.opened.max_inflight} requests in flight"
            )
        pair.prepare_rest()
        self._steady = SteadyState(pair, self._effort)

    def step(self, say: Say) -> bool:
        say(f"{self.row.id}: {self._steady.totals.requests} samples")
        return self._steady.step()

    def finish(self, say: Say) -> dict[str, Any]:
        """Measure pipelining, verify once more, measure the references, end the pair. Returns the row of the result."""
        pair, totals = self._steady.pair, self._steady.totals
        pipeline = None if self._pipelining is None else PipelineRun(pair, self._pipelining, self._effort).run(say)
        say(f"{self.row.id}: verifying")
        pair.run_verified()
        rtt = pair.control_rtt_ns()
        described = pair.described()
        say(f"{self.row.id}: references")
        self._measure_references(pair)
        pair.end()
        setup = setup_summary(self._setups)
        return common(self.row) | {
            "status": "ok",
            "error": None,
            "loop": "native",
            "transport": "+".join(described.lanes),
            "library": {
                "path": pair.opened.library_path,
                "version": pair.opened.library_version,
                "details": described.details,
                "warning": pair.warning,
            },
            "bytes": self.row.bytes,
            "descriptors": pair.descriptors,
            "plans": pair.plans,
            **self._times(totals, pair.opened.moves_data),
            "control_rtt_ns": rtt,
            "setup": setup,
            "cold_pair_ns": cold_pair(setup),
            "cpu_s_per_gib": self._cpu(totals, pair.opened.moves_data),
            "verified": self._effort.verify if pair.opened.moves_data else "off",
            "verified_bytes": pair.verified_bytes,
            "hot": self._hosts.is_hot(self.row),
            **self._noise(totals),
            "pipeline": pipeline,
            "options": dict(self.row.options),
        }

    def abandon(self) -> None:
        """End the pair of a row that failed."""
        self.failed = True
        self._session.dismiss(self._number)

    def _times(self, totals: Totals, moves_data: bool) -> dict[str, Any]:
        samples = totals.joined("transfer_ns")
        handover = totals.joined("handover_ns")
        median = statistics.median(samples)
        if self.row.inflight == 1:
            bandwidth = self.row.bytes / median
        else:
            bandwidth = self.row.bytes * totals.requests / totals.wall_ns
        return {
            "samples_ns": samples.tolist(),
            "post_ns": totals.joined("post_ns").tolist(),
            "p50_ns": median,
            "p90_ns": statistics.percentile(samples, 0.90),
            "p99_ns": statistics.percentile(samples, 0.99),
            "min_ns": int(samples.min()),
            "max_ns": int(samples.max()),
            "ci95_ns": _listed(statistics.median_interval(samples)),
            "converged": statistics.converged(samples),
            "warmup": {
                "samples": self._steady.warm_up_samples,
                "wall_ns": self._steady.warm_up_ns,
                "agreed": self._steady.agreed,
            },
            "bandwidth_gbyte_s": bandwidth if moves_data else None,
            "handover": {
                "p50_ns": statistics.median(handover),
                "p90_ns": statistics.percentile(handover, 0.90),
                "p99_ns": statistics.percentile(handover, 0.99),
                "samples_ns": handover.tolist(),
            },
        }

    def _cpu(self, totals: Totals, moves_data: bool) -> dict[str, float | None]:
        moved = totals.requests * self.row.bytes / GIB
        if not moves_data:
            return {"prefill": None, "decode": None}
        return {
            "prefill": max(0, totals.cpu_prefill_ns - totals.checking_prefill_ns) / 1e9 / moved,
            "decode": max(0, totals.cpu_decode_ns - totals.checking_decode_ns) / 1e9 / moved,
        }

    def _noise(self, totals: Totals) -> dict[str, Any]:
        share = others_share(totals, self._hosts)
        return {"noisy": share > NOISY_SHARE, "other_cpu_share": share}

    def _measure_references(self, pair: Pair) -> None:
        if not pair.opened.moves_data:
            return
        pair.prepare_bulk()
        pair.run(1, bulk=True)
        samples: list[int] = []
        while len(samples) < BULK_SAMPLES and sum(samples) < REFERENCE_NS:
            samples.extend(pair.run(1, bulk=True).transfer_ns.tolist())
        self._reference("bulk", self.row.bytes, len(self.row.pairs), None, samples)

        copied = pair.copy(self._hosts.with_memory_now().usable_here, REFERENCE_NS)
        if copied.bytes_copied:
            times = np.frombuffer(copied.samples_ns, np.int64).tolist()
            self._reference("memcpy", copied.bytes_copied, copied.descriptors, 1, times)

    def _reference(self, kind: str, size: int, descriptors: int, threads: int | None, samples: list[int]) -> None:
        median = statistics.median(samples)
        reference = {
            "of": self.row.id,
            "kind": kind,
            "bytes": size,
            "descriptors": descriptors,
            "p50_ns": median,
            "bandwidth_gbyte_s": size / median,
            "samples_ns": samples,
        }
        self.references.append(reference | ({"threads": threads} if threads else {}))


def others_share(totals: Totals, hosts: Hosts) -> float:
    """The share of a host's CPUs (0 … 1) that others, not the other worker, or the hypervisor took meanwhile."""
    same_host = hosts.sides_here == 2
    others_prefill = totals.others_prefill_ns - (totals.cpu_decode_ns if same_host else 0)
    others_decode = totals.others_decode_ns - (totals.cpu_prefill_ns if same_host else 0)
    wall = max(1, totals.elapsed_ns)
    return max(
        others_prefill / (wall * hosts.here.cpus),
        others_decode / (wall * hosts.there.cpus),
        totals.steal_ns / (wall * min(hosts.here.cpus, hosts.there.cpus)),
        0.0,
    )


def common(row: Row) -> dict[str, Any]:
    """What a row says whether it could be measured or not."""
    return {
        "id": row.id,
        "model": row.shape.name,
        "dtype": row.spec.dtype.name,
        "backend": row.backend,
        "op": row.op,
        "device": "cpu",
        "tokens": row.tokens,
        "block_size": row.spec.block_size,
        "layout": row.spec.order + ("-together" if row.prefill.together else ""),
        "fragmentation": row.fragmentation,
        "regions_per_layer": row.spec.regions_per_layer,
        "tp": {"prefill": row.prefill.tp, "decode": row.decode.tp},
        "pp": {"prefill": row.prefill.pp, "decode": row.decode.pp},
        "inflight": row.inflight,
        **({"held_tokens": row.held_blocks * row.spec.block_size} if row.held_blocks else {}),
    }


def failed(row: Row, error: str) -> dict[str, Any]:
    """The row of the result when it could not be measured."""
    return common(row) | {"status": "error", "error": error}


def setup_summary(setups: list[dict[str, int]]) -> dict[str, Any]:
    """Each phase, and cold, over the repetitions."""
    names = [f"{phase}_ns" for phase in PHASES] + ["cold_ns"]
    return {name: summary([setup[name] for setup in setups]) for name in names}


def _listed(interval: tuple[int, int] | None) -> list[int] | None:
    return None if interval is None else list(interval)
