"""A real forward pass of a model's layers at their true widths, with random weights, in torch: prefill's own work.

One layer is built, and computed as often as the model has layers: projections, causal attention, gated MLP. On a GPU it
is in bfloat16; on a CPU, in float32, it says how compute and transfers share a machine, and nothing of a GPU's time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError, UnavailableError, UsageError
from kvxfer.model.shape import ModelShape

if TYPE_CHECKING:
    import torch

    from kvxfer import _native

MOST_TOKENS_ON_A_CPU = 512
LONGEST_REQUEST_S = 20.0
"""The most that all layers of a prompt may take: a row computes it some dozen times."""

NO_TORCH = "--compute layers needs torch, which is not installed here; `pip install torch`, or give timed or spin"

SAMPLES = 5
PEAK_WIDTH = 1024
"""Of the square matrices whose product is a CPU's peak, which MFU refers to. A GPU's is not that of one small product
that is waited for, but of many large ones in flight: none is measured there, and no MFU told."""

LARGEST_WIDTH = 1 << 20


@dataclass(frozen=True)
class Widths:
    """Of a layer with attention of heads over kv_heads, and a gated MLP of `mlp` columns."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    mlp: int

    @property
    def params(self) -> int:
        """Elements of the layer's weight matrices."""
        query_and_output = self.hidden * self.heads * (self.head_dim_k + self.head_dim_v)
        keys_and_values = self.hidden * self.kv_heads * (self.head_dim_k + self.head_dim_v)
        return query_and_output + keys_and_values + 3 * self.hidden * self.mlp

    def flop(self, tokens: int) -> float:
        """Of one layer over a prompt: two per weight and token, and the pairs of tokens that the mask leaves."""
        return 2.0 * self.params * tokens + self.heads * (self.head_dim_k + self.head_dim_v) * float(tokens) ** 2


def widths_of(shape: ModelShape) -> Widths:
    """The widths of a plain dense model's layers; its MLP is what attention leaves of the parameters.

    Raises UsageError for a model whose layers differ, attend in other ways, have experts, or unknown parameters.
    """
    total, embedding = shape.params_total, shape.params_embedding
    dense = total is not None and embedding is not None and shape.params_active == total
    if not shape.is_plain or not dense or total is None or embedding is None:
        raise UsageError(
            f"the layers of {shape.name} cannot be computed here: only those of dense models of known size, in which "
            "every layer is full attention and a gated MLP; give --compute timed or spin"
        )
    attention = Widths(shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim_k, shape.head_dim_v, 0)
    mlp = int(((total - embedding) / shape.layers - attention.params) / (3 * shape.hidden_size))  # norms are the rest
    return Widths(shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim_k, shape.head_dim_v, max(1, mlp))


@contextlib.contextmanager
def computing(layer: Layer, layers: int, chunks: Sequence[int]) -> Iterator[_native.Compute]:
    """Compute of prompts in these chunks for a native loop, on a thread of its own, which ends with the context.

    Raises what went wrong on that thread, unless the loop has failed by itself.
    """
    from kvxfer import _native

    compute = _native.ExternalCompute(layers * len(chunks))
    failed: list[BaseException] = []

    def work() -> None:
        while compute.await_start():
            try:
                layer.prefill(layers, chunks, compute.unit_ended)
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


@dataclass(frozen=True)
class LayerTimes:
    """One layer over the whole prompt, warm; a CPU's peak in FLOP/s, in the same number format. None on a GPU."""

    samples_ns: list[int]
    peak_flop_s: float | None
    how: str  # "float32 on 2 CPU threads"


class Layer:
    """The layer, its weights and room for the keys and values of one prompt."""

    def __init__(self, widths: Widths, tokens: int, usable_bytes: int) -> None:
        """Raises UsageError, or UnavailableError when there is no torch or not enough memory."""
        try:
            import torch
        except ImportError as error:
            raise UnavailableError(NO_TORCH) from error
        if not all(1 <= width <= LARGEST_WIDTH for width in (*vars(widths).values(), tokens)):
            raise UsageError(f"widths of a layer are from 1 to {LARGEST_WIDTH}")
        if widths.heads % widths.kv_heads:
            raise UsageError(f"{widths.heads} query heads do not divide over {widths.kv_heads} KV heads")
        self._torch = torch
        self._on_gpu = torch.cuda.is_available()
        if not self._on_gpu and tokens > MOST_TOKENS_ON_A_CPU:
            raise UsageError(
                f"{tokens} tokens are too many for --compute layers on a CPU: at most {MOST_TOKENS_ON_A_CPU}; lower "
                "--tokens, or give timed or spin"
            )
        element = 2 if self._on_gpu else 4
        needed = element * (widths.params + 4 * tokens * (widths.hidden + widths.mlp) + widths.heads * tokens * tokens)
        if not self._on_gpu and needed > usable_bytes:
            raise UnavailableError(
                f"a layer takes {needed / 2**30:.3g} GiB in float32, and {usable_bytes / 2**30:.3g} GiB can be used; "
                "choose a smaller model, or give --compute timed or spin"
            )
        self._widths = widths
        self._options: dict[str, Any] = {
            "device": "cuda" if self._on_gpu else "cpu",
            "dtype": torch.bfloat16 if self._on_gpu else torch.float32,
        }
        generator = torch.Generator(device=self._options["device"]).manual_seed(0)
        w = widths
        self._query = self._random(generator, w.hidden, w.heads * w.head_dim_k)
        self._key = self._random(generator, w.hidden, w.kv_heads * w.head_dim_k)
        self._value = self._random(generator, w.hidden, w.kv_heads * w.head_dim_v)
        self._output = self._random(generator, w.heads * w.head_dim_v, w.hidden)
        self._gate = self._random(generator, w.hidden, w.mlp)
        self._up = self._random(generator, w.hidden, w.mlp)
        self._down = self._random(generator, w.mlp, w.hidden)
        self._keys = torch.zeros(1, w.kv_heads, tokens, w.head_dim_k, **self._options)
        self._values = torch.zeros(1, w.kv_heads, tokens, w.head_dim_v, **self._options)
        self._input = torch.randn(tokens, w.hidden, generator=generator, **self._options)

    def measure(self) -> LayerTimes:
        """Warm times of the layer over the whole prompt, and a CPU's peak."""
        torch = self._torch
        with torch.inference_mode():
            samples = self._timed(lambda: self._forward(self._input, 0))
            if self._on_gpu:
                return LayerTimes(samples, None, "bfloat16 on a GPU")
            square = torch.randn(PEAK_WIDTH, PEAK_WIDTH, **self._options)
            peak = self._timed(lambda: square @ square)
        threads = torch.get_num_threads()
        return LayerTimes(
            samples_ns=samples,
            peak_flop_s=2.0 * PEAK_WIDTH**3 / (min(peak) / 1e9),
            how=f"float32 on {threads} CPU thread{'s' * (threads != 1)}",
        )

    def prefill(self, layers: int, chunks: Sequence[int], layer_done: Callable[[], bool]) -> None:
        """Compute a prompt, chunk by chunk and in each layer by layer, until `layer_done` answers False."""
        with self._torch.inference_mode():
            first = 0
            for length in chunks:
                hidden = self._input[first : first + length]
                for _ in range(layers):
                    hidden = self._forward(hidden, first)
                    self._finish()
                    if not layer_done():
                        return
                first += length

    def _forward(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The layer of tokens from `first` on, which attend to those before them too."""
        w = self._widths
        functional = self._torch.nn.functional
        length = hidden.shape[0]
        end = first + length
        normed = self._normed(hidden)
        query = (normed @ self._query).view(1, length, w.heads, w.head_dim_k).transpose(1, 2)
        self._keys[0, :, first:end] = (normed @ self._key).view(length, w.kv_heads, w.head_dim_k).transpose(0, 1)
        self._values[0, :, first:end] = (normed @ self._value).view(length, w.kv_heads, w.head_dim_v).transpose(0, 1)
        shared = w.heads // w.kv_heads
        keys = self._keys[:, :, :end].repeat_interleave(shared, dim=1)
        values = self._values[:, :, :end].repeat_interleave(shared, dim=1)
        mask = (
            self._torch.ones(length, end, dtype=self._torch.bool, device=hidden.device).tril(first) if first else None
        )
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=not first)
        hidden = hidden + attended.transpose(1, 2).reshape(length, -1) @ self._output
        normed = self._normed(hidden)
        found: torch.Tensor = hidden + (functional.silu(normed @ self._gate) * (normed @ self._up)) @ self._down
        return found

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm; torch has one of its own only from 2.4 on."""
        return hidden * self._torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)

    def _random(self, generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
        weights: torch.Tensor = self._torch.randn(rows, columns, generator=generator, **self._options)
        return weights.div_(rows**0.5)

    def _timed(self, work: Callable[[], object]) -> list[int]:
        """Times of `work`, the first of which, cold, is left out."""
        samples = []
        for _ in range(1 + SAMPLES):
            began = time.monotonic_ns()
            work()
            self._finish()
            samples.append(time.monotonic_ns() - began)
        return samples[1:]

    def _finish(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()
