"""Real layers as prefill: timed alone, which is a prefill measured here, or computed beside transfers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.prefill import attention_flop, linear_flop
from kvxfer.cost.prefill_source import PrefillHere
from kvxfer.errors import KvxferError
from kvxfer.measure.host import NOISY_SHARE, TICKS_NS, CpuMeter, usable_bytes
from kvxfer.measure.layers import Layers, LayerTimes
from kvxfer.model.shape import ModelShape
from kvxfer.model.widths import Share, shares
from kvxfer.result import statistics

if TYPE_CHECKING:
    from kvxfer import _native

ON_A_CPU = "a CPU's time is good for the shape of pipelining, and says nothing of a GPU's time"


@dataclass(frozen=True)
class Computed:
    """What all layers of a model take for a prompt, from the times of one of each kind."""

    shape: ModelShape
    share: Share
    times: LayerTimes
    tokens: int
    cached: int = 0  # the first ones, which are not computed
    other_cpu_share: float = 0.0  # of this host's CPUs, that others or the hypervisor took meanwhile

    @property
    def total_ns(self) -> int:
        return self._all_layers(statistics.median)

    @property
    def flop(self) -> float:
        """Of one device: the model's, as the `full` basis counts them, divided over the devices."""
        active = (self.shape.params_active or 0) - (self.shape.params_embedding or 0)
        linear = linear_flop(active, self.tokens - self.cached)
        return (linear + attention_flop(self.shape, self.tokens, self.cached)) / self.share.devices

    @property
    def source(self) -> str:
        """How it was computed, in words."""
        of = ", one of its kind repeated" if len(self.share.kinds) == 1 else ", one of each kind repeated"
        part = ""
        if self.share.devices > 1:
            part = f", 1/{self.share.devices} of each as on each of {self.share.devices} devices that exchange nothing"
        told = f"{self.times.how}, real layers of random weights{of}{part}{self._plainly}"
        return told if self.times.on_gpu else f"{told}; {ON_A_CPU}"

    @property
    def _plainly(self) -> str:
        """What of it engines have kernels of their own for, other than attention, in words."""
        kinds = self.share.kinds
        named = [one.recurrence.rule for one in kinds if one.recurrence]
        named += ["the indexer" for one in kinds if one.attention and one.attention.index_heads]
        if not named:
            return ""
        return f", {' and '.join(dict.fromkeys(named))} in plain torch operations, not an engine's fused kernel"

    def as_record(self) -> dict[str, Any]:
        """What a result says of real layers, wherever they are in it."""
        return {
            "how": self.times.how,
            "on_gpu": self.times.on_gpu,
            "devices": self.share.devices,
            "kinds": [
                {"what": label, "layers": self.share.order.count(kind), "samples_ns": samples}
                for kind, (label, samples) in enumerate(zip(self.share.labels, self.times.samples_ns, strict=True))
            ],
            "flop": self.flop,
            "peak_flop_s": self.times.peak_flop_s,
            "mfu": self.flop / (self.total_ns / 1e9) / self.times.peak_flop_s,
        }

    def as_prefill(self) -> dict[str, Any]:
        """An entry of the result file's `prefill`."""
        return {
            "model": self.shape.name,
            "tokens": self.tokens,
            "computed_tokens": self.tokens - self.cached,
            "total_ns": self.total_ns,
            "least_ns": self._all_layers(min),
            "most_ns": self._all_layers(max),
            "source": self.source,
            "noisy": self.other_cpu_share > NOISY_SHARE,
            "other_cpu_share": self.other_cpu_share,
            **self.as_record(),
        }

    def _all_layers(self, one_of: Callable[[list[int]], int]) -> int:
        by_kind = [one_of(samples) for samples in self.times.samples_ns]
        return sum(by_kind[kind] for kind in self.share.order)


def measure_prefill(
    shape: ModelShape, tokens: Sequence[int], assumptions: Assumptions, say: Callable[[str], None]
) -> list[Computed]:
    """Time the layers over prompts of these lengths, on this device, a rank's share of them where prefill has several.

    Raises UsageError for a model or lengths that are not computed here, UnavailableError beyond the memory or the time.
    """
    candidates = shares(shape, assumptions.tp_prefill)
    say("prefill: building layers")
    layers = Layers([share.kinds for share in candidates], max(tokens), usable_bytes())
    found = []
    for count in tokens:
        say(f"prefill of {count:,} tokens: timing layers")
        cached = int(assumptions.cached_tokens(count))
        began, meter = time.monotonic_ns(), CpuMeter()
        times = layers.measure(count, cached)
        others = _others_share(meter, time.monotonic_ns() - began)
        found.append(Computed(shape, candidates[layers.chosen], times, count, cached, others))
    return found


def _others_share(meter: CpuMeter, wall_ns: int) -> float:
    """Of all CPUs, others' or the hypervisor's; less what the clock's ticks leave unsure."""
    _, others, steal = meter.read()
    return max(0.0, max(others, steal) - TICKS_NS) / (wall_ns * (os.cpu_count() or 1))


def prefill_here(computed: Sequence[Computed]) -> PrefillHere:
    """The same as a source of prefill times."""
    return PrefillHere({one.tokens: one.total_ns / 1e6 for one in computed}, computed[0].source)


@contextlib.contextmanager
def computing(layers: Layers, order: Sequence[int], chunks: Sequence[int]) -> Iterator[_native.Compute]:
    """Compute of prompts in these chunks for a native loop, on a thread of its own, which ends with the context.

    Raises what went wrong on that thread, unless the loop has failed by itself.
    """
    from kvxfer import _native

    compute = _native.ExternalCompute(len(order) * len(chunks))
    failed: list[BaseException] = []

    def work() -> None:
        while compute.await_start():
            try:
                layers.prefill(order, chunks, compute.unit_ended)
            except BaseException as error:
                failed.append(error)
                with contextlib.suppress(KvxferError):  # until all have ended: the loop is not to wait for them
                    while compute.unit_ended():
                        pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield compute
    finally:
        compute.stop()
        thread.join()
    if failed:
        raise failed[0]
