"""Pipelining where every rank has a link of its own: what goes over each, held against real transfer plans."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import plan
from kvxfer.asked import Options, read
from kvxfer.cache.layout import Ranks, pipeline_stages
from kvxfer.cache.leaving import Leaving
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.sends import Cut, chunk_lengths, send_ends, sweep
from kvxfer.cache.spec import CacheSpec
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.pipeline import Link
from kvxfer.cost.pipelined import Crossing, Pipelining
from kvxfer.cost.prefill_source import PrefillRate
from kvxfer.measure.request import Row, tables
from kvxfer.model.dtypes import BF16
from kvxfer.model.presets import load_model

TOKENS = 500
Sides = tuple[int, int, int, int]
"""TP and PP of prefill, TP and PP of decode."""

CASES: list[tuple[str, Sides, str]] = [
    ("8b", (1, 4, 1, 4), "nhd"),
    ("8b", (2, 3, 4, 2), "hnd"),  # stages of 11, 11 and 10 layers, over two of 16
    ("8b", (4, 2, 1, 1), "nhd"),
    ("8b", (1, 2, 2, 4), "hnd-together"),
    ("gpt-oss-20b", (2, 2, 1, 3), "nhd"),  # windows
    ("deepseek-v3.2", (1, 4, 2, 1), "nhd"),  # latents on every rank, two regions a layer
    ("qwen3-next-80b-a3b", (2, 3, 1, 2), "nhd"),  # states
]


def options(model: str, sides: Sides, layout: str, links: str = "per-rank") -> Options:
    tp_prefill, pp_prefill, tp_decode, pp_decode = map(str, sides)
    return Options(
        model=model,
        tokens=str(TOKENS),
        layout=layout,
        tp_prefill=tp_prefill,
        pp_prefill=pp_prefill,
        tp_decode=tp_decode,
        pp_decode=pp_decode,
        links=links,
    )


def row_of(model: str, sides: Sides, layout: str, fragmentation: float) -> Row:
    asked = read(options(model, sides, layout))
    return Row(
        asked.spec(BF16),
        "tcp",
        "push",
        TOKENS,
        fragmentation=fragmentation,
        prefill=asked.prefill,
        decode=asked.decode,
    )


def planned_sends(row: Row, cut: Cut, after: list[int]) -> dict[tuple[int, int], Counter[tuple[int, int, str]]]:
    """By rank pair: bytes and descriptors of (chunk, send), by the segments of the pair's own transfer plan."""
    placed = tables(row, 1)
    chunks = [] if cut.chunk_tokens is None else row.chunk_ends(cut.chunk_tokens)
    prefill, decode = ([getattr(group, side)[0] for group in placed] for side in ("prefill", "decode"))
    found: dict[tuple[int, int], Counter[tuple[int, int, str]]] = {}
    for pair in row.pairs:
        one = transfer_plan(pair.slices, prefill, decode, chunks)
        counts = found.setdefault((pair.prefill_rank, pair.decode_rank), Counter())
        starts = one.segment_starts.tolist()
        for segment, start, end in zip(one.segments, starts, [*starts[1:], one.descriptors], strict=True):
            send = next(number for number, layers in enumerate(after) if segment.layer < layers)
            counts[segment.chunk, send, "bytes"] += int(one.lengths[start:end].sum())
            counts[segment.chunk, send, "descriptors"] += end - start
    return found


def weighed(leaving: Leaving, row: Row, cut: Cut, fragmentation: float, after: list[int]) -> Counter[Any]:
    ends = [row.blocks] if cut.chunk_tokens is None else row.chunk_ends(cut.chunk_tokens)
    counts: Counter[Any] = Counter()
    for chunk, weights in enumerate(leaving.sends(ends, fragmentation, after)):
        for send, (size, pieces) in enumerate(weights):
            counts[chunk, send, "bytes"] += int(size)
            counts[chunk, send, "descriptors"] += int(pieces)
    return +counts


@pytest.mark.parametrize(("model", "sides", "layout"), CASES)
@pytest.mark.parametrize("cut", [Cut(3), Cut(5, 130)], ids=str)
@pytest.mark.parametrize("fragmentation", [0.0, 1.0])
def test_every_rank_pair_s_sends_weigh_what_its_plan_has(
    model: str, sides: Sides, layout: str, cut: Cut, fragmentation: float
) -> None:
    row = row_of(model, sides, layout, fragmentation)
    stages = row.spec.stages(row.prefill)
    after = send_ends(stages, cut.layers)
    planned = planned_sends(row, cut, after)
    assert {prefill for prefill, _ in planned} == set(range(row.prefill.count))
    for pair in row.pairs:
        leaving = Leaving([pair], row.layers, len(row.spec.limits))
        counts = weighed(leaving, row, cut, fragmentation, after)
        assert counts == planned[pair.prefill_rank, pair.decode_rank]
        here = stages[pair.prefill_rank // row.prefill.tp]  # a stage sends nothing but its own layers
        assert all(after[send] in range(here.start + 1, here.stop + 1) for _, send, _ in counts)


@pytest.mark.parametrize(("model", "sides", "layout"), CASES)
@pytest.mark.parametrize("cut", [Cut(4), Cut(1000), Cut(5, 130)], ids=str)
def test_each_link_carries_all_that_its_rank_sends_or_receives(model: str, sides: Sides, layout: str, cut: Cut) -> None:
    """By the option of the command, with ranks that carry the same counted once."""
    asked = read(options(model, sides, layout))
    row = row_of(model, sides, layout, 1.0)
    after = send_ends(row.spec.stages(row.prefill), cut.layers)
    of_ranks: dict[tuple[str, int], Counter[Any]] = {}
    for (prefill, decode), counts in planned_sends(row, cut, after).items():
        for rank in (("prefill", prefill), ("decode", decode)):
            of_ranks[rank] = of_ranks.get(rank, Counter()) + counts
    ends = np.cumsum(chunk_lengths(TOKENS, cut.chunk_tokens)).tolist()
    found = asked.leaving(BF16, 1, 1.0, own_links=True)(TOKENS, ends, cut.layers)
    assert list(found.after) == after
    links = {
        frozenset(
            {
                (chunk, send, what): int(value)
                for chunk, weights in enumerate(link)
                for send, weight in enumerate(weights)
                for what, value in zip(("bytes", "descriptors"), weight, strict=True)
                if value
            }.items()
        )
        for link in found.links
    }
    assert links == {frozenset(counts.items()) for counts in of_ranks.values()}
    busiest = max(sum(n for (_, _, what), n in counts.items() if what == "bytes") for counts in of_ranks.values())
    wire = asked.wire(BF16)
    assert wire is not None
    assert busiest == wire(TOKENS).busiest_rank_bytes


@settings(max_examples=50)
@given(st.integers(1, 100), st.data())
def test_a_stage_sends_its_own_layers_and_all_of_them(layers: int, data: st.DataObject) -> None:
    stages = pipeline_stages(layers, Ranks(pp=data.draw(st.integers(1, min(layers, 16)))))
    together = data.draw(st.integers(1, layers))
    after = send_ends(stages, together)
    assert after == sorted(set(after))
    assert after[-1] == layers
    if together == layers:
        assert after == [layers]
    else:
        assert {stage.stop for stage in stages} <= set(after)
        assert max(np.diff([0, *after])) <= together


RANKS = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 5))
LINKS = st.builds(Link, st.floats(0, 1e8), st.floats(0, 1e7), st.floats(1e-3, 1e3), st.floats(0, 1e5))


def way(sides: Sides, tokens_per_s: float, cut: Cut | None, links: str = "per-rank") -> Pipelining:
    asked = read(options("8b", sides, "nhd", links))
    leaves = asked.leaving(BF16, 1, 1.0, own_links=links == "per-rank")
    return Pipelining(cut, [1], 32, 16, PrefillRate(tokens_per_s), Assumptions(), leaves)


def of(found: Pipelining, link: Link, tokens: int = 1000) -> Any:
    return found.of(Crossing(carrier=link, prompts={tokens: 1}, median=tokens, p99=None, listed=[tokens]))


@settings(max_examples=25, deadline=None)
@given(LINKS, RANKS, st.floats(10, 1e7), st.integers(1, 32), st.none() | st.integers(64, 2000))
def test_exposed_is_never_below_zero_and_the_best_never_above_serial(
    link: Link, sides: Sides, tokens_per_s: float, layers: int, chunk: int | None
) -> None:
    (prompt,) = of(way(sides, tokens_per_s, Cut(layers, chunk)), link).prompts
    assert prompt.exposed_ms >= 0
    best = of(way(sides, tokens_per_s, None), link)
    assert best.layers_per_send in sweep(32)
    assert best.prompts[0].exposed_ms <= best.prompts[0].serial_ms
    assert best.prompts[0].serial_ms == pytest.approx(prompt.serial_ms)


@settings(max_examples=20, deadline=None)
@given(LINKS, st.floats(10, 1e7), st.integers(1, 32), st.sampled_from([1, 2, 4, 8]))
def test_without_stages_it_is_the_busiest_rank_s_share_of_every_layer(
    link: Link, tokens_per_s: float, layers: int, tp: int
) -> None:
    """As many ranks on both sides carry 1/TP of each layer each, in as many pieces as one rank would."""
    several = of(way((tp, 1, tp, 1), tokens_per_s, Cut(layers)), link)
    one = of(way((1, 1, 1, 1), tokens_per_s, Cut(layers)), replace(link, gbyte_s=link.gbyte_s * tp))
    assert several.prompts[0].exposed_ms == pytest.approx(one.prompts[0].exposed_ms, rel=1e-9)
    assert several.break_even_tokens == one.break_even_tokens


def test_early_stages_are_through_before_the_last_begins_by_hand() -> None:
    """4 stages of 8 layers, 1 ms each: a layer's bytes hold a link for 2 ms, so that a stage's link ends 8 ms late.

    Over one link that all share, 32 layers take 64 ms, of which 31 pass behind compute.
    """
    layer_bytes = CacheSpec(load_model("8b"), BF16).request_bytes(1000) / 32
    link = Link(0, 0, layer_bytes / 2e6)
    (own,) = of(way((1, 4, 1, 4), 1000 / 0.032, Cut(1)), link).prompts
    (shared,) = of(way((1, 4, 1, 4), 1000 / 0.032, Cut(1), "shared"), link).prompts
    assert own.exposed_ms == pytest.approx(8 * 2 - 7)
    assert shared.exposed_ms == pytest.approx(32 * 2 - 31)
    assert own.serial_ms == pytest.approx(8 * 2)  # every link its own stage's, all at the same time
    (whole_stages,) = of(way((1, 4, 1, 4), 1000 / 0.032, Cut(16)), link).prompts
    assert whole_stages.exposed_ms == pytest.approx(8 * 2)  # the last stage's, once it has computed all of them


def test_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "70b", "--tokens", "8192", "--pipeline", "1", "--links", "per-rank", "--json", "-"]
    exposed = {}
    for pp in (1, 4):
        assert plan.main([*argv, "--gpus", "4", "--pp-prefill", str(pp), "--pp-decode", str(pp)]) == 0
        document = json.loads(capsys.readouterr().out)
        exposed[pp] = document["plan"]["split"][0]["pipelined"]["prompts"][0]
        told = [notice for notice in document["notices"] if "stage" in notice]
        assert len(told) == (pp > 1)
    assert exposed[4]["serial_ms"] == pytest.approx(exposed[1]["serial_ms"] / 4)
    assert exposed[4]["exposed_ms"] == pytest.approx(exposed[1]["exposed_ms"])  # one layer's, which compute outlasts
