"""A real forward pass of a model's layers at their true widths, with random weights, in torch: prefill's own work.

One layer of each kind is built and computed as often as the model has it: projections, causal attention (whole, in
windows, in chunks, MLA), and a gated MLP or routed experts. On a GPU it is in bfloat16, on a CPU in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvxfer.errors import UnavailableError, UsageError
from kvxfer.model.widths import Widths

if TYPE_CHECKING:
    import torch

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
        except ImportError as error:
            raise UnavailableError(NO_TORCH) from error
        if not candidates or not all(1 <= len(kinds) <= MOST_KINDS for kinds in candidates):
            raise UsageError(f"layers are of 1 to {MOST_KINDS} kinds")
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
        needed = [element * sum(_elements(widths, tokens, on_gpu) for widths in kinds) for kinds in candidates]
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
        self._layers = [_Layer(torch, self._options, generator, widths, tokens) for widths in kinds]
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


class _Layer:
    """One layer. A layer of windows or chunks computes only the pairs of tokens in blocks that its mask touches."""

    def __init__(self, module: Any, options: dict[str, Any], generator: Any, widths: Widths, tokens: int) -> None:
        self._torch = module
        self._widths = w = widths
        self._kept: tuple[torch.Tensor, ...]

        def matrix(rows: int, columns: int) -> torch.Tensor:
            weights: torch.Tensor = module.randn(rows, columns, generator=generator, **options)
            return weights.div_(rows**0.5)

        def gated(columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return matrix(w.hidden, columns), matrix(w.hidden, columns), matrix(columns, w.hidden)

        if w.query_rank:
            self._to_query_rank = matrix(w.hidden, w.query_rank)
        self._query = matrix(w.query_rank or w.hidden, w.heads * w.head_dim_k)
        if w.rank:
            self._to_latent = matrix(w.hidden, w.rank + w.rope)
            self._from_latent = matrix(w.rank, w.heads * (w.head_dim_k - w.rope + w.head_dim_v))
            self._kept = (module.zeros(tokens, w.rank + w.rope, **options),)
        else:
            self._key = matrix(w.hidden, w.kv_heads * w.head_dim_k)
            self._value = matrix(w.hidden, w.kv_heads * w.head_dim_v)
            dims = w.head_dim_k, w.head_dim_v
            self._kept = tuple(module.zeros(tokens, w.kv_heads, dim, **options) for dim in dims)
        self._output = matrix(w.heads * w.head_dim_v, w.hidden)
        self._mlp = gated(w.columns) if w.columns else None
        if w.experts:
            self._router = matrix(w.hidden, w.experts)
            self._experts = [gated(w.expert_columns) for _ in range(w.own_experts)]

    def forward(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The layer of tokens [length, hidden] from `first` on, which attend to those before them too."""
        normed = self._normed(hidden)
        end = first + hidden.shape[0]
        query = self._queries(normed)
        keys, values = self._keys_and_values(normed, first, end)
        attended = self._torch.cat(
            [self._attend(query, keys, values, first, *span) for span in self._spans(first, end)]
        )
        hidden = hidden + attended @ self._output
        normed = self._normed(hidden)
        found = hidden
        if self._mlp is not None:
            found = found + self._gated(normed, *self._mlp)
        return found + self._routed(normed) if self._widths.experts else found

    def _queries(self, normed: torch.Tensor) -> torch.Tensor:
        w = self._widths
        if w.query_rank:
            normed = self._normed(normed @ self._to_query_rank)
        query: torch.Tensor = (normed @ self._query).view(-1, w.heads, w.head_dim_k)
        return query

    def _keys_and_values(self, normed: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all tokens up to `end`, for every query head. Of MLA they are made of the latents, earlier chunks' too."""
        w = self._widths
        if not w.rank:
            keys, values = self._kept
            keys[first:end] = (normed @ self._key).view(-1, w.kv_heads, w.head_dim_k)
            values[first:end] = (normed @ self._value).view(-1, w.kv_heads, w.head_dim_v)
            shared = w.heads // w.kv_heads
            return keys[:end].repeat_interleave(shared, 1), values[:end].repeat_interleave(shared, 1)
        (latents,) = self._kept
        latents[first:end] = normed @ self._to_latent
        latent, rotary = latents[:end, : w.rank], latents[:end, w.rank :]
        made = (self._normed(latent) @ self._from_latent).view(end, w.heads, -1)
        unrotated = w.head_dim_k - w.rope
        keys = self._torch.cat([made[..., :unrotated], rotary[:, None].expand(-1, w.heads, -1)], 2)
        return keys, made[..., unrotated:]

    def _spans(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Tokens start … stop, and the first one that any of them attends to."""
        w = self._widths
        step = w.window or w.chunk or end
        start = first
        while start < end:
            stop = min(end, (start // step + 1) * step)
            attended = max(0, start - w.window + 1) if w.window else start // step * step
            yield start, stop, attended
            start = stop

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, start: int, stop: int, low: int
    ) -> torch.Tensor:
        """Of tokens start … stop, to those from `low` on; [stop - start, heads * head_dim_v]."""
        arange, window = self._torch.arange, self._widths.window
        mask = None
        if low != start or window:
            distance = arange(start, stop, device=query.device)[:, None] - arange(low, stop, device=query.device)
            mask = (distance >= 0) & (distance < window) if window else distance >= 0
        parts = query[start - first : stop - first], keys[low:stop], values[low:stop]
        found = self._torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), attn_mask=mask, is_causal=mask is None
        )
        attended: torch.Tensor = found[0].transpose(0, 1).reshape(stop - start, -1)
        return attended

    def _gated(self, normed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = (self._torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down
        return made

    def _routed(self, normed: torch.Tensor) -> torch.Tensor:
        """What the experts here add: each computes the tokens of which it is among the per_token that score highest."""
        w = self._widths
        scores, chosen = (normed @ self._router).topk(w.per_token, 1)
        shares = scores.softmax(1)
        found: torch.Tensor = self._torch.zeros_like(normed)
        for number, weights in enumerate(self._experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                found.index_add_(0, rows, self._gated(normed[rows], *weights) * shares[rows, places, None])
        return found

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm; torch has one of its own only from 2.4 on."""
        normed: torch.Tensor = hidden * self._torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed


def _elements(widths: Widths, tokens: int, on_gpu: bool) -> int:
    """The most that a layer and one pass through it hold at once; a GPU's attention keeps a mask, and no scores."""
    heads = widths.heads * (widths.head_dim_k + widths.head_dim_v)
    wide = 4 * widths.hidden + 3 * max(widths.columns, widths.expert_columns) + 3 * heads + widths.experts
    return widths.params + tokens * wide + (1 if on_gpu else widths.heads) * tokens * tokens


def _require_sensible(widths: Widths, tokens: int) -> None:
    """Raises UsageError: what comes from another process may be anything."""
    w = widths
    here = w.hidden, w.heads, w.kv_heads, w.head_dim_k, w.head_dim_v, tokens
    if not all(1 <= width <= LARGEST_WIDTH for width in here) or not all(
        0 <= width <= LARGEST_WIDTH for width in vars(w).values()
    ):
        raise UsageError(f"widths of a layer are from 1 to {LARGEST_WIDTH}")
    if w.heads % w.kv_heads:
        raise UsageError(f"{w.heads} query heads do not divide over {w.kv_heads} KV heads")
    if (w.rank and not 0 < w.rope < w.head_dim_k) or (w.window and w.chunk):
        raise UsageError("a latent has a rotary part smaller than its heads, and a layer a window or chunks, not both")
    known = w.own_experts <= w.experts <= MOST_EXPERTS and 1 <= w.per_token <= w.experts
    if w.experts and not (known and w.expert_columns):
        raise UsageError(f"{w.own_experts} experts here of {w.experts}, {w.per_token} for a token, make no mixture")
