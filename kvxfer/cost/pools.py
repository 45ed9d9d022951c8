"""Whether each pool of a split is big enough for the load, and still busy enough to be worth its GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.cache.layout import Side
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.first_token import Replay, replayed
from kvxfer.cost.load import Load
from kvxfer.cost.prefill_source import PrefillSource, prompt_ms
from kvxfer.errors import UsageError

FULL = 1.0
"""Of a pool's time: more cannot be done."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of the two pools (None: not said), and how many an instance of the engine takes in each.

    total is all of them: what the colocated engines of a fair comparison have too.
    """

    prefill_instance: int
    decode_instance: int
    prefill: int | None = None
    decode: int | None = None
    total: int | None = None

    @property
    def prefill_instances(self) -> int | None:
        return None if self.prefill is None else self.prefill // self.prefill_instance

    @property
    def decode_instances(self) -> int | None:
        return None if self.decode is None else self.decode // self.decode_instance

    @property
    def engines(self) -> dict[Side, int]:
        """Those of each side, as far as they are said."""
        sides: dict[Side, int | None] = {"prefill": self.prefill_instances, "decode": self.decode_instances}
        return {side: engines for side, engines in sides.items() if engines}

    @property
    def colocated_instances(self) -> int:
        """Engines that all GPUs together make, one where their number is not said. They are as large as prefill's."""
        return 1 if self.total is None else max(1, self.total // self.prefill_instance)

    @property
    def idle(self) -> list[tuple[str, int, int]]:
        """GPUs beyond those of whole engines: where, how many, and how many an engine takes."""
        layouts = (
            ("the prefill pool's", self.prefill, self.prefill_instance),
            ("the decode pool's", self.decode, self.decode_instance),
            ("all where they are colocated", self.total, self.prefill_instance),
        )
        return [(where, gpus % size, size) for where, gpus, size in layouts if gpus and gpus >= size and gpus % size]

    @property
    def decodes_alike(self) -> bool:
        """Whether the split is known to have as many engines that decode as all GPUs together, or more."""
        decode = self.decode_instances
        return self.total is not None and decode is not None and decode >= self.colocated_instances

    @property
    def too_small(self) -> bool:
        """Whether all GPUs together do not make an instance for each pool."""
        return self.total is not None and self.total < self.prefill_instance + self.decode_instance


def make_cluster(
    prefill_instance: int, decode_instance: int, prefill: int | None, decode: int | None, total: int | None
) -> Cluster:
    """The GPUs that are not said are the others'.

    Raises UsageError when they do not add up, or make no engine of a pool though there are enough.
    """
    if total is not None:
        for name, side in (("--prefill-gpus", prefill), ("--decode-gpus", decode)):
            if side is not None and side >= total:
                raise UsageError(f"{name} {side} leaves the other pool none of --total-gpus {total}; give it fewer")
        if prefill is not None and decode is None:
            decode = total - prefill
        elif decode is not None and prefill is None:
            prefill = total - decode
    if prefill is not None and decode is not None:
        if total is not None and total != prefill + decode:
            raise UsageError(
                f"--prefill-gpus {prefill} and --decode-gpus {decode} are not --total-gpus {total}; a fair comparison "
                "has as many GPUs split as colocated"
            )
        total = prefill + decode
    if total is None or total >= prefill_instance + decode_instance:
        for name, side, instance in (("prefill", prefill, prefill_instance), ("decode", decode, decode_instance)):
            if side is not None and side < instance:
                raise UsageError(
                    f"the {name} pool has {side} GPU{'s' * (side > 1)}, and an engine of {name} takes {instance} "
                    f"(--gpus, --tp-{name}, --pp-{name}); give --{name}-gpus that make one"
                )
    return Cluster(prefill_instance, decode_instance, prefill, decode, total)


@dataclass(frozen=True)
class Pools:
    """What the load makes of the pools; None where it, or their size, is not known.

    prefill_busy is the share of prefill's time that is work, prefill_wait_ms the mean wait for an engine. replays are
    requests of each draw of the load, prefilled; none where they would wait ever longer. decode_batch is the mean
    number of sequences that one decode engine works on, and concurrency that of the whole service.
    """

    cluster: Cluster
    prefill_busy: float | None
    prefill_wait_ms: float | None
    decode_batch: float | None
    concurrency: float | None
    replays: Sequence[Replay] = ()

    @property
    def colocated_batch(self) -> float | None:
        """Sequences that one engine works on at once, mean, where all GPUs decode."""
        if self.concurrency is None or self.cluster.total is None:
            return None
        return self.concurrency / self.cluster.colocated_instances

    @property
    def decode_busy(self) -> float | None:
        """Share of the time that a decode engine has any sequence."""
        return None if self.decode_batch is None else 1 - math.exp(-self.decode_batch)


def pools_of(
    cluster: Cluster, load: Load, source: PrefillSource | None, assumptions: Assumptions, step_ms: float | None
) -> Pools:
    """By the prefill time of `source` and a decode step of `step_ms`, each None when not known."""
    rate, instances = load.requests_per_s, cluster.prefill_instances
    busy = wait = None
    replays: list[Replay] = []
    if rate and instances and source is not None:
        times = {prompt: prompt_ms(source, assumptions, prompt) for prompt in set(load.prompts)}
        per_ms = rate / instances / 1e3
        count = len(load.prompts)
        busy = per_ms * sum(times[prompt] for prompt in load.prompts) / count
        if busy < FULL:
            replays = _replays(load, instances, cluster.decode_instances or instances, times)
            waits = [replay.waits_ms for replay in replays]
            wait = sum(map(sum, waits)) / sum(map(len, waits))
    concurrency = None
    if rate and load.mean_output is not None and step_ms is not None:
        concurrency = rate * load.mean_output * step_ms / 1e3  # Little
    batch = concurrency / cluster.decode_instances if concurrency is not None and cluster.decode_instances else None
    return Pools(cluster, busy, wait, batch, concurrency, replays)


def _replays(load: Load, prefill: int, decode: int, takes_ms: Mapping[int, float]) -> list[Replay]:
    """Of engines that share the load in turn on either side, those that meet: the others are as they are.

    Of a load that is drawn one engine of prefill stands for them.
    """
    alike = math.gcd(prefill, decode)
    senders = prefill // alike
    engines = senders if load.traced_rate else 1
    draws = load.draws(prefill // engines)
    return [replayed(draw, takes_ms, engines, senders, decode // alike) for draw in draws]


def pools_record(pools: Pools) -> dict[str, Any]:
    """The result file's `plan.pools`, without `cache`."""
    cluster = pools.cluster
    return {
        "total_gpus": cluster.total,
        "concurrency": pools.concurrency,
        "prefill": {
            "gpus": cluster.prefill,
            "gpus_per_instance": cluster.prefill_instance,
            "instances": cluster.prefill_instances,
            "busy": pools.prefill_busy,
            "wait_ms": pools.prefill_wait_ms,
        },
        "decode": {
            "gpus": cluster.decode,
            "gpus_per_instance": cluster.decode_instance,
            "instances": cluster.decode_instances,
            "busy": pools.decode_busy,
            "batch": pools.decode_batch,
        },
    }
