"""Requests cut for pipelining: every descriptor in exactly one send, and none before its bytes are computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import bench
from kvxfer.cache.layout import Ranks
from kvxfer.cache.leaving import Leaving
from kvxfer.cache.plan import Segment, TransferPlan, transfer_plan
from kvxfer.cache.sends import Cut, chunk_ends, chunk_lengths, send_ends, sends, sweep
from kvxfer.cache.spec import CacheSpec
from kvxfer.errors import UsageError
from kvxfer.measure.request import Row, tables
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.layers import AttentionAndState, FullAttention, State
from kvxfer.model.presets import load_model
from kvxfer.model.shape import ModelShape
from kvxfer.pipelining import chunk_notices, hit_notices, parse_compute, parse_one_cut, parse_pipeline


def row_of(model: str, tokens: int, block_size: int = 16, **more: object) -> Row:
    return Row(CacheSpec(load_model(model), resolve_dtype("bf16"), block_size), "tcp", "push", tokens, **more)  # type: ignore[arg-type]


def plans_of(row: Row, chunk_tokens: int | None) -> list[TransferPlan]:
    placed = tables(row, 1)
    chunks = [] if chunk_tokens is None else row.chunk_ends(chunk_tokens)
    prefill, decode = ([getattr(group, side)[0] for group in placed] for side in ("prefill", "decode"))
    return [transfer_plan(pair.slices, prefill, decode, chunks) for pair in row.pairs]


def descriptors(plan: TransferPlan) -> set[tuple[int, ...]]:
    columns = (plan.prefill_regions, plan.prefill_offsets, plan.decode_regions, plan.decode_offsets, plan.lengths)
    return set(zip(*(column.tolist() for column in columns), strict=True))


CASES = [
    ("8b", {}),
    ("gpt-oss-20b", {}),  # windows
    ("deepseek-v3.2", {}),  # two regions a layer
    ("8b", {"prefill": Ranks(tp=2), "decode": Ranks(tp=4, side="decode")}),
    ("8b", {"prefill": Ranks(pp=2), "decode": Ranks(tp=2, side="decode")}),
    ("8b", {"prefill": Ranks(together=True), "decode": Ranks(together=True, side="decode")}),
    ("8b", {"prefill": Ranks(2, together=True), "decode": Ranks(4, 2, together=True, side="decode")}),
]


@pytest.mark.parametrize(("model", "more"), CASES)
@pytest.mark.parametrize("chunk_tokens", [16, 40, 512])
def test_chunks_move_what_the_whole_does(model: str, more: dict[str, Ranks], chunk_tokens: int) -> None:
    """With f = 1 no blocks are joined, so the descriptors are the same ones in another order."""
    row = row_of(model, 500, **more)
    for whole, cut in zip(plans_of(row, None), plans_of(row, chunk_tokens), strict=True):
        assert descriptors(cut) == descriptors(whole)
        assert cut.descriptors == whole.descriptors
        assert len(cut.segments) == len(cut.segment_starts)
        assert np.all(np.diff(cut.segment_starts) > 0)


@pytest.mark.parametrize(("model", "more"), CASES)
@pytest.mark.parametrize("cut", [Cut(1), Cut(5), Cut(4, 100)])
def test_every_segment_is_in_one_send_that_is_computed_by_then(model: str, more: dict[str, Ranks], cut: Cut) -> None:
    row = row_of(model, 500, **more)
    plans = plans_of(row, cut.chunk_tokens)
    found = sends([plan.segments for plan in plans], row.layers, cut.layers)
    assert [send.ready_after for send in found] == sorted({send.ready_after for send in found})
    for leg, plan in enumerate(plans):
        assert sorted(number for send in found for number in send.segments[leg]) == list(range(len(plan.segments)))
        for send in found:
            for number in send.segments[leg]:
                segment = plan.segments[number]
                needed = segment.chunk * row.layers + segment.layer + 1
                assert needed <= send.ready_after < needed + cut.layers


@pytest.mark.parametrize(("model", "more"), [*CASES, ("qwen3-next-80b-a3b", {})])
@pytest.mark.parametrize("cut", [Cut(5), Cut(4, 100)])
@pytest.mark.parametrize("fragmentation", [0.0, 1.0])
def test_a_send_weighs_what_its_descriptors_do(
    model: str, more: dict[str, Ranks], cut: Cut, fragmentation: float
) -> None:
    row = row_of(model, 500, fragmentation=fragmentation, **more)
    plans = plans_of(row, cut.chunk_tokens)
    moved: dict[int, tuple[int, int]] = {}
    for send in sends([plan.segments for plan in plans], row.layers, cut.layers):
        size = pieces = 0
        for plan, numbers in zip(plans, send.segments, strict=True):
            starts = [*plan.segment_starts.tolist(), plan.descriptors]
            for number in numbers:
                size += int(plan.lengths[starts[number] : starts[number + 1]].sum())
                pieces += starts[number + 1] - starts[number]
        moved[send.ready_after] = size, pieces
    ends = [row.blocks] if cut.chunk_tokens is None else row.chunk_ends(cut.chunk_tokens)
    after = send_ends([range(row.layers)], cut.layers)
    weights = Leaving(row.pairs, row.layers, len(row.spec.limits)).sends(ends, fragmentation, after)
    assert moved == {
        chunk * row.layers + min((part + 1) * cut.layers, row.layers): weight
        for chunk, parts in enumerate(weights)
        for part, weight in enumerate(parts)
        if weight[0]
    }
    if cut.chunk_tokens is None:
        assert row.leaving(row.tokens, cut.layers) == weights[0]


def test_blocks_of_one_run_are_cut_where_the_chunk_ends() -> None:
    row = row_of("8b", 512, fragmentation=0.0)
    (whole,), (cut,) = plans_of(row, None), plans_of(row, 128)
    assert whole.descriptors == 32
    assert cut.descriptors == 4 * 32
    assert cut.bytes == whole.bytes


def test_a_state_leaves_with_the_last_chunk() -> None:
    row = row_of("qwen3-next-80b-a3b", 500)
    (plan,) = plans_of(row, 128)
    states = {layer for layer, kind in enumerate(row.spec.kinds) if isinstance(kind, State)}
    assert states & {segment.layer for segment in plan.segments}
    assert all(segment.chunk == 3 for segment in plan.segments if segment.layer in states)


@given(st.integers(1, 5000), st.integers(1, 6000), st.integers(1, 64))
@settings(max_examples=200)
def test_a_block_is_complete_when_its_last_token_is_computed(tokens: int, chunk: int, block_size: int) -> None:
    every = -(-tokens // block_size)
    moving = [every, min(3, every), 1]
    ends = chunk_ends(tokens, chunk, block_size, moving)
    lengths = chunk_lengths(tokens, chunk)
    assert sum(lengths) == tokens
    assert len(ends) == len(lengths)
    assert ends[-1] == moving
    for position, count in enumerate(moving):
        for number in range(count):
            last_token = min((every - count + number + 1) * block_size, tokens)
            chunk_of_it = -(-last_token // min(chunk, tokens)) - 1
            assert next(c for c, end in enumerate(ends) if end[position] > number) == chunk_of_it


def test_blocks_of_all_layers_leave_with_the_last_of_their_own() -> None:
    """Attention in the first of three layers, states in all: both begin with layer 0, and the states end with 2."""
    state = Mamba2(heads=2, head_dim=4, groups=1, state=4, kernel=4).layer(2, 2)
    kinds = (AttentionAndState(FullAttention(2, 8, 8), state), state, state)
    shape = ModelShape("tiny", "mamba_hybrid", 3, 64, 8, 8, 8, 8, layer_kinds=kinds)
    side = Ranks(together=True)
    (plan,) = plans_of(Row(CacheSpec(shape, resolve_dtype("bf16")), "tcp", "push", 16, prefill=side, decode=side), None)
    assert plan.lengths.tolist() == [16 * 2 * 32, 3 * state.state_bytes]
    assert [segment.layer for segment in plan.segments] == [0, 2]
    assert [send.ready_after for send in sends([plan.segments], 3, 1)] == [1, 3]


def test_sends_of_layers_without_bytes_are_left_out() -> None:
    segments = [Segment(0, 1), Segment(1, 0), Segment(1, 1), Segment(1, 5)]
    found = sends([segments], 6, 2)
    assert [(send.ready_after, send.segments) for send in found] == [(2, [[0]]), (8, [[1, 2]]), (12, [[3]])]


def test_a_sweep_has_one_layer_and_all_of_them() -> None:
    assert sweep(80) == [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80]
    assert sweep(61) == [1, 2, 4, 8, 16, 32, 61]
    assert sweep(1) == [1]


def test_options() -> None:
    assert parse_pipeline("off", 32, [512]) is None
    assert parse_pipeline(" Sweep ", 4, [512]) == (Cut(1), Cut(2), Cut(4))
    assert parse_pipeline("all", 4, [512]) == (Cut(1), Cut(2), Cut(3), Cut(4))
    assert parse_pipeline("4, 8x256,4", 32, [512]) == (Cut(4), Cut(8, 256))
    assert [str(cut) for cut in (Cut(4), Cut(8, 256))] == ["4", "8x256"]
    assert parse_compute("timed") == ("timed", None)
    assert parse_compute("Spin:2.5") == ("spin", 2.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "--pipeline '0' is not allowed: give off, sweep, all, or layers per send from 1 to 32"),
        ("33", "from 1 to 32"),
        ("4x", "--pipeline '4x'"),
        ("4x0", "--pipeline '4x0'"),
        ("x", "--pipeline 'x'"),
        ("4,", "empty entry"),
        ("1x1", "into 16,384 sends, and a request has at most 4,096"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        parse_pipeline(text, 32, [512])


@pytest.mark.parametrize("text", ["x", "0", "33", "4x0", "sweep", "all", "1,2", ""])
def test_plan_is_offered_what_it_takes(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_one_cut(text, 32, 512)
    assert f"--pipeline '{text}' is not allowed: plan looks at one cut; give off, best, or layers" in str(error.value)
    assert (parse_one_cut("Off", 32, 512), parse_one_cut(" best", 32, 512)) == (None, "best")
    assert parse_one_cut("4x256", 32, 512) == Cut(4, 256)
    with pytest.raises(UsageError, match="into 16,384 sends"):
        parse_one_cut("1x1", 32, 512)


def test_what_is_cached_of_a_prompt_is_no_part_of_plan_s_chunks() -> None:
    """Of 8,192 tokens 819 are computed, of 32,768 more than a chunk of 2,048."""
    cuts, tokens = [Cut(4, 2048)], [8192, 32_768]
    assert chunk_notices(cuts, tokens) == []
    (told,) = chunk_notices(cuts, tokens, lambda count: 0.9 * count)
    assert "what is computed of prompts of 8,192 tokens is no longer than a chunk, and they leave as by" in told


def test_what_bench_has_of_a_prefix_cache_is_said() -> None:
    cuts = [Cut(4), Cut(4, 2048)]
    (chunks,) = hit_notices(cuts, "timed")
    assert chunks.startswith("--pipeline 4x2048: chunks are of whole prompts")
    assert hit_notices(cuts[:1], "spin") == []
    assert "computes whole prompts" in hit_notices(cuts[:1], "layers")[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compute", "spin:2"], "--compute says what --pipeline computes, and there is none"),
        (["--compute", "timed", "--pipeline", "off"], "--compute says what --pipeline computes, and there is none"),
        (["--fit-seconds", "9"], "--fit-seconds says how long --fit measures, and there is none"),
    ],
)
def test_what_bench_would_not_look_at_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--backend", "tcp", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{says}; give both or neither" in line


@pytest.mark.parametrize("text", ["gpu", "layers:2", "timed:", "timed:x", "spin:-1", "timed:1e99", ""])
def test_computes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--compute"):
        parse_compute(text)
