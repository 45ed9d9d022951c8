"""What a split costs the load: every request's cache crosses a path, which is a line rate or was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.load import Load
from kvxfer.cost.prefill_source import PrefillSource, prompt_ms
from kvxfer.cost.ratio import line_rate_ms
from kvxfer.result.file import ONE_HOST_SCOPES

STANDING_FOR_ALL = 100
"""Prompt lengths that the transfer of a load is computed for."""

NOTHING_MOVED = "null"
"""The backend that moves no bytes."""


@dataclass(frozen=True)
class PathCost:
    """What one request pays on a path, and how busy the load keeps it.

    gbit is the line rate, or what was measured on the longest prompt. percent is the share of the transfers in the
    prefill of the same prompts. exposed_ms is what pipelining leaves of a measured prompt's transfer; without it all of
    it waits. setup_ms is what the first request of a pair of engines waits for beside its transfer. busy is the share
    of time that the path of one prefill engine carries bytes. None where not known.
    """

    dtype: str
    path: str
    measured: bool
    gbit: float
    percent: float
    median_ms: float | None
    p99_ms: float | None
    exposed_ms: float | None
    setup_ms: float | None
    busy: float | None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def line_rate_paths(
    dtype: str,
    sizes: Callable[[int], int],
    load: Load,
    source: PrefillSource,
    assumptions: Assumptions,
    instances: int | None,
) -> list[PathCost]:
    """One for each line rate that is assumed. `sizes` tells the bytes on one link by prompt length."""
    prompts = load.quantiles(STANDING_FOR_ALL)
    bytes_of = {prompt: sizes(prompt) for prompt in {*prompts, load.percentile(50), load.percentile(99)}}
    prefill = sum(prompt_ms(source, assumptions, prompt) for prompt in prompts)
    paths = []
    for gbit in assumptions.link_gbit:
        times = {prompt: line_rate_ms(size, gbit, assumptions.fixed_ms) for prompt, size in bytes_of.items()}
        paths.append(
            PathCost(
                dtype=dtype,
                path=f"{gbit:g} Gb/s line rate",
                measured=False,
                gbit=gbit,
                percent=sum(times[prompt] for prompt in prompts) / prefill * 100,
                median_ms=times[load.percentile(50)],
                p99_ms=times[load.percentile(99)],
                exposed_ms=None,
                setup_ms=None,
                busy=_busy(load, instances, sum(bytes_of[prompt] for prompt in prompts) / len(prompts), gbit),
            )
        )
    return paths


def measured_paths(
    dtype: str, rows: Sequence[Mapping[str, Any]], basis: str, load: Load, instances: int | None
) -> list[PathCost]:
    """One for each backend and op that was measured between two hosts in these rows of the ratio, longest prompt."""
    longest: dict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        if (row["dtype"], row["basis"]) != (dtype, basis):
            continue
        for entry in row["measured"]:
            if entry["scope"] not in ONE_HOST_SCOPES and entry["backend"] != NOTHING_MOVED and entry["transfer_ms"]:
                longest[entry["backend"], entry["op"]] = row, entry
    paths = []
    for (backend, op), (row, entry) in longest.items():
        gbit = row["bytes"] * 8 / entry["transfer_ms"] / 1e6
        cold = entry["cold_ms"]
        paths.append(
            PathCost(
                dtype=dtype,
                path=f"{backend} {op}, measured at {row['tokens']:,} tokens",
                measured=True,
                gbit=gbit,
                percent=entry["percent"],
                median_ms=None,
                p99_ms=None,
                exposed_ms=entry.get("exposed_ms"),
                setup_ms=None if cold is None else max(0.0, cold - entry["transfer_ms"]),
                busy=_busy(load, instances, load.mean_prompt * row["bytes"] / row["tokens"], gbit),
            )
        )
    return paths


def _busy(load: Load, instances: int | None, mean_bytes: float, gbit: float) -> float | None:
    """With one path to each prefill engine; one engine where their number is not said."""
    rate = load.requests_per_s
    return None if rate is None else rate / (instances or 1) * mean_bytes * 8 / (gbit * 1e9)
