"""What a split costs the load: every request's cache crosses a path, which is a line rate or was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.load import Load
from kvxfer.cost.measured import Measured
from kvxfer.cost.prefill_source import PrefillSource, on_the_line, prompt_ms
from kvxfer.cost.ratio import line_rate_ms
from kvxfer.result.file import ONE_HOST_SCOPES

LARGEST_TOKENS = 100_000_000

STANDING_FOR_ALL = 100
"""Prompt lengths that the transfer of a load is computed for."""

NOTHING_MOVED = "null"
"""The backend that moves no bytes."""


@dataclass(frozen=True)
class PathCost:
    """What one request pays on a path, and how busy the load keeps it.

    reached is the share of the load's prompts that a measurement reaches, those that the other figures are of. gbit is
    the line rate, or what was measured on the longest prompt. percent is the share of the transfers in the prefill of
    the same prompts. exposed_ms is what pipelining leaves of the longest measured prompt's transfer; without it all of
    it waits. setup_ms is what the first request of a pair of running engines waits for beside its transfer. busy is the
    share of time that the path of one prefill engine carries bytes. None where not known.
    """

    dtype: str
    path: str
    measured: bool
    reached: float | None
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
                reached=None,
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


@dataclass(frozen=True)
class MeasuredPath:
    """What was measured of one cache between two hosts by one backend and op: rows of rising prompt length."""

    rows: Sequence[Measured]

    @property
    def named(self) -> str:
        first, last = self.rows[0], self.rows[-1]
        lengths = f"{last.tokens:,}" if first is last else f"{first.tokens:,} … {last.tokens:,}"
        return f"{last.backend} {last.op}, measured at {lengths} tokens"

    def reaches(self, tokens: int) -> bool:
        return self.rows[0].tokens <= tokens <= self.rows[-1].tokens

    def transfer_ms(self, tokens: int) -> float:
        """Of a prompt that it reaches; a line is drawn between two lengths."""
        return on_the_line([(row.tokens, row.transfer_ms or 0.0) for row in self.rows], tokens)

    def cost(
        self,
        dtype: str,
        moved: Callable[[int], int],
        load: Load,
        source: PrefillSource,
        assumptions: Assumptions,
        instances: int | None,
        exposed: Mapping[str, float | None],
    ) -> PathCost | None:
        """Of the prompts that it reaches; None where it reaches none.

        `moved` tells the bytes by prompt length, `exposed` the ms that pipelining left of a row by its id.
        """
        prompts, longest = load.quantiles(STANDING_FOR_ALL), self.rows[-1]
        reached = [prompt for prompt in prompts if self.reaches(prompt)]
        if not reached or not longest.transfer_ms:
            return None
        share = len(reached) / len(prompts)
        prefill = sum(prompt_ms(source, assumptions, prompt) for prompt in reached)
        median, p99 = load.percentile(50), load.percentile(99)
        gbit = longest.bytes * 8 / longest.transfer_ms / 1e6
        return PathCost(
            dtype=dtype,
            path=self.named + (f", {share:.0%} of the prompts" if share < 1 else ""),
            measured=True,
            reached=share,
            gbit=gbit,
            percent=sum(self.transfer_ms(prompt) for prompt in reached) / prefill * 100,
            median_ms=self.transfer_ms(median) if self.reaches(median) else None,
            p99_ms=self.transfer_ms(p99) if self.reaches(p99) else None,
            exposed_ms=exposed.get(longest.of),
            setup_ms=None if longest.first_ms is None else max(0.0, longest.first_ms - longest.transfer_ms),
            busy=_busy(load, instances, sum(moved(prompt) for prompt in prompts) / len(prompts), gbit),
        )


def paths_between_hosts(
    measured: Sequence[Measured], model: str, dtype: str, moved: Callable[[int], int]
) -> list[MeasuredPath]:
    """One for each backend and op that moved exactly the bytes of this cache, one request at a time."""
    by_name: dict[tuple[str, str], dict[int, Measured]] = {}
    for row in measured:
        if (row.model, row.dtype, row.inflight) != (model, dtype, 1) or not 0 < row.tokens <= LARGEST_TOKENS:
            continue
        if row.scope in ONE_HOST_SCOPES or row.backend == NOTHING_MOVED or not row.transfer_ms:
            continue
        if row.bytes == moved(row.tokens):
            by_name.setdefault((row.backend, row.op), {})[row.tokens] = row
    return [MeasuredPath([rows[tokens] for tokens in sorted(rows)]) for rows in by_name.values()]


def _busy(load: Load, instances: int | None, mean_bytes: float, gbit: float) -> float | None:
    """With one path to each prefill engine; one engine where their number is not said."""
    rate = load.requests_per_s
    return None if rate is None else rate / (instances or 1) * mean_bytes * 8 / (gbit * 1e9)
