"""Real layers: that they attend to what their mask says, whole or in chunks, and what is said of their time."""

from __future__ import annotations

import os
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
from kvxfer.measure import prefill
from kvxfer.measure.forward import room
from kvxfer.measure.layers import Layers, LayerTimes
from kvxfer.measure.prefill import ON_A_CPU, Computed, computing, measure_prefill, prefill_here
from kvxfer.model import mlp
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.layers import Latent, NoCache, SlidingWindow
from kvxfer.model.mlp import NO_MLP, Mlp
from kvxfer.model.recurrence import GATED_DELTA, MAMBA2, Recurrence
from kvxfer.model.shape import ModelShape
from kvxfer.model.widths import Attention, Widths, shares
from kvxfer.result.file import schema

torch = pytest.importorskip("torch")

# These import torch, which need not be here.
from kvxfer.measure.forward import attention  # noqa: E402
from kvxfer.measure.forward.making import normed  # noqa: E402
from kvxfer.measure.forward.mlp import ACTIVATIONS  # noqa: E402

HEADS = Attention(heads=4, kv_heads=2, head_dim_k=16, head_dim_v=16)
LATENT = Attention(4, 4, 24, 16, rank=32, rope=8, query_rank=40)
INDEXER = replace(LATENT, index_heads=16, index_head_dim=16, index_topk=5)
SMALL = Widths(64, HEADS, mlp=Mlp(96))
EXPERTS = Widths(64, HEADS, mlp=Mlp(32, 8, 2, 48), own_experts=8)
ATTENTION = {
    "full": HEADS,
    "output gate": replace(HEADS, output_gate=True),
    "windows": replace(HEADS, window=5),
    "chunks": replace(HEADS, chunk=7),
    "latent": LATENT,
    "latent, queries of the input": replace(LATENT, query_rank=0),
}
RECURRENCES = {
    "Mamba-2": Recurrence(MAMBA2, 2, 8, 4, 16, 4),
    "gated delta net": Recurrence(GATED_DELTA, 2, 8, 4, 16, 4),
}
DELTA_NET = RECURRENCES["gated delta net"]
SEEING_ALL_BEFORE = {
    **{name: Widths(64, heads, mlp=Mlp(96)) for name, heads in ATTENTION.items()},
    **{name: Widths(64, recurrence=recurrence) for name, recurrence in RECURRENCES.items()},
    "experts": EXPERTS,
}
KINDS = {
    **SEEING_ALL_BEFORE,
    "indexer": Widths(64, INDEXER, mlp=Mlp(96)),
    "no gate": Widths(64, mlp=Mlp(96, gated=False, activation="relu2")),
    "experts of a latent": Widths(64, mlp=Mlp(32, 8, 2, 48, 24, gated=False, activation="relu2"), own_experts=8),
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
    heads = widths.attention or HEADS
    if heads.window:
        return range(max(0, token - heads.window + 1), token + 1)
    return range(token // heads.chunk * heads.chunk if heads.chunk else 0, token + 1)


@pytest.mark.parametrize("kind", SEEING_ALL_BEFORE)
def test_a_token_sees_those_that_its_mask_leaves_and_no_other(kind: str) -> None:
    layers, widths = layer(SEEING_ALL_BEFORE[kind]), SEEING_ALL_BEFORE[kind]
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
    normed, whole = layers._input, layers._layers[0].feed
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
    built = layer(KINDS[kind])
    assert built.weights == KINDS[kind].params


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("span", [1, 5, 64])
def test_spans_compute_what_the_recurrence_does_token_by_token(
    name: str, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the state that earlier tokens left; and the same state is left."""
    w = RECURRENCES[name]
    monkeypatch.setitem(room.SPANS, w.rule, span)
    mixer = layer(Widths(64, recurrence=w))._layers[0].mixer
    generator = torch.Generator().manual_seed(1)
    mixer._state = state = torch.randn(mixer._state.shape, generator=generator)
    query, key = (torch.randn(TOKENS, 2, 8, generator=generator) for _ in range(2))
    key = torch.nn.functional.normalize(key, dim=-1)
    value = torch.randn(TOKENS, 4, 16, generator=generator)
    forgotten, take = -torch.rand(TOKENS, 4, generator=generator), torch.rand(TOKENS, 4, generator=generator)
    corrects = w.rule == GATED_DELTA
    found = mixer._passed(query, key, value, forgotten, take if corrects else None)
    state = state.reshape(4, 8, 16)
    query, key = (part.repeat_interleave(2, 1)[:, :, None] for part in (query, key))  # of each head
    for token in range(TOKENS):
        state = state * forgotten[token].exp()[:, None, None]
        new = value[token][:, None]
        if corrects:
            new = take[token][:, None, None] * (new - key[token] @ state)
        state = state + key[token].transpose(1, 2) @ new
        assert torch.allclose(found[token], (query[token] @ state)[:, 0], atol=1e-4)
    assert torch.allclose(mixer._state.reshape(4, 8, 16), state, atol=1e-4)


def test_tokens_attend_to_those_that_the_indexer_chose_and_to_no_other() -> None:
    """Gathered latents give what all of them do under a mask of the choice."""
    layers = layer(Widths(64, INDEXER))
    mixer, inputs = layers._layers[0].mixer, layers._input
    with torch.inference_mode():
        found = mixer(inputs, 0)
        asking = normed(inputs @ mixer._to_query_rank)
        choices = list(mixer._indexer.choices(inputs, asking, 0))
        assert [(start, stop) for start, stop, _ in choices] == [(0, 5), (5, 24)]
        chosen = choices[1][2]
        assert chosen.shape == (19, 5)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        mask[5:] = torch.zeros(19, TOKENS, dtype=torch.bool).scatter(1, chosen, True)
        assert not mask.triu(1).any()  # nobody sees what comes later
        assert (mask.sum(1) == torch.arange(1, TOKENS + 1).clamp(max=5)).all()
        query = (asking @ mixer._query).view(-1, 4, 24).transpose(0, 1)
        made = (mixer._latents[:, :32] @ mixer._from_latent).view(TOKENS, 4, 32).transpose(0, 1)
        keys = torch.cat([made[..., :16], mixer._latents[None, :, 32:].expand(4, -1, -1)], 2)
        shares = (query @ keys.transpose(1, 2) / 24**0.5).masked_fill(~mask, -torch.inf).softmax(2)
        expected = (shares @ made[..., 16:]).transpose(0, 1).reshape(TOKENS, -1) @ mixer._output
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_indexer_chooses_by_the_weighted_scores_above_0_of_its_heads() -> None:
    layers = layer(Widths(64, INDEXER))
    indexer, inputs = layers._layers[0].mixer._indexer, layers._input
    asking = torch.randn(TOKENS, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        (_, (start, _, chosen)) = indexer.choices(inputs, asking, 0)
        query = (asking[20] @ indexer._query).view(16, 16)
        key = torch.nn.functional.layer_norm(inputs[:21] @ indexer._key, (16,))
        scores = [(torch.relu(query @ one) * (inputs[20] @ indexer._weights)).sum().item() for one in key]
    assert set(chosen[20 - start].tolist()) == set(np.argsort(scores)[-5:].tolist())


@pytest.mark.slow  # what counts them is imported for seconds
@pytest.mark.parametrize("kind", KINDS)
def test_the_products_that_are_computed_are_those_that_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of attention to all tokens, which is torch's own."""
    from torch.utils.flop_counter import FlopCounterMode

    def nothing(query: Any, _: Any, values: Any, **__: Any) -> Any:
        return values[:, :, : query.shape[2]]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", nothing)
    w = KINDS[kind]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layers = layer(w)
        layers._layers[0].forward(layers._input, 0)
    idle = w.mlp.matrices * (w.mlp.experts - w.mlp.per_token) * (w.mlp.latent or 64) * w.mlp.expert_columns
    active = w.params - idle
    extra = 0
    if w.recurrence:
        r = w.recurrence
        active -= r.kernel * r.channels  # no products of matrices
        extra = TOKENS * r.flop_per_token + spans_flop(r)
    if w.attention and w.attention.index_heads:
        active -= INDEXER.rank * 4 * 32  # of keys and values: for the first tokens; later ones' queries are turned
        extra = 2 * INDEXER.rank * 4 * 32 * 5 + choice_flop()
    assert counter.get_total_flops() == 2 * active * TOKENS + extra


def spans_flop(r: Recurrence) -> int:
    """What a span's tokens, all here, do with one another: scores, and values; triangular systems are not counted."""
    pairs = TOKENS * TOKENS
    scores = 2 * pairs * r.keys * (2 if r.rule == GATED_DELTA else 1)
    return scores + 2 * pairs * r.values


def choice_flop() -> int:
    """Of the first 5 tokens and the 19 others: scores of all up to the last of them; those chosen, over latents."""
    scores = sum(2 * tokens * seen * (16 * 16 + 16) for tokens, seen in ((5, 5), (19, 24)))
    turned = 19 * 2 * 4 * 32 * (16 + 16)
    return scores + turned + 19 * 5 * 2 * 4 * (40 + 32)


def test_every_activation_that_is_known_is_computed() -> None:
    assert set(ACTIVATIONS) == set(mlp.ACTIVATIONS)


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
    layers, count = Layers([[SMALL, KINDS["latent"]]], TOKENS, ROOM), [0]

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
        (Widths(64, replace(HEADS, kv_heads=3)), 24, ROOM, UsageError, "4 query heads do not divide over 3 KV heads"),
        (Widths(64, mlp=Mlp(1 << 40)), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (Widths(64, mlp=Mlp(-1)), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (Widths(64, replace(HEADS, heads=0)), 24, ROOM, UsageError, "widths of a layer are from 1"),
        (Widths(64, replace(LATENT, rope=24)), 24, ROOM, UsageError, "a rotary part smaller than its heads"),
        (
            replace(EXPERTS, mlp=Mlp(32, 8, 9, 48)),
            24,
            ROOM,
            UsageError,
            "8 experts here of 8, 9 for a token, make no mixture",
        ),
        (replace(EXPERTS, own_experts=9), 24, ROOM, UsageError, "make no mixture"),
        (replace(EXPERTS, mlp=Mlp(32, 1 << 20, 2, 48)), 24, ROOM, UsageError, "make no mixture"),
        (Widths(64, mlp=Mlp(96, activation="xielu")), 24, ROOM, UsageError, "an activation of silu, .*, not 'xielu'"),
        (Widths(64, replace(HEADS, index_heads=2)), 24, ROOM, UsageError, "an indexer chooses among latents"),
        (Widths(64, replace(INDEXER, index_topk=0)), 24, ROOM, UsageError, "an indexer chooses among latents"),
        (
            Widths(64, recurrence=replace(DELTA_NET, rule="retention")),
            24,
            ROOM,
            UsageError,
            "a Mamba-2 or a gated delta",
        ),
        (Widths(64, replace(LATENT, output_gate=True)), 24, ROOM, UsageError, "an output gate is made as queries are"),
        (Widths(64, replace(HEADS, head_dim_v=8, output_gate=True)), 24, ROOM, UsageError, "an output gate is made as"),
        (Widths(64, HEADS, DELTA_NET), 24, ROOM, UsageError, "a layer has attention or a recurrence"),
        (Widths(64, recurrence=replace(DELTA_NET, heads=5)), 24, ROOM, UsageError, "5 heads do not divide over 2 key"),
        (Widths(64, recurrence=replace(DELTA_NET, kernel=0)), 24, ROOM, UsageError, "widths of a layer are from 1"),
    ],
)
def test_what_is_beyond_the_budget_is_refused(
    widths: Widths, tokens: int, room: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Layers([[widths]], tokens, room)


def test_kinds_of_different_widths_are_refused() -> None:
    with pytest.raises(UsageError, match="layers of one model are all as wide"):
        Layers([[SMALL, Widths(32, mlp=Mlp(96))]], TOKENS, ROOM)


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


def test_others_share_of_the_cpus_is_that_of_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 1.02 s of CPU time in 1 s of two CPUs' time, of which two ticks may be anybody's."""

    class Meter:
        def read(self) -> tuple[int, int, int]:
            return 0, 1_020_000_000, 0

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert prefill._others_share(Meter(), 1_000_000_000) == 0.5  # type: ignore[arg-type]


def test_what_engines_have_kernels_of_their_own_for_is_said_and_counted() -> None:
    mamba = Mamba2(heads=4, head_dim=16, groups=2, state=8, kernel=4).layer(2, 4)
    indexed = Latent(32, 8, 24, 16, index_head_dim=128, index_heads=2, index_topk=5)
    shape = replace(MIXED, layer_kinds=(mamba, indexed, NoCache()), mlps=(NO_MLP, Mlp(96), Mlp(96, gated=False)))
    (found,) = measure_prefill(shape, [16], Assumptions(), lambda _: None)
    told = ", Mamba-2 and the indexer in plain torch operations, not an engine's fused kernel; a CPU's time"
    assert told in found.source
    assert [len(samples) for samples in found.times.samples_ns] == [measured_layers.SAMPLES] * 3
    chosen = 5**2 / 2 + 11 * 5
    work = 4 * 4 * 16 * 8 * 16 + 2 * 4 * (24 + 16) * chosen + 2 * 2 * 128 * 16**2 / 2
    assert found.flop == linear_flop(50_000, 16) + work
    (plain, *_) = shares(MIXED)
    assert "plain torch" not in Computed(MIXED, plain, found.times, 16).source


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
