"""What goes over between ranks: the bytes of the published cases, and what must hold for any model and ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_result import example_result
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console
from shared_files import CASES

from kvxfer import bench, plan
from kvxfer.cache.layout import Order, Ranks, rank_pairs
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.wire import Wire, on_the_wire
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.ratio import ratio_rows
from kvxfer.errors import UsageError
from kvxfer.measure.hosts import what_fits
from kvxfer.measure.request import Row, tables
from kvxfer.measure.row import common
from kvxfer.model.dtypes import BF16
from kvxfer.model.presets import load_model, preset_names
from kvxfer.result.file import schema
from kvxfer.result.tables import render

TP = st.sampled_from([1, 2, 4, 8, 16, 32])
PP = st.sampled_from([1, 2, 3, 4])
ORDER: st.SearchStrategy[Order] = st.sampled_from(["nhd", "hnd"])


def wire(model: str, tokens: int, prefill: Ranks, decode: Ranks, held: int = 0, order: Order = "nhd") -> Wire:
    spec = CacheSpec(load_model(model), BF16, order=order)
    pairs = rank_pairs(spec.regions(prefill), spec.regions(decode), order)
    return on_the_wire(pairs, spec.blocks(tokens, held))


@pytest.mark.parametrize(
    ("model", "tp", "per_rank", "replicas"),
    [("llama-3.1-70b", 8, 40_960, 1), ("llama-3.1-70b", 16, 40_960, 2), ("deepseek-v3", 8, 70_272, 8)],
)
def test_bytes_of_the_published_cases(model: str, tp: int, per_rank: int, replicas: int) -> None:
    found = wire(model, 16, Ranks(tp), Ranks(tp))
    assert set(found.pair_bytes.values()) == {16 * per_rank}
    assert found.busiest_rank_bytes == 16 * per_rank
    assert found.bytes == replicas * 16 * load_model(model).kv_bytes_per_token(BF16) == tp * 16 * per_rank
    assert load_model(model).rank_bytes_per_token(BF16, tp) == per_rank


@pytest.mark.skipif(not CASES.is_file(), reason="the shared cases are not here")
def test_the_cases_here_are_the_shared_ones() -> None:
    for case in json.loads(CASES.read_text())["tensor_parallel"]:
        found = wire(case["model"], 1, Ranks(case["tp"]), Ranks(case["tp"]))
        assert found.busiest_rank_bytes == 16 * case["bytes_per_token_per_rank"], case


def test_unequal_sizes_by_hand() -> None:
    """70B, TP 4 to 8: each prefill rank has two heads and feeds two decode ranks; the senders are the busiest."""
    found = wire("70b", 16, Ranks(4), Ranks(8))
    assert found.pair_bytes == {(d // 2, d): 16 * 40_960 for d in range(8)}
    assert found.busiest_rank_bytes == 16 * 81_920
    assert found.pieces == 80 * 8 * 16  # one token's head each
    assert wire("70b", 16, Ranks(4), Ranks(8), order="hnd").pieces == 80 * 8


def test_replicated_heads_are_fetched_from_all_of_their_holders() -> None:
    found = wire("70b", 16, Ranks(16), Ranks(8))
    assert found.bytes == 16 * 327_680
    assert {prefill for prefill, _ in found.pair_bytes} == {0, 3, 4, 7, 8, 11, 12, 15}


@given(st.sampled_from(preset_names()), TP, PP, TP, PP, ORDER, st.integers(1, 20_000), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_the_busiest_rank_has_a_fair_share_at_least_and_all_at_most(
    model: str, tp_prefill: int, pp_prefill: int, tp_decode: int, pp_decode: int, order: Order, tokens: int, hit: float
) -> None:
    prefill, decode = Ranks(tp_prefill, pp_prefill), Ranks(tp_decode, pp_decode)
    held = min(Assumptions(prefix_hit_decode=hit).held_blocks(tokens, 16), -(-tokens // 16) - 1)
    try:
        found = wire(model, tokens, prefill, decode, held, order)
    except UsageError:
        assume(False)
    whole = load_model(model).request_bytes(tokens, 16, BF16, held)
    assert found.bytes >= whole  # replicas only add
    assert found.bytes / min(prefill.count, decode.count) <= found.busiest_rank_bytes <= found.bytes
    assert len(found.pair_bytes) <= prefill.count * decode.count
    if tp_decode == 1:
        assert found.bytes == whole


@given(st.sampled_from(preset_names()), TP, ORDER, st.integers(1, 20_000))
@settings(max_examples=100, deadline=None)
def test_between_equal_ranks_each_moves_its_share(model: str, tp: int, order: Order, tokens: int) -> None:
    try:
        found = wire(model, tokens, Ranks(tp), Ranks(tp), order=order)
    except UsageError:
        assume(False)
    assert sorted(found.pair_bytes) == [(rank, rank) for rank in range(tp)]
    assert found.busiest_rank_bytes == found.bytes // tp
    assert found.pieces == tp * load_model(model).descriptors(tokens, 16, 1)


# --- in the ratio


def ratio(tp: int, tokens: int = 8192, **changes: Any) -> dict[str, Any]:
    """The seed row of 70B between equal tensor-parallel sides."""
    assumptions = Assumptions(params=70e9, tp_prefill=tp, tp_decode=tp, **changes)
    wires = {tokens: wire("70b", tokens, Ranks(tp), Ranks(tp), assumptions.held_blocks(tokens, 16))}
    row: dict[str, Any] = ratio_rows(load_model("70b"), BF16, [tokens], 16, assumptions, (), wires)[0]
    return row


def percent(row: dict[str, Any]) -> list[float]:
    return [link["percent"] for link in row["links"]]


def test_percent_over_shared_links_and_over_one_for_each_rank() -> None:
    alone = ratio_rows(load_model("70b"), BF16, [8192], 16, Assumptions(params=70e9))[0]
    assert percent(ratio(8)) == percent(alone)
    assert percent(ratio(8, links_shared=False)) == pytest.approx([value / 8 for value in percent(alone)])
    assert percent(ratio(16)) == pytest.approx([2 * value for value in percent(alone)])
    assert percent(ratio(16, links_shared=False)) == pytest.approx([value / 8 for value in percent(alone)])
    assert "busiest_rank_bytes" not in alone


def test_rows_say_what_is_on_the_wire_and_fit_the_schema() -> None:
    row = ratio(16, tokens=512, links_shared=False, prefix_hit_decode=0.5)
    assert (row["bytes"], row["busiest_rank_bytes"]) == (2 * 256 * 327_680, 256 * 40_960)
    assert (row["links_shared"], row["rank_pairs"], row["pieces"]) == (False, 16, 16 * 80 * 16)
    Draft202012Validator(schema()["properties"]["ratio"]).validate([row])


def test_nothing_on_the_wire_takes_no_time() -> None:
    assert Wire({}, 0).busiest_rank_bytes == 0
    assumptions = Assumptions(tp_decode=2, prefix_hit_decode=1.0, links_shared=False)
    row = ratio_rows(load_model("70b"), BF16, [64], 16, assumptions, (), {64: Wire({}, 0)})[0]
    assert percent(row) == [0, 0, 0]


# --- on the command line


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_plan_counts_replicated_latents(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "deepseek-v3", "--tokens", "512", "--tp-prefill", "8", "--tp-decode", "8", "--pp-prefill", "2"]
    document = planned(capsys, *argv)
    assert document["ratio"][0]["bytes"] == 8 * 512 * 70_272
    assert document["assumptions"]["gpus"] == 16
    assert document["assumptions"]["tp"] == {"prefill": 8, "decode": 8}
    assert document["assumptions"]["pp"] == {"prefill": 2, "decode": 1}
    for field, value in document.items():
        Draft202012Validator(schema()["properties"][field]).validate(value)


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [([], 4), (["--tp-prefill", "1"], 4), (["--tp-decode", "8"], 4), (["--tp-prefill", "8", "--gpus", "16"], 16)],
)
def test_gpus_are_the_ranks_of_prefill_where_those_are_given(
    argv: list[str], gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys, *argv)["assumptions"]["gpus"] == gpus


def test_plan_where_decode_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--tokens", "64", "--tp-decode", "2", "--prefix-hit-decode", "1")
    assert (document["ratio"][0]["bytes"], document["ratio"][0]["rank_pairs"]) == (0, 0)


def test_plan_says_whose_the_links_are(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "70b", "--tp-prefill", "4", "--tp-decode", "8", "--tokens", "8192"]
    assert plan.main(argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one link that all ranks share, prefill on 4 ranks, decode on 8 (TP 4→8, PP 1→1)" in text
    assert "pieces of a request between 8 rank pairs in layout nhd, at most: 5,242,880 for 8,192 tokens" in text
    assert plan.main([*argv, "--links", "per-rank", "--layout", "hnd"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a link of its own for every rank (the busiest one counts)" in text
    assert "in layout hnd, at most: 327,680 for 8,192 tokens" in text
    assert "2.68 (0.671)" in text
    assert plan.main(["--model", "70b"]) == 0
    assert "rank" not in capsys.readouterr().out


@pytest.mark.parametrize("main", [plan.main, bench.main])
@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--tp-decode", "3"], "--tp-decode 3 does not fit the 8 KV heads"),
        (["--tp-prefill", "12"], "--tp-prefill 12 does not fit the 8 KV heads"),
        (["--tp-prefill", "3", "--tp-decode", "5", "--pp-decode", "40"], "--tp-prefill 3 "),
        (["--tp-prefill", "8", "--tp-decode", "5", "--pp-decode", "40"], "--pp-decode 40"),
        (["--tp-prefill", "8", "--tp-decode", "5", "--pp-prefill", "32"], "--tp-decode 5 "),
        (["--tp-prefill", "0"], "--tp-prefill"),
        (["--tp-decode", "65"], "--tp-decode"),
        (["--tp-decode", "-8"], "--tp-decode"),
        (["--pp-prefill", "33"], "--pp-prefill 33: more pipeline stages than the model's 32 layers; 1 to 32 work"),
        (["--pp-decode", "33", "--tp-decode", "8"], "--pp-decode 33"),
        (["--pp-decode", "x"], "--pp-decode"),
        (["--links", "both"], "--links"),
        (["--links", "both", "--tp-decode", "3"], "--links"),
        (["--layout", "dnh"], "--layout"),
        (["--prefix-hit-decode", "1.5"], "--prefix-hit-decode"),
    ],
)
def test_what_does_not_fit_is_named_and_its_side_alone(
    main: Any, argv: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "8b", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert names in err
    named = names.split()[0]
    assert not any(word in err for word in argv[::2] if word != named)


def test_bench_refuses_a_request_that_decode_holds_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--tokens", "512", "--prefix-hit-decode", "1", "--backend", "null"]) == 2
    assert "nothing to move: decode holds all 32 blocks of 512 tokens" in capsys.readouterr().err


# --- rows of bench


def row(model: str, tokens: int, held_blocks: int, **changes: Any) -> Row:
    return Row(CacheSpec(load_model(model), BF16), "tcp", "push", tokens, held_blocks, **changes)


@given(st.sampled_from(preset_names()), st.integers(1, 20_000), st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_a_row_moves_the_blocks_that_decode_lacks(model: str, tokens: int, share: float) -> None:
    held = int(share * -(-tokens // 16))
    one = row(model, tokens, held)
    assert one.bytes == one.wire.bytes == load_model(model).request_bytes(tokens, 16, BF16, held)
    assert one.bytes == one.spec.request_bytes(tokens, held) == one.prefill_bytes == one.decode_bytes == one.read_bytes


def test_windows_and_states_of_a_prefix_hit() -> None:
    """gpt-oss-20b: of 512 blocks a window keeps 9; Qwen3-Next: a state is there as long as a block is."""
    assert row("gpt-oss-20b", 8192, 500).blocks == [9, 12]
    assert row("gpt-oss-20b", 8192, 508).blocks == [4, 4]
    assert sorted(row("qwen3-next-80b-a3b", 8192, 511).blocks) == [1, 1]
    with pytest.raises(UsageError, match="--prefix-hit-decode"):
        row("8b", 8192, 512).check()


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 400), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_requests_in_flight_share_no_block(inflight: int, more: int, tokens: int, share: float, seed: int) -> None:
    one = row("gpt-oss-20b", tokens, 0, inflight=inflight, fragmentation=share, seed=seed)
    for group in tables(one, inflight + more):
        for side in (group.prefill, group.decode):
            for first in range(len(side)):
                together = np.concatenate([side[(first + i) % len(side)] for i in range(inflight)])
                assert len(set(together.tolist())) == inflight * side.shape[1]


def test_rows_say_what_decode_holds() -> None:
    assert common(row("8b", 8192, 256))["held_tokens"] == 4096
    assert "held_tokens" not in common(row("8b", 8192, 0))


def test_bench_and_ratio_agree_on_the_bytes_of_a_hit() -> None:
    assumptions = Assumptions(prefix_hit_decode=0.29, tp_prefill=2, tp_decode=16)
    held = assumptions.held_blocks(1600, 16)
    one = row("gpt-oss-20b", 1600, held, prefill=Ranks(2), decode=Ranks(16))
    (seed, _) = ratio_rows(one.shape, BF16, [1600], 16, assumptions, (), {1600: one.wire})
    assert (seed["bytes"], seed["held_tokens"]) == (one.bytes, 464)


def test_what_fits_into_memory_is_told_for_the_same_share() -> None:
    one = row("8b", 8192, 256)
    budget = one.decode_bytes // 2

    def fits(wanted: Row, size: int) -> str:
        return what_fits(wanted, lambda row: row.decode_bytes, size)

    assert fits(one, budget) == "--tokens 4096 fits"
    assert fits(replace(one, held_blocks=0), budget) == "--tokens 2048 fits"
    assert fits(one, 0).startswith("not even one block")


def test_tables_say_ranks_and_held_tokens() -> None:
    result = example_result() | {"cost_model": []}  # which has words of its own for what is held out
    text = printed(result)
    assert "TP 1→1, PP 1→1" in text
    assert "held" not in text
    result["results"][0] |= {"held_tokens": 256, "tp": {"prefill": 4, "decode": 8}, "pp": {"prefill": 2, "decode": 1}}
    text = printed(result)
    assert "4→8 2→1 512" in text
    for words in ("TP P→D", "PP P→D", "held tokens", "256", "decode side has already", "tensor-parallel ranks"):
        assert words in text


def test_measured_rows_between_several_ranks_say_so() -> None:
    result = example_result()
    result["results"][0] |= {"tp": {"prefill": 2, "decode": 4}}
    measured = measured_rows(result["results"][:1], "network")
    rows = ratio_rows(load_model("70b"), BF16, [512], 16, Assumptions(), measured)
    assert rows[0]["measured"][0]["tp"] == {"prefill": 2, "decode": 4}
    assert "2→4, 1→1" in printed(result | {"ratio": rows})
    del result["results"][0]["tp"], result["results"][0]["pp"]  # of an earlier version
    assert measured_rows(result["results"][:1], "network")[0].tp == (1, 1)


@pytest.mark.parametrize("value", [None, 2, {"prefill": 2}, {"prefill": "2", "decode": 1}, {"prefill": 0, "decode": 1}])
def test_measured_ranks_that_are_none(value: Any) -> None:
    with pytest.raises(UsageError, match="has tp"):
        measured_rows([example_result()["results"][0] | {"tp": value}], "network")


def printed(result: dict[str, Any]) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        render(result, console)
    return " ".join(capture.get().split())
