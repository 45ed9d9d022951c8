"""A real forward pass of a model's layers at their true widths, with random weights, in torch: prefill's own work.

One layer of each kind is built (kvxfer/measure/forward) and computed as often as the model has it. On a GPU it is in
bfloat16, on a CPU in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvxfer.errors import UnavailableError, UsageError
from kvxfer.measure.forward.room import elements
from kvxfer.model.mlp import ACTIVATIONS
from kvxfer.model.recurrence import RULES
from kvxfer.model.widths import Attention, Widths

MOST_TOKENS_ON_A_CPU = 512
LARGEST_WIDTH = 1 << 20
MOST_KINDS = 64
MOST_EXPERTS = 4096

SAMPLES = 5
LONGEST_S = 60.0
"""The most that timing all kinds of layers may take."""

PEAK_PRODUCTS = {"cpu": (1024, 1), "cuda": (8192, 16)}
"""Width and number of the square products that peak is taken from: a GPU's takes large ones, and several under way."""

WITHOUT = "leave real layers out (--compute timed or spin, and no --measure-prefill)"
NO_TORCH = f"real layers need torch, which is not installed here; `pip install torch`, or {WITHOUT}"


@dataclass(frozen=True)
class LayerTimes:
    """Warm samples of each kind of layer over the tokens asked for, and the device's peak in its number format."""

    samples_ns: list[list[int]]
    peak_flop_s: float
    how: str  # "float32 on 2 CPU threads"
    on_gpu: bool


class Layers:
    """A layer of each kind, its weights, and room for what it keeps of one prompt."""

    def __init__(self, candidates: Sequence[Sequence[Widths]], tokens: int, usable_bytes: int) -> None:
        """Builds the first of the candidates, each the kinds of layers, whose memory there is; `chosen` says which.

        usable_bytes are a CPU's. Raises UsageError, or UnavailableError when there is no torch or not enough memory.
        """
        try:
            import torch

            from kvxfer.measure.forward.layer import Layer
            from kvxfer.measure.forward.making import Making
        except ImportError as error:
            raise UnavailableError(NO_TORCH) from error
        if not candidates or not all(1 <= len(kinds) <= MOST_KINDS for kinds in candidates):
            raise UsageError(f"layers are of 1 to {MOST_KINDS} kinds")
        if any(len({widths.hidden for widths in kinds}) > 1 for kinds in candidates):
            raise UsageError("layers of one model are all as wide")
        for widths in (one for kinds in candidates for one in kinds):
            _require_sensible(widths, tokens)
        on_gpu = torch.cuda.is_available()
        if not on_gpu and tokens > MOST_TOKENS_ON_A_CPU:
            raise UsageError(
                f"{tokens} tokens are too many to compute on a CPU: at most {MOST_TOKENS_ON_A_CPU}; lower --tokens, or "
                f"{WITHOUT}"
            )
        if on_gpu:
            usable_bytes = torch.cuda.mem_get_info()[0]
        element = 2 if on_gpu else 4
        needed = [element * sum(elements(widths, tokens, on_gpu) for widths in kinds) for kinds in candidates]
        fitting = [number for number, size in enumerate(needed) if size <= usable_bytes]
        if not fitting:
            raise UnavailableError(
                f"a layer takes {needed[-1] / 2**30:.3g} GiB, the smallest share of it that there is, and "
                f"{usable_bytes / 2**30:.3g} GiB can be used; choose a smaller model, or {WITHOUT}"
            )
        self.chosen = fitting[0]
        self._torch = torch
        self._on_gpu = on_gpu
        self._options: dict[str, Any] = {
            "device": "cuda" if on_gpu else "cpu",
            "dtype": torch.bfloat16 if on_gpu else torch.float32,
        }
        generator = torch.Generator(device=self._options["device"]).manual_seed(0)
        kinds = candidates[self.chosen]
        making = Making(self._options, generator)
        self._layers = [Layer(making, widths, tokens) for widths in kinds]
        self.weights = making.elements
        self._input = torch.randn(tokens, kinds[0].hidden, generator=generator, **self._options)

    def measure(self, tokens: int, cached: int = 0) -> LayerTimes:
        """Warm times of each kind of layer over a prompt but its first `cached` tokens, and the device's peak.

        Raises UnavailableError when that would take too long.
        """
        torch = self._torch
        width, products = PEAK_PRODUCTS[self._options["device"]]
        hidden = self._input[cached:tokens]
        with torch.inference_mode():
            samples = [self._timed(partial(layer.forward, hidden, cached)) for layer in self._layers]
            square = torch.randn(width, width, **self._options)
            peak = self._timed(lambda: [square @ square for _ in range(products)])
        return LayerTimes(samples, 2.0 * width**3 * products / (min(peak) / 1e9), self._how(), self._on_gpu)

    def prefill(self, order: Sequence[int], chunks: Sequence[int], layer_done: Callable[[], bool]) -> None:
        """Compute a prompt, chunk by chunk, in each the layers of these kinds, until `layer_done` answers False."""
        with self._torch.inference_mode():
            first = 0
            for length in chunks:
                hidden = self._input[first : first + length]
                for kind in order:
                    hidden = self._layers[kind].forward(hidden, first)
                    self._finish()
                    if not layer_done():
                        return
                first += length

    def _how(self) -> str:
        if self._on_gpu:
            return f"bfloat16 on one {self._torch.cuda.get_device_name()}"
        threads = self._torch.get_num_threads()
        return f"float32 on {threads} CPU thread{'s' * (threads != 1)}"

    def _timed(self, work: Callable[[], object]) -> list[int]:
        """Times of `work`, the first of which, cold, is left out. Raises UnavailableError when that one is too long."""
        samples: list[int] = []
        for _ in range(1 + SAMPLES):
            began = time.monotonic_ns()
            work()
            self._finish()
            samples.append(time.monotonic_ns() - began)
            expected = samples[0] / 1e9 * SAMPLES * len(self._layers)
            if expected > LONGEST_S:
                raise UnavailableError(
                    f"a layer takes {samples[0] / 1e9:.1f} s in {self._how()}, and timing them at most {LONGEST_S:.0f} "
                    f"s of the {expected:.0f} that would take; lower --tokens, choose a smaller model, or {WITHOUT}"
                )
        return samples[1:]

    def _finish(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()


def _require_sensible(widths: Widths, tokens: int) -> None:
    """Raises UsageError: what comes from another process may be anything."""
    attention, recurrence, mlp = widths.attention, widths.recurrence, widths.mlp
    needed = [widths.hidden, tokens]
    if attention:
        needed += [attention.heads, attention.kv_heads, attention.head_dim_k, attention.head_dim_v]
    if recurrence:
        needed += [one for one in vars(recurrence).values() if isinstance(one, int)]
    every = [one for part in (widths, attention, mlp) if part for one in vars(part).values() if isinstance(one, int)]
    if not all(1 <= width <= LARGEST_WIDTH for width in needed) or not all(0 <= one <= LARGEST_WIDTH for one in every):
        raise UsageError(f"widths of a layer are from 1 to {LARGEST_WIDTH}")
    if attention:
        _require_attention(attention)
    if recurrence and (attention or recurrence.rule not in RULES):
        raise UsageError(f"a layer has attention or a recurrence, and that is a {' or a '.join(RULES)}")
    if recurrence and recurrence.heads % recurrence.key_heads:
        raise UsageError(f"{recurrence.heads} heads do not divide over {recurrence.key_heads} key heads")
    if mlp.activation not in ACTIVATIONS:
        raise UsageError(f"MLPs have an activation of {', '.join(ACTIVATIONS)}, not {mlp.activation!r}")
    known = widths.own_experts <= mlp.experts <= MOST_EXPERTS and 1 <= mlp.per_token <= mlp.experts
    if mlp.experts and not (known and mlp.expert_columns):
        told = f"{widths.own_experts} experts here of {mlp.experts}, {mlp.per_token} for a token"
        raise UsageError(f"{told}, make no mixture")


def _require_attention(w: Attention) -> None:
    """Raises UsageError."""
    if w.heads % w.kv_heads:
        raise UsageError(f"{w.heads} query heads do not divide over {w.kv_heads} KV heads")
    if (w.rank and not 0 < w.rope < w.head_dim_k) or (w.window and w.chunk):
        raise UsageError("a latent has a rotary part smaller than its heads, and a layer a window or chunks, not both")
    if w.output_gate and (w.rank or w.head_dim_k != w.head_dim_v):
        raise UsageError("an output gate is made as queries are, and is as wide as what K and V of heads give")
    indexer = w.index_heads, w.index_head_dim, w.index_topk
    if any(indexer) and not (all(indexer) and w.rank):
        raise UsageError("an indexer chooses among latents, and has heads, their size and a number to choose")
