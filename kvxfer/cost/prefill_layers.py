"""The prefill of real layers that a result holds (bench --measure-prefill), and whether a decision can go by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.prefill_source import LAYERS, on_the_line
from kvxfer.errors import UsageError
from kvxfer.wording import quoted


@dataclass(frozen=True)
class PrefillLayers:
    """Real layers, computed where a result was measured: (tokens, ms) of whole prompts by rising length.

    `how` is the device, of which there were `devices`, each with its share of every layer. A line is drawn between two
    lengths; outside them there is no time.
    """

    points: Sequence[tuple[int, float]]
    how: str
    source: str
    on_gpu: bool
    devices: int
    mfu: tuple[float, float]  # the least and the most of these prompts
    basis: str = LAYERS
    noisy: bool = False  # others used the device's host while one of them was timed

    def named(self) -> str:
        least, most = (f"{100 * share:.0f}" for share in self.mfu)
        return f"measured by --measure-prefill: {self.source}; MFU {least if least == most else f'{least} … {most}'} %"

    @property
    def named_devices(self) -> str:
        return f"{self.devices} {'GPU' if self.on_gpu else 'CPU'}{'s' * (self.devices > 1)}"

    @property
    def range(self) -> str:
        first, last = self.points[0][0], self.points[-1][0]
        return f"{first:,}" if first == last else f"{first:,} … {last:,}"

    def covers(self, tokens: float) -> bool:
        return tokens <= 0 or self.points[0][0] <= tokens <= self.points[-1][0]

    def between_ms(self, start: float, end: float) -> float:
        return self._whole_ms(end) - self._whole_ms(start)

    def reaches(self, assumptions: Assumptions, tokens: int) -> bool:
        """Whether it knows the time of what prefill computes of a prompt."""
        cached = assumptions.cached_tokens(tokens)
        return self.covers(cached) and self.covers(tokens) and self.between_ms(cached, tokens) > 0

    def refused(self, assumptions: Assumptions, prompts: Iterable[int]) -> str | None:
        """Why the prefill of these prompts is not taken to be this; None where it can be."""
        prompts, gpus = list(prompts), assumptions.gpus
        if not self.on_gpu:
            return "a CPU's time says nothing of a GPU's"
        if self.devices != gpus:
            return f"it is of {self.named_devices}, and a prefill has {gpus} here (--gpus)"
        if any(more <= less for (_, less), (_, more) in pairwise(self.points)):
            return "longer prompts took no longer"
        if not all(self.reaches(assumptions, tokens) for tokens in prompts):
            cached = [round(one) for one in map(assumptions.cached_tokens, prompts) if one >= 1]
            what = "the prompts, and what is cached of them, have" if cached else "the prompts have"
            every = [*prompts, *cached]
            return f"it reaches {self.range} tokens, and {what} {min(every):,} … {max(every):,}"
        return None

    def _whole_ms(self, tokens: float) -> float:
        return on_the_line([(0, 0.0), *self.points], tokens) if tokens > 0 else 0.0


def prefill_layers(records: Sequence[Any], model: str) -> PrefillLayers | None:
    """What a result's `prefill` says of a model; None where it has no whole prompt of it.

    Raises UsageError when an entry is damaged.
    """
    found = [one for one in map(_entry, records) if one["model"] == model and one["computed_tokens"] == one["tokens"]]
    if not found:
        return None
    times = {one["tokens"]: one["total_ns"] / 1e6 for one in found}
    alike = {name: found[0][name] for name in ("how", "source", "on_gpu", "devices")}
    mfus = [float(one["mfu"]) for one in found]
    noisy = any(one.get("noisy") is True for one in found)
    return PrefillLayers(sorted(times.items()), mfu=(min(mfus), max(mfus)), noisy=noisy, **alike)


FIELDS: Mapping[str, type] = {
    "model": str,
    "tokens": int,
    "computed_tokens": int,
    "total_ns": int,
    "how": str,
    "source": str,
    "on_gpu": bool,
    "devices": int,
    "mfu": float,
}


def _entry(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise UsageError(f"the measured result is damaged: prefill holds {quoted(record)}; measure again")
    for name, kind in FIELDS.items():
        if not _sensible(record.get(name), kind):
            told = quoted(record.get(name))
            raise UsageError(f"the measured result is damaged: prefill has {name} = {told}; measure again")
    return record


def _sensible(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and 0 < value < 1 << 63
    if kind is float:
        return type(value) in (int, float) and 0 <= value < 1e9
    return type(value) is kind
