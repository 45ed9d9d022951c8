"""Real layers: that they attend to what their mask says, whole or in chunks, and what is said of their time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvxfer import _native
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.prefill import attention_flop, linear_flop
from kvxfer.errors import UnavailableError, UsageError
from kvxfer.measure import layers as measured_layers
from kvxfer.measure.layers import Layers, LayerTimes
from kvxfer.measure.prefill import ON_A_CPU, Computed, computing, measure_prefill, prefill_here
from kvxfer.model.layers import Latent, SlidingWindow
from kvxfer.model.mlp import Mlp
from kvxfer.model.shape import ModelShape
from kvxfer.model.widths import Widths, shares
from kvxfer.result.file import schema

torch = pytest.importorskip("torch")

SMALL = Widths(hidden=64, heads=4, kv_heads=2, head_dim_k=16, head_dim_v=16, columns=96)
LATENT = Widths(64, 4, 4, 24, 16, columns=96, rank=32, rope=8, query_rank=40)
EXPERTS = replace(SMALL, columns=32, experts=8, own_experts=8, per_token=2, expert_columns=48)
KINDS = {
    "full": SMALL,
    "windows": replace(SMALL, window=5),
    "chunks": replace(SMALL, chunk=7),
    "latent": LATENT,
    "latent, queries of the input": replace(LATENT, query_rank=0),
    "experts": EXPERTS,
}
TOKENS = 24
ROOM = 1 << 30
WAIT_NS = 20_000_000_000

MIXED = ModelShape(
    "mixed",
    "mla",
    3,
    64,
    4,
    4,
    24,
    16,
    params_total=100_000,
    params_active=60_000,
    params_embedding=10_000,
    layer_kinds=(Latent(32, 8, 24, 16), Latent(32, 8, 24, 16), SlidingWindow(2, 16, 16, window=5)),
    mlps=(Mlp(96), Mlp(32, 8, 2, 48), Mlp(32, 8, 2, 48)),
    query_rank=40,
)
"""Three kinds of layers."""


def layer(widths: Widths) -> Any:
    return Layers([[widths]], TOKENS, ROOM)


def forward(layers: Any, hidden: Any, first: int = 0) -> Any:
    with torch.inference_mode():
        return layers._layers[0].forward(hidden, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[24], [8, 8, 8], [1, 22, 1], [5, 10, 9]])
def test_chunks_compute_what_the_whole_prompt_does(kind: str, chunks: list[int]) -> None:
    layers = layer(KINDS[kind])
    whole = forward(layers, layers._input)
    parts, first = [], 0
    for length in chunks:
        parts.append(forward(layers, layers._input[first : first + length], first))
        first += length
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
    assert not torch.allclose(whole, layers._input, atol=1e-1)


def reach(widths: Widths, token: int) -> range:
    """The tokens that a token attends to."""
    if widths.window:
        return range(max(0, token - widths.window + 1), token + 1)
    return range(token // widths.chunk * widths.chunk if widths.chunk else 0, token + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_those_that_its_mask_leaves_and_no_other(kind: str) -> None:
    layers, widths = layer(KINDS[kind]), KINDS[kind]
    before = forward(layers, layers._input)
    for changed in (0, 6, 13, TOKENS - 1):
        other = layers._input.clone()
        other[changed] += 1
        after = forward(layers, other)
        moved = [token for token in range(TOKENS) if not torch.allclose(after[token], before[token], atol=1e-5)]
        assert moved == [token for token in range(TOKENS) if changed in reach(widths, token)]


def test_experts_get_the_tokens_that_are_routed_to_them() -> None:
    """Half of the experts add what they add among all of them, and only to their tokens; the rest is the same."""
    layers = layer(EXPERTS)
    normed, whole = layers._input, layers._layers[0]
    with torch.inference_mode():
        every = whole._routed(normed)
        parts = []
        experts = whole._experts
        for half in (range(4), range(4, 8)):
            whole._experts = [experts[number] if number in half else _nothing(experts[number]) for number in range(8)]
            parts.append(whole._routed(normed))
        whole._experts = experts[:4]  # a device that has the first half
        first = whole._routed(normed)
        chosen = (normed @ whole._router).topk(2, 1).indices
    assert torch.allclose(parts[0] + parts[1], every, atol=1e-5)
    assert torch.equal(first, parts[0])
    untouched = (chosen >= 4).all(1)
    assert 0 < untouched.sum() < TOKENS
    assert not first[untouched].any()


def _nothing(weights: Any) -> Any:
    return tuple(torch.zeros_like(one) for one in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_that_are_built_are_those_that_are_counted(kind: str) -> None:
    built = layer(KINDS[kind])._layers[0]
    held = [one for name, one in vars(built).items() if name not in ("_torch", "_widths", "_kept", "_experts", "_mlp")]
    held += [one for group in [built._mlp or (), *vars(built).get("_experts", ())] for one in group]
    assert sum(one.numel() for one in held) == KINDS[kind].params


def test_times_and_peak() -> None:
    times = Layers([[SMALL, EXPERTS]], TOKENS, ROOM).measure(TOKENS)
    assert [len(samples) for samples in times.samples_ns] == [measured_layers.SAMPLES] * 2
    assert min(map(min, times.samples_ns)) > 0
    assert times.peak_flop_s > 0
    assert (times.how[:11], times.on_gpu) == ("float32 on ", False)


def test_of_a_prefix_hit_only_the_rest_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, seen = layer(SMALL), set()
    inner = layers._layers[0].forward

    def watched(hidden: Any, first: int) -> Any:
        seen.add((len(hidden), first))
        return inner(hidden, first)

    monkeypatch.setattr(layers._layers[0], "forward", watched)
    layers.measure(20, cached=12)
    assert seen == {(8, 12)}


def test_all_layers_of_all_chunks_are_computed_until_nobody_wants_them() -> None:
    layers, count = Layers([[SMALL, LATENT]], TOKENS, ROOM), [0]

    def done() -> bool:
        count[0] += 1
        return count[0] < 5

    layers.prefill([0, 1], [12, 12], lambda: True)
    layers.prefill([0, 1, 1], [12, 12], done)
    assert count == [5]


@pytest.mark.parametrize(
    ("widths", "tokens", "room", "error", "says"),
    [
        (SMALL, 513, ROOM, UsageError, "513 tokens are too many to compute on a CPU: at most 512"),
        (SMALL, 24, 1000, UnavailableError, "can be used; choose a smaller model"),
        (replace(SMALL, kv_heads=3), 24, ROOM, UsageError, "4 query heads do not divide over 3 KV heads"),
        (replace(SMALL, columns=1 << 40), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (replace(SMALL, columns=-1), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (replace(SMALL, heads=0), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (replace(LATENT, rope=24), 24, ROOM, UsageError, "a rotary part smaller than its heads"),
        (replace(EXPERTS, per_token=9), 24, ROOM, UsageError, "8 experts here of 8, 9 for a token, make no mixture"),
        (replace(EXPERTS, own_experts=9), 24, ROOM, UsageError, "make no mixture"),
        (replace(EXPERTS, experts=1 << 20), 24, ROOM, UsageError, "make no mixture"),
    ],
)
def test_what_is_beyond_the_budget_is_refused(
    widths: Widths, tokens: int, room: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Layers([[widths]], tokens, room)


def test_the_first_share_that_fits_is_built() -> None:
    candidates = [share.kinds for share in shares(MIXED)]
    assert Layers(candidates, TOKENS, ROOM).chosen == 0
    wholes = 4 * sum(one.params for one in candidates[0])
    assert Layers(candidates, TOKENS, wholes).chosen == 1


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_layers, "LONGEST_S", 0.0)
    with pytest.raises(UnavailableError, match=r"a layer takes .* s in float32 on .*lower --tokens"):
        layer(SMALL).measure(TOKENS)


def test_all_layers_take_what_one_of_each_kind_takes_as_often_as_there_are() -> None:
    (share, *_) = shares(MIXED, 2)
    times = LayerTimes([[10, 30, 20], [100, 200, 300], [1000, 1000, 4000]], 1e9, "float32 on 1 CPU thread", False)
    computed = Computed(MIXED, share, times, 16, 4)
    record = computed.as_prefill()
    assert (record["total_ns"], record["least_ns"], record["most_ns"]) == (1220, 1110, 4330)
    assert record["flop"] == (linear_flop(50_000, 12) + attention_flop(MIXED, 16, 4)) / 2
    assert record["mfu"] == pytest.approx(record["flop"] / 1220e-9 / 1e9)
    assert (record["tokens"], record["computed_tokens"], record["devices"]) == (16, 12, 2)
    assert ON_A_CPU in record["source"]
    assert "1/2 of each as on each of 2 devices that exchange nothing" in record["source"]
    jsonschema.validate([record], schema()["properties"]["prefill"])
    on_gpu = replace(computed, times=replace(times, on_gpu=True))
    assert ON_A_CPU not in on_gpu.source


def test_a_prefill_is_measured_of_each_length() -> None:
    found = measure_prefill(MIXED, [16, 8], Assumptions(tp_prefill=2, prefix_hit_prefill=0.25), lambda _: None)
    assert [(one.tokens, one.cached, one.share.devices) for one in found] == [(16, 4, 2), (8, 2, 2)]
    source = prefill_here(found)
    assert source.named() == f"measured here: {found[0].source}"
    assert source.between_ms(4, 16) == found[0].total_ns / 1e6
    assert source.covers(8)
    assert not source.covers(9)
    with pytest.raises(UsageError, match="the prefill of 9 tokens was not measured here"):
        source.between_ms(0, 9)


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
    with computing(layer(SMALL), [0, 0], [12, 12]) as compute:
        result = run_compute(compute)
    times = np.frombuffer(result.compute_ns, np.int64)
    assert len(times) == 3
    assert times.min() > 0


def test_a_failure_while_computing_is_told_and_nothing_hangs(
    run_compute: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, calls = layer(SMALL), [0]
    threads = threading.active_count()

    def fails(hidden: object, _: int) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no more")
        return hidden

    monkeypatch.setattr(layers._layers[0], "forward", fails)
    with pytest.raises(RuntimeError, match="no more"), computing(layers, [0] * 4, [24]) as compute:
        run_compute(compute)
    assert threading.active_count() == threads
