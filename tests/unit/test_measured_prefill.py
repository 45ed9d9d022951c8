"""The real layer: its widths, its work, and that chunks compute what the whole prompt does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import UnavailableError, UsageError
from kvxfer.measure import prefill
from kvxfer.measure.prefill import Layer, Widths, computing, widths_of
from kvxfer.model.presets import load_model

torch = pytest.importorskip("torch")

SMALL = Widths(hidden=64, heads=4, kv_heads=2, head_dim_k=16, head_dim_v=16, mlp=96)
ROOM = 1 << 30
WAIT_NS = 20_000_000_000


@pytest.mark.parametrize(
    ("model", "mlp"), [("8b", 14336), ("70b", 28672), ("405b", 53248), ("qwen3-0.6b", 3072), ("qwen3-32b", 25600)]
)
def test_the_mlp_is_what_attention_leaves_of_the_parameters(model: str, mlp: int) -> None:
    shape = load_model(model)
    widths = widths_of(shape)
    assert (widths.hidden, widths.mlp) == (shape.hidden_size, mlp)
    assert shape.params_total is not None
    assert shape.params_embedding is not None
    assert widths.params * shape.layers == pytest.approx(shape.params_total - shape.params_embedding, rel=1e-3)


@pytest.mark.parametrize("model", ["deepseek-v3", "mixtral-8x7b", "gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b"])
def test_other_layers_are_refused(model: str) -> None:
    with pytest.raises(UsageError, match="cannot be computed here"):
        widths_of(load_model(model))


def test_flop_are_those_of_its_matrices_and_half_of_its_pairs() -> None:
    matrices = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
    assert SMALL.flop(10) == matrices * 10 + 4 * 32 * 10 * 10


@pytest.mark.parametrize("chunks", [[24], [8, 8, 8], [1, 22, 1]])
def test_chunks_compute_what_the_whole_prompt_does(chunks: list[int]) -> None:
    layer = Layer(SMALL, 24, ROOM)
    with torch.inference_mode():
        whole = layer._forward(layer._input, 0)
        parts, first = [], 0
        for length in chunks:
            parts.append(layer._forward(layer._input[first : first + length], first))
            first += length
        assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
        assert not torch.allclose(whole, layer._input, atol=1e-1)


def test_a_token_does_not_see_later_ones() -> None:
    layer = Layer(SMALL, 24, ROOM)
    with torch.inference_mode():
        before = layer._forward(layer._input, 0)
        changed = layer._input.clone()
        changed[12:] += 1
        after = layer._forward(changed, 0)
    assert torch.allclose(before[:12], after[:12], atol=1e-5)
    assert not torch.allclose(before[12:], after[12:], atol=1e-2)


def test_times_and_peak() -> None:
    times = Layer(SMALL, 24, ROOM).measure()
    assert len(times.samples_ns) == prefill.SAMPLES
    assert min(times.samples_ns) > 0
    assert times.peak_flop_s is not None
    assert times.peak_flop_s > 0
    assert times.how.startswith("float32 on ")


def test_a_gpu_has_no_peak_of_a_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(SMALL, 24, ROOM)
    monkeypatch.setattr(layer, "_on_gpu", True)
    monkeypatch.setattr(layer, "_finish", lambda: None)
    times = layer.measure()
    assert (times.peak_flop_s, times.how) == (None, "bfloat16 on a GPU")
    assert len(times.samples_ns) == prefill.SAMPLES


def test_all_layers_of_all_chunks_are_computed_until_nobody_wants_them() -> None:
    layer, count = Layer(SMALL, 24, ROOM), [0]

    def done() -> bool:
        count[0] += 1
        return count[0] < 5

    layer.prefill(2, [12, 12], lambda: True)
    layer.prefill(3, [12, 12], done)
    assert count == [5]


@pytest.mark.parametrize(
    ("widths", "tokens", "room", "error", "says"),
    [
        (SMALL, 513, ROOM, UsageError, "513 tokens are too many for --compute layers on a CPU: at most 512"),
        (SMALL, 24, 1000, UnavailableError, "can be used; choose a smaller model"),
        (Widths(64, 4, 3, 16, 16, 96), 24, ROOM, UsageError, "4 query heads do not divide over 3 KV heads"),
        (Widths(64, 4, 2, 16, 16, 1 << 40), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (Widths(64, 0, 2, 16, 16, 96), 24, ROOM, UsageError, "widths of a layer are from 1"),
    ],
)
def test_what_is_beyond_the_budget_is_refused(
    widths: Widths, tokens: int, room: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Layer(widths, tokens, room)


@pytest.fixture
def run_compute() -> Iterator[Callable[[Any], Any]]:
    """Runs the native loop over a compute with nothing to send, between two contexts of this process."""
    contexts = [_native.open_context("null", bytes(32), {}) for _ in range(2)]
    regions = [context.allocate(4096) for context in contexts]
    endpoint = contexts[1].listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(contexts[1].accept, WAIT_NS)
        peers = [contexts[0].connect(endpoint, WAIT_NS), accepted.result()]
        for number in range(2):
            peers[number].import_keys(contexts[1 - number].export_keys([regions[1 - number]]))
        numbers, offsets = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        arrays = numbers, offsets, numbers, offsets, np.full(1, 4096, np.uint64), numbers, WAIT_NS
        prepared = other.submit(contexts[1].prepare, peers[1], *arrays)
        plan = contexts[0].prepare(peers[0], *arrays)
        prepared.result()
    none = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
    request = _native.LoopRequest([_native.Leg(peers[0], plan, *none, *none, none[1])])
    yield lambda compute: _native.run_pipeline(
        contexts[0],
        [request],
        _native.Regions([]),
        [],
        compute,
        _native.Side.prefill,
        _native.Op.push,
        1,
        3,
        False,
        0,
        WAIT_NS,
    )
    for context in contexts:
        context.close()


def test_a_loop_runs_behind_real_layers(run_compute: Callable[[Any], Any]) -> None:
    with computing(Layer(SMALL, 24, ROOM), 2, [12, 12]) as compute:
        result = run_compute(compute)
    times = np.frombuffer(result.compute_ns, np.int64)
    assert len(times) == 3
    assert times.min() > 0


def test_a_failure_while_computing_is_told_and_nothing_hangs(
    run_compute: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls = Layer(SMALL, 24, ROOM), [0]
    threads = threading.active_count()

    def fails(hidden: object, _: int) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no more")
        return hidden

    monkeypatch.setattr(layer, "_forward", fails)
    with pytest.raises(RuntimeError, match="no more"), computing(layer, 4, [24]) as compute:
        run_compute(compute)
    assert threading.active_count() == threads
