"""`kvxfer plan` as the decision, from the outside: published cases, a trace, measured input, and what is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_result import example_result, prefill
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from shared_files import CASES

from kvxfer import plan
from kvxfer.cost import lines
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.ratio import ratio_rows
from kvxfer.model.dtypes import BF16
from kvxfer.model.presets import load_model
from kvxfer.result import file
from kvxfer.result.file import schema

Captured = pytest.CaptureFixture[str]

ARTICLE = ["--model", "70b", "--params", "70e9", "--gpus", "4", "--eff-tflops", "400"]
SERVED = ["--objective", "latency", "--rate", "2", "--output-tokens", "300", "--decode-step-ms", "30"]
EIGHT_RANKS = ["--tp-prefill", "8", "--tp-decode", "8"]
POOLS = ["--prefill-gpus", "8", "--decode-gpus", "8"]


def planned(capsys: Captured, *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def printed(capsys: Captured, *argv: str) -> str:
    assert plan.main([*argv]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: Captured, *argv: str) -> str:
    assert plan.main([*argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err
    return err


def rule_of(case: dict[str, Any], name: str) -> dict[str, Any]:
    (rule,) = (rule for rule in case["rules"] if rule["rule"] == name)
    return dict(rule)


def trace(tmp_path: Path, requests: int = 400, every_ms: int = 500) -> str:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(requests):
            tokens = (300, 900, 2500, 16_000)[number % 4]
            record = {"timestamp": number * every_ms, "input_length": tokens + number, "output_length": 200}
            file.write(json.dumps(record) + "\n")
    return str(path)


def test_the_published_table_and_stalls(capsys: Captured) -> None:
    if not CASES.exists():
        pytest.skip("the cases are not beside this checkout")
    rows = json.loads(CASES.read_text())["seed_table"]["rows"]
    document = planned(capsys, *ARTICLE, "--tokens", "2048,8192,32768")
    seed = [row for row in document["ratio"] if row["basis"] == "seed"]
    for row, published in zip(seed, rows, strict=True):
        assert round(row["bytes"] / 1e9, 2) == published["kv_gb"]
        assert round(row["prefill_ms"]) == published["prefill_ms"]
        assert [round(link["transfer_ms"]) for link in row["links"]] == published["transfer_ms"]
        assert [round(link["percent"]) for link in row["links"]] == published["percent"]
    (stall,) = (row for row in document["plan"]["stalls"] if (row["tokens"], row["basis"]) == (8192, "seed"))
    assert [round(stall["prompt_ms"]), *(round(chunk["stall_ms"]) for chunk in stall["chunks"])] == [717, 179, 45]


def test_offline_batch_is_skipped(capsys: Captured) -> None:
    for argv in ([], ["--link", "400"], SERVED[2:] + POOLS):
        document = planned(capsys, *ARTICLE, *argv, "--objective", "throughput")
        assert document["verdict"]["answer"] == "skip: no throughput gain"


def test_a_small_cluster_is_skipped(capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, *SERVED, "--total-gpus", "4", "--link", "400")
    assert document["verdict"]["answer"].startswith("skip: lost utilisation")
    served = [*SERVED, "--rate", "0.1", "--prefill-gpus", "4", "--decode-gpus", "4", "--link", "400"]
    document = planned(capsys, *ARTICLE, *served)
    assert document["verdict"]["answer"].startswith("skip: lost utilisation")
    assert document["plan"]["pools"]["prefill"]["busy"] < 0.3


def test_short_prompts_and_low_concurrency_are_skipped(capsys: Captured) -> None:
    served = [*SERVED, "--rate", "0.5", *POOLS, "--tokens", "200,500"]
    assert planned(capsys, *ARTICLE, *served)["verdict"]["answer"] == "skip: chunked prefill is enough"


def test_100_gbit_without_fp8_is_computed_first_and_fp8_is_not(capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, *SERVED, *POOLS, "--link", "100gbe", "--dtype", "bf16,fp8")
    bf16, fp8 = document["verdict"]["cases"]
    assert bf16["answer"] == "compute the ratio first"
    assert not bf16["provisional"]
    assert fp8["answer"] != bf16["answer"]
    assert rule_of(fp8, "slow links")["holds"] is False
    shares = [rule_of(case, "slow links")["numbers"]["percent"] for case in (bf16, fp8)]
    assert shares[0] == pytest.approx(2 * shares[1])
    assert shares[0] == pytest.approx(29, abs=1)
    assert document["verdict"]["answer"].startswith("compute the ratio first: bf16 over 100 Gb/s line rate; ")


def test_a_small_cache_is_no_reason_to_compute_first(capsys: Captured) -> None:
    """MLA: 70,272 bytes a token of 37e9 active parameters."""
    document = planned(capsys, "--model", "deepseek-v3", "--link", "100")
    rule = rule_of(document["verdict"]["cases"][0], "slow links")
    assert rule["holds"] is False
    assert rule["numbers"]["percent"] < 15


def test_data_parallel_ranks_are_engines_of_one_gpu(capsys: Captured) -> None:
    """As docs/verdict.md tells of DeepSeek-V3: 32 GPUs behind one link, or each with one; the pools are as busy."""
    argv = ["--model", "deepseek-v3", "--link", "400", "--tokens", "4096", "--rate", "2"]
    pools = ["--prefill-gpus", "32", "--decode-gpus", "32"]
    together, ranks = (planned(capsys, *argv, *pools, "--gpus", gpus)["plan"] for gpus in ("32", "1"))
    shares = [plan["split"][0]["percent"] for plan in (together, ranks)]
    assert shares == pytest.approx([22.0, 0.69], abs=0.05)
    assert [plan["pools"]["prefill"]["instances"] for plan in (together, ranks)] == [1, 32]
    assert together["pools"]["prefill"]["busy"] == pytest.approx(ranks["pools"]["prefill"]["busy"])


def test_windows_do_not_grow(capsys: Captured) -> None:
    """A long prompt of gpt-oss moves half its layers' tokens: its share falls with the length."""
    short, long = (
        planned(capsys, "--model", "gpt-oss-120b", "--link", "100", "--tokens", tokens)["plan"]["split"][0]["percent"]
        for tokens in ("128", "32768")
    )
    assert long < short / 2


def test_a_fixed_cost_dominates_a_request_of_16_tokens(capsys: Captured) -> None:
    argv = [*ARTICLE, "--tokens", "16,8192", "--link", "400"]
    without, fixed = (planned(capsys, *argv, *more) for more in ([], ["--fixed-ms", "2"]))
    tiny, long = (row["links"][0]["percent"] for row in without["ratio"] if row["basis"] == "seed")
    assert tiny == pytest.approx(long)
    assert any("--fixed-ms" in notice for notice in without["notices"])
    tiny, long = (row["links"][0]["percent"] for row in fixed["ratio"] if row["basis"] == "seed")
    assert long < 8
    assert tiny > 100
    assert fixed["assumptions"]["fixed_ms"] == 2
    assert any("of prompts up to 304 tokens in bf16" in notice for notice in fixed["notices"])
    assert "α = 2 ms for each transfer and γ = 0 µs for each piece besides" in printed(capsys, *argv, "--fixed-ms", "2")


def test_a_strict_target_is_a_strong_candidate(capsys: Captured) -> None:
    argv = [*ARTICLE, *SERVED, *POOLS, "--link", "200", "--tokens", "512,8192"]
    document = planned(capsys, *argv, "--itl-target-ms", "50")
    assert document["verdict"]["answer"] == "strong candidate"
    assert any("misses the target of 50 ms" in reason for reason in document["verdict"]["reasons"])
    document = planned(capsys, *argv, "--itl-target-ms", "90")
    assert rule_of(document["verdict"]["cases"][0], "strict ITL")["holds"] is False  # chunks of 512 do


def test_an_overload_speaks_for_no_split(capsys: Captured) -> None:
    argv = ["--model", "70b", "--link", "400", *SERVED, "--rate", "20", "--itl-target-ms", "500"]
    document = planned(capsys, *argv)
    rule = rule_of(document["verdict"]["cases"][0], "strict ITL")
    assert (rule["holds"], rule["needs"]) == (None, ["--total-gpus"])
    document = planned(capsys, *argv, "--prefill-gpus", "4", "--decode-gpus", "4", "--rate", "1000")
    assert document["verdict"]["answer"] == "undetermined"
    assert any("the prefill pool is too small" in reason for reason in document["verdict"]["reasons"])
    assert rule_of(document["verdict"]["cases"][0], "strict ITL")["holds"] is False  # the path is too narrow too


@pytest.mark.parametrize(
    ("argv", "held_ms"),
    [
        (["--tokens", "2048", "--link", "400", "--pipeline", "1", "--rate", "20"], 32 * 5 + 5.37),
        (["--tokens", "16", "--link", "100", "--rate", "400"], 5 + 0.168),
    ],
)
def test_sends_that_hold_the_path_longer_than_there_is_time_are_no_ground_to_split(
    argv: list[str], held_ms: float, capsys: Captured
) -> None:
    """Two engines of prefill; the bytes alone would take 5 and 7 % of the time."""
    pools = ["--tp-prefill", "4", "--tp-decode", "8", "--prefill-gpus", "8", "--decode-gpus", "16"]
    sends = ["--fixed-ms", "5", "--send-ms", "5", "--output-tokens", "300", "--decode-step-ms", "20"]
    document = planned(capsys, "--model", "8b", *argv, *pools, *sends, "--objective", "latency")
    (path,) = document["plan"]["split"]
    assert path["busy"] == pytest.approx(float(argv[-1]) / 2 * held_ms / 1e3, rel=0.01)
    (case,) = document["verdict"]["cases"]
    rule = rule_of(case, "parallelism")
    assert (rule["holds"], rule["numbers"]["path_busy"]) == (False, path["busy"])
    assert case["answer"] != "strong candidate"
    assert any("more than it can carry" in reason for reason in document["verdict"]["reasons"])


def test_a_decode_side_with_fewer_engines_carries_all_requests_over_fewer_paths(capsys: Captured) -> None:
    """53.7 ms for 4,096 tokens at 200 Gb/s, 30 a second: 10 % of the time of 16 paths, 161 % of that of one."""
    argv = [*ARTICLE, *SERVED, "--rate", "30", "--itl-target-ms", "50", "--tokens", "4096", "--link", "200"]
    document = planned(capsys, *argv, "--prefill-gpus", "64", "--decode-gpus", "4")
    (path,) = document["plan"]["split"]
    assert (path["busy"], path["busy_side"]) == (pytest.approx(1.61, abs=0.01), "decode")
    assert document["verdict"]["answer"] == "undetermined"
    assert any(need.startswith("--decode-gpus that hold the load") for need in document["verdict"]["cases"][0]["needs"])
    told = "the load takes 161% of the time that the path of each decode engine has, more than it can carry"
    assert any(told in reason for reason in document["verdict"]["reasons"])
    assert "161.1% (decode)" in printed(capsys, *argv, "--prefill-gpus", "64", "--decode-gpus", "4")
    wide = planned(capsys, *argv, "--prefill-gpus", "64", "--decode-gpus", "64")
    assert wide["plan"]["split"][0]["busy"] == pytest.approx(0.1, abs=0.01)
    assert wide["verdict"]["answer"] == "strong candidate"


def test_ranks_with_links_of_their_own_are_busy_with_what_they_carry(capsys: Captured) -> None:
    """8 decode ranks carry half of what 4 prefill ranks do; half as many engines make up for it."""
    argv = ["--model", "70b", *SERVED, "--tokens", "4096", "--links", "per-rank", "--link", "200"]
    ranks = ["--tp-prefill", "4", "--tp-decode", "8", "--prefill-gpus", "16"]
    for decode, side in (("16", None), ("32", "prefill"), ("8", "decode")):
        (path,) = planned(capsys, *argv, *ranks, "--decode-gpus", decode)["plan"]["split"]
        assert path["busy_side"] == side


def test_the_decode_pool_s_cache_has_half_of_the_answer_and_every_copy_of_a_head(capsys: Captured) -> None:
    """131,072 bytes a token in 8 KV heads: of 1,000 tokens and 200 of 400, and over 16 ranks each head twice."""
    argv = ["--model", "8b", "--tokens", "1000", "--output-tokens", "400"]
    for more, copies in ([], 1), (["--tp-decode", "16"], 2):
        (held,) = planned(capsys, *argv, *more)["plan"]["pools"]["cache"]
        assert held["bytes_per_sequence"] == 1200 * 131_072 * copies


def test_large_memories_and_counts_are_written_in_full(capsys: Captured) -> None:
    """64 GPUs of 80 GB make 5,120; 300 tokens of 30 ms, 200 a second, are 1,800 sequences of 85 blocks each."""
    argv = [*ARTICLE, *SERVED, "--rate", "200", "--tokens", "1200", "--prefill-gpus", "64", "--decode-gpus", "64"]
    text = printed(capsys, *argv, "--kv-memory-gb", "80")
    assert "1,800 sequences of 0.446 GB take 802 GB of 5,120 GB that the pool has" in text
    assert "has 1,280" in printed(capsys, *argv, "--kv-memory-gb", "20", "--output-tokens", "600")


def test_a_state_is_divided_over_the_ranks_of_decode_and_not_copied_with_the_heads(capsys: Captured) -> None:
    """Qwen3.5-397B over 8 ranks: 2 KV heads four times each, its states once: what moves, and a block for an answer."""
    argv = ["--model", "qwen3.5-397b-a17b", "--tp-prefill", "8", "--tp-decode", "8", "--tokens", "1024"]
    document = planned(capsys, *argv, "--output-tokens", "2")
    (held,) = document["plan"]["pools"]["cache"]
    moved = document["ratio"][0]["bytes"]
    assert moved < held["bytes_per_sequence"] < 1.01 * moved


def test_pieces_are_those_of_the_regions_that_are_asked_for(capsys: Captured) -> None:
    argv = ["--model", "70b", "--tokens", "8192", "--tp-prefill", "2", "--tp-decode", "2"]
    one, two = (planned(capsys, *argv, "--regions", regions)["ratio"][0]["pieces"] for regions in ("1", "2"))
    assert two == 2 * one == 2 * 81_920


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        (["--model", "deepseek-v3", *EIGHT_RANKS, "--fixed-ms", "2"], 176),
        (["--model", "gemma-3-27b", "--fixed-ms", "5"], 480),
        (["--model", "70b", "--dtype", "fp8", *EIGHT_RANKS, "--links", "per-rank", "--fixed-ms", "5"], 12_192),
    ],
)
def test_up_to_which_length_fixed_cost_is_most_goes_by_the_bytes_on_the_link(
    argv: list[str], tokens: int, capsys: Captured
) -> None:
    """Latents that every rank gets, windows, links of one's own: the prompt named is the last whose bytes take less."""
    document = planned(capsys, *argv, "--link", "400", "--tokens", f"{tokens},{tokens + 16}")
    (notice,) = [one for one in document["notices"] if "more than its bytes take" in one]
    assert f"of prompts up to {tokens:,} tokens" in notice
    fixed_ms = document["assumptions"]["fixed_ms"]
    taken = [row["links"][0]["transfer_ms"] - fixed_ms for row in document["ratio"] if row["basis"] == "seed"]
    assert taken[0] < fixed_ms <= taken[1]


def test_what_is_added_to_the_shortest_prompt_is_told_as_a_share_of_its_prefill(capsys: Captured) -> None:
    notices = planned(capsys, *ARTICLE, "--tokens", "16,8192")["notices"]
    short, long = (one for one in notices if one.startswith("α and γ may add"))
    assert short.startswith("α and γ may add to 16 tokens in 80 pieces, whose prefill takes 1.")
    assert "8,192 tokens in 40,960 pieces" in long


def test_figures_of_notices_are_told_without_powers_of_ten(capsys: Captured) -> None:
    """Of a prefill of seconds, and of one that is far less than what is added to it."""

    def told(about: str, *argv: str) -> str:
        (notice,) = [one for one in planned(capsys, *ARTICLE, *argv)["notices"] if about in one]
        return str(notice)

    assert "whose prefill takes 3,683 ms" in told("may add", "--tokens", "32768")
    assert "(1,402 % … 1,870 %)" in told("may add", "--tokens", "16", "--eff-tflops", "40000")
    flops = told("the given prefill", "--tokens", "1", "--prefill-tokens-per-s", "1e5", "--gpus", "1")
    assert flops.startswith("the given prefill of 1 token is 13,")
    assert flops.endswith(" TFLOP/s on one GPU, beside 400 assumed")
    assert "answers of 16,000 tokens mean" in printed(capsys, *ARTICLE, "--output-tokens", "16000")


def test_reasons_of_several_dtypes_and_paths_say_which(capsys: Captured) -> None:
    argv = [*ARTICLE, *SERVED, *POOLS, "--dtype", "bf16,fp8", "--link", "400", "--tokens", "8192"]
    reasons = planned(capsys, *argv)["verdict"]["reasons"]
    assert reasons[0].startswith("bf16: fast links: 400 Gb/s line rate: a transfer is 7.1 % of its prefill")
    assert reasons[1].startswith("fp8_e4m3: fast links: 400 Gb/s line rate: a transfer is 3.55 % of its prefill")
    both = planned(capsys, *argv, "--itl-target-ms", "35")["verdict"]["reasons"]
    assert both[0].startswith("bf16, fp8_e4m3: strict ITL: colocated the p99 ITL misses the target of 35 ms")
    wide = [*ARTICLE, *SERVED, "--prefill-gpus", "64", "--decode-gpus", "4", "--link", "10,400", "--rate", "3"]
    text = printed(capsys, *wide, "--itl-target-ms", "50", "--tokens", "8192")
    assert "10 Gb/s line rate: the load takes 644% of the time" in text


def told_once(notices: list[str], about: str) -> str:
    (notice,) = [one for one in notices if about in one]
    return notice


def test_links_of_ranks_that_nobody_named_are_said_to_change_nothing(capsys: Captured) -> None:
    argv = [*ARTICLE, "--links", "per-rank"]
    assert "--tp-prefill and --tp-decode" in told_once(planned(capsys, *argv)["notices"], "changes nothing here")
    for other in ([*argv, "--tp-prefill", "4"], ARTICLE):
        assert not any("changes nothing" in one for one in planned(capsys, *other)["notices"])


def test_gpus_that_make_no_engine_are_named(capsys: Captured) -> None:
    argv = [*ARTICLE, "--total-gpus", "14", "--pp-decode", "5"]
    told = told_once(planned(capsys, *argv, "--prefill-gpus", "6")["notices"], "make no engine")
    assert "2 of the prefill pool's (engines of 4), 3 of the decode pool's (engines of 5)" in told
    assert told.endswith("2 of all where they are colocated (engines of 4)")
    assert not any("make no engine" in one for one in planned(capsys, *ARTICLE, *POOLS)["notices"])


def test_a_memory_that_nothing_is_set_against_asks_for_what_lacks(capsys: Captured) -> None:
    argv = [*ARTICLE, "--kv-memory-gb", "60", "--rate", "2"]
    told = told_once(planned(capsys, *argv)["notices"], "--kv-memory-gb")
    assert told.endswith("is not known: --decode-gpus, --output-tokens, --decode-step-ms")
    served = planned(capsys, *argv, *SERVED, *POOLS)["notices"]
    assert not any("--kv-memory-gb" in one for one in served)


def test_chunks_too_many_to_look_at_are_refused(capsys: Captured) -> None:
    argv = [*SERVED, "--tokens", "100000000", "--chunk", "512,16"]
    assert "--chunk 16 cuts a prompt of 100,000,000 tokens into more than 200,000 chunks" in refused(capsys, *argv)


def test_short_prompts_that_share_chunks_keep_up_and_meet_the_target(capsys: Captured) -> None:
    """60 a second on each engine, and one of 512 tokens alone in a step of 20 ms could be 41."""
    argv = ["--model", "8b", "--tokens", "512", *SERVED, "--rate", "120", "--decode-step-ms", "20", *POOLS]
    document = planned(capsys, *argv, "--itl-target-ms", "40", "--chunk", "2048", "--link", "400", "--gpus", "8")
    (_, chunked) = document["plan"]["colocated"]["modes"]
    assert chunked["stall_max_ms"] == pytest.approx(4 * document["plan"]["stalls"][-1]["prompt_ms"])
    assert not chunked["overloaded"]
    (case,) = document["verdict"]["cases"]
    assert rule_of(case, "strict ITL")["holds"] is False


def test_parallelism_that_is_named_counts(capsys: Captured) -> None:
    argv = [*ARTICLE, *SERVED, *POOLS, "--link", "150", "--itl-target-ms", "1000"]
    same = planned(capsys, *argv, "--tp-prefill", "4", "--tp-decode", "4")
    assert same["verdict"]["answer"] == "no ground to split"
    other = planned(capsys, *argv, "--tp-prefill", "4", "--tp-decode", "8")
    assert other["verdict"]["answer"] == "strong candidate"
    for one_side in ([], ["--tp-prefill", "4"], ["--pp-decode", "8"]):
        assert planned(capsys, *argv, *one_side)["verdict"]["answer"] == "undetermined"


def test_ranks_that_are_named_make_the_engine(capsys: Captured) -> None:
    """One of decode is as large as prefill's only where nothing was said of it."""
    argv = [*ARTICLE, *SERVED, "--tp-prefill", "4", "--prefill-gpus", "4", "--decode-gpus", "4"]
    for more, engines in (([], 1), (["--tp-decode", "1"], 4), (["--pp-decode", "1"], 4), (["--tp-decode", "2"], 2)):
        decode = planned(capsys, *argv, *more)["plan"]["pools"]["decode"]
        assert (decode["instances"], decode["batch"]) == (engines, pytest.approx(18 / engines))


def test_what_is_missing_is_asked_for_in_its_row(capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, "--link", "400")
    (case,) = document["verdict"]["cases"]
    assert (case["answer"], case["provisional"]) == ("favourable on arithmetic", True)
    assert rule_of(case, "offline batch")["needs"] == ["--objective latency|throughput"]
    assert "--itl-target-ms" in rule_of(case, "strict ITL")["needs"]
    assert any("kvxfer bench --fit --peer" in settled for settled in case["settled_by"])
    text = printed(capsys, *ARTICLE, "--link", "400")
    assert "Verdict: favourable on arithmetic (provisional)" in text
    assert "give --objective latency|throughput" in text
    assert "the path is assumed at line rate" in text


def test_a_trace_gives_lengths_rate_and_answers(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--lengths", trace(tmp_path), "--decode-step-ms", "30", *POOLS, "--kv-memory-gb", "0.5"]
    document = planned(capsys, *argv)
    load = document["plan"]["load"]
    assert (load["requests"], load["arrivals"], load["output_tokens"]) == (400, "trace", 200)
    assert load["requests_per_s"] == pytest.approx(2)
    lengths = [row["tokens"] for row in document["ratio"] if row["basis"] == "seed"]
    assert lengths == [load["prompt_tokens"][name] for name in ("p50", "p90", "p99")]
    assert document["plan"]["colocated"]["instances"] == 4
    assert len(document["plan"]["colocated"]["modes"]) == 3
    assert any("the decode pool is too small" in reason for reason in document["verdict"]["reasons"])
    text = printed(capsys, *argv)
    assert "2 requests/s, as the trace's arrivals" in text
    assert "chunks of 2,048" in text
    given = planned(capsys, *argv, "--tokens", "100", "--rate", "4")
    assert {row["tokens"] for row in given["ratio"]} == {100}
    assert given["plan"]["load"]["requests_per_s"] == 4


def test_documents_fit_the_schema(tmp_path: Path, capsys: Captured) -> None:
    rules = schema()["properties"]
    layers = with_prefill(tmp_path, {512: 300, 8192: 5000})
    for argv in (
        [*ARTICLE],
        ["--model", "70b", "--measured", layers, "--tokens", "512,8192", *SERVED],
        [*ARTICLE, *SERVED, *POOLS, "--rate", "50", "--dtype", "bf16,fp8"],
        [*ARTICLE, *SERVED, "--lengths", trace(tmp_path), "--prefill-tokens-per-s", "9000", "--kv-memory-gb", "20"],
        ["--model", "deepseek-v3", "--tp-prefill", "8", "--tp-decode", "16", "--links", "per-rank", *SERVED],
        ["--kv-bytes-per-token", "1024", "--prefix-hit-prefill", "0.5", "--fixed-ms", "1", *SERVED, *POOLS],
        ["--pipeline", "best", "--fixed-ms", "1", "--send-ms", "1", "--dtype", "bf16,fp8"],
        [*ARTICLE, "--pipeline", "8x512", "--measured", fitted_result(tmp_path), "--tokens", "100,512"],
    ):
        for field, value in planned(capsys, *argv).items():
            Draft202012Validator(rules[field]).validate(value)


def test_the_same_input_gives_the_same_plan(capsys: Captured) -> None:
    first, again = (planned(capsys, *ARTICLE, *SERVED, *POOLS)["plan"] for _ in range(2))
    assert first == again


def test_prefill_as_measured_is_a_basis_of_its_own_and_decides(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--tokens", "1000", "--prefill-tokens-per-s", "5000", "--link", "200"]
    document = planned(capsys, *argv)
    seed, full, given_row = document["ratio"]
    assert [row["basis"] for row in (seed, full, given_row)] == ["seed", "full", "given"]
    assert given_row["prefill_ms"] == pytest.approx(200)
    assert document["plan"]["prefill_source"] == "given: 5,000 tokens/s (--prefill-tokens-per-s)"
    assert document["plan"]["split"][0]["percent"] == pytest.approx(given_row["links"][0]["percent"], rel=0.02)
    assert not any("prefill time is assumed" in reason for reason in document["verdict"]["reasons"])
    assert any("TFLOP/s on each of 4 GPUs" in notice for notice in document["notices"])
    text = printed(capsys, *argv)
    assert "given: 5,000 tokens/s (--prefill-tokens-per-s)." in text
    assert "against assumed prefill" not in text
    times = tmp_path / "times.csv"
    times.write_text("1000,150\n2000,320\n")
    document = planned(capsys, *ARTICLE, "--tokens", "1500", "--prefill-csv", str(times))
    assert document["ratio"][2]["prefill_ms"] == pytest.approx(235)


def with_prefill(tmp_path: Path, times_ms: dict[int, float], **changes: Any) -> str:
    """Between two hosts, with a GPU's prefill of real layers."""
    result = json.loads(Path(network_result(tmp_path)).read_text())
    on_gpu = {"on_gpu": True, "how": "bfloat16 on one GPU", "source": "bfloat16 on one GPU, real layers"} | changes
    result["prefill"] = [
        prefill() | {"tokens": tokens, "computed_tokens": tokens, "total_ns": round(ms * 1e6)} | on_gpu
        for tokens, ms in times_ms.items()
    ]
    path = tmp_path / "prefill.json"
    path.write_text(json.dumps(result))
    return str(path)


def test_a_gpu_s_prefill_of_real_layers_decides_and_is_named(tmp_path: Path, capsys: Captured) -> None:
    argv = ["--model", "70b", "--measured", with_prefill(tmp_path, {512: 300, 8192: 5000}), "--tokens", "512,8192"]
    document = planned(capsys, *argv, *SERVED, *POOLS, "--pipeline", "best")
    (row, _) = [row for row in document["ratio"] if row["basis"] == "layers"]
    assert (row["prefill_ms"], document["assumptions"]["gpus"]) == (300, 1)
    source = "measured by --measure-prefill: bfloat16 on one GPU, real layers; MFU 73 %"
    assert document["plan"]["prefill_source"] == row["prefill_source"] == source
    assert document["plan"]["colocated"]["basis"] == "layers"
    assert document["plan"]["split"][0]["percent"] == pytest.approx((52.4 + 912) / 5300 * 100)
    assert any("layers of random weights without an engine" in reason for reason in document["verdict"]["reasons"])
    assert not any("prefill time is assumed" in reason for reason in document["verdict"]["reasons"])
    assert any("is of 1 GPU; figures that name no basis, and the verdict, go by it" in n for n in document["notices"])
    given = planned(capsys, *argv, "--prefill-tokens-per-s", "9000")
    assert given["plan"]["prefill_source"].startswith("given: 9,000 tokens/s")
    assert given["assumptions"]["gpus"] == 4
    assert source in printed(capsys, *argv)


@pytest.mark.parametrize(
    ("times_ms", "changes", "more", "why"),
    [
        ({512: 300, 8192: 5000}, {}, ["--gpus", "4"], "it is of 1 GPU, and a prefill has 4 here (--gpus)"),
        ({512: 300}, {}, [], "it reaches 512 tokens, and the prompts have 512 … 8,192"),
        (
            {512: 300, 8192: 5000},
            {},
            ["--prefix-hit-prefill", "0.5"],
            "it reaches 512 … 8,192 tokens, and the prompts, and what is cached of them, have 256",
        ),
        ({512: 300, 1024: 300, 8192: 5000}, {}, [], "longer prompts took no longer"),
        ({512: 300, 8192: 5000}, {"on_gpu": False}, [], "a CPU's time says nothing of a GPU's"),
    ],
)
def test_why_a_prefill_of_real_layers_decides_nothing(
    times_ms: dict[int, float],
    changes: dict[str, Any],
    more: list[str],
    why: str,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    argv = ["--model", "70b", "--measured", with_prefill(tmp_path, times_ms, **changes), "--tokens", "512,8192", *more]
    document = planned(capsys, *argv)
    assert document["plan"]["prefill_source"].startswith("assumed: ")
    assert any("prefill time is assumed" in reason for reason in document["verdict"]["reasons"])
    assert any(f"decides nothing here: {why}" in notice for notice in document["notices"])


@pytest.mark.parametrize("damage", [{"how": 7}, {"devices": 0}, {"on_gpu": 1}, {"source": None}, {"mfu": "x"}])
def test_a_damaged_prefill_is_refused(damage: dict[str, Any], tmp_path: Path, capsys: Captured) -> None:
    (name,) = damage
    assert f"prefill has {name}" in refused(capsys, "--measured", with_prefill(tmp_path, {512: 300}, **damage))


def test_break_even_is_looked_for_among_prefills_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a shorter prompt half of which is cached the file may know the whole and not the half."""
    times = tmp_path / "times.csv"
    times.write_text("512,100\n1024,150\n8192,900\n")
    argv = ["--tokens", "8192", "--prefix-hit-prefill", "0.5", "--prefill-csv", str(times)]
    document = planned(capsys, *ARTICLE, *argv, "--pipeline", "1", "--fixed-ms", "10", "--send-ms", "10")
    assert document["plan"]["split"][0]["pipelined"]["break_even_tokens"] is not None


def network_result(tmp_path: Path, **changes: Any) -> str:
    result = example_result() | {"scope": "network"}
    for row in result["results"]:
        row.update(scope="network", **changes)
    result["cost_model"] = []
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    return str(path)


def test_what_was_measured_between_two_hosts_takes_the_place_of_line_rates(tmp_path: Path, capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, "--measured", network_result(tmp_path), "--tokens", "512,8192")
    (path,) = document["plan"]["split"]
    assert path["measured"]
    assert path["path"] == "tcp push, measured at 512 … 8,192 tokens"
    assert path["reached"] == 1
    (case,) = document["verdict"]["cases"]
    assert case["answer"] == "compute the ratio first"  # 2.7 GB in 912 ms: 24 Gb/s
    assert not any("line rate" in settled for settled in case["settled_by"])


def test_what_was_measured_counts_for_the_prompts_of_a_trace(tmp_path: Path, capsys: Captured) -> None:
    """Three in four have 512 to 8,192 tokens; what is asked for is a measurement that reaches the others too."""
    measured = network_result(tmp_path)
    argv = [*ARTICLE, *SERVED, "--measured", measured]
    document = planned(capsys, *argv, "--lengths", trace(tmp_path))
    (path,) = document["plan"]["split"]
    assert path["path"].startswith("tcp push, measured at 512 … 8,192 tokens, 6")
    assert 0.5 < path["reached"] < 0.75
    reasons = " ".join(document["verdict"]["reasons"])
    assert "does not reach all prompts" in reasons
    assert "--measured" not in reasons
    lengths = tmp_path / "lengths"
    lengths.write_text("9000\n10000\n")
    document = planned(capsys, *argv, "--lengths", str(lengths))
    assert not any(path["measured"] for path in document["plan"]["split"])
    assert "--measured" not in " ".join(document["verdict"]["reasons"])
    unused = "tcp push, measured at 512 … 8,192 tokens, reaches none of the prompts (9,000 … 10,000 tokens)"
    assert any(unused in notice for notice in document["notices"])


FITTED_RANGE = {"bytes": [10_000_000, 83_886_080], "descriptors": [80, 1_280]}


def fitted_result(tmp_path: Path, scope: str = "network", **changes: Any) -> str:
    """Its rows are of 512 and 8,192 tokens, its cost model holds from 16 to 256."""
    result = example_result() | {"scope": scope}
    for row in result["results"]:
        row.update(scope=scope)
    for model in result["cost_model"]:
        model.update(scope=scope, **changes)
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(result))
    return str(path)


def test_other_lengths_and_fragmentations_are_predicted_from_a_cost_model(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--measured", fitted_result(tmp_path), "--tokens", "100,200,512"]
    document = planned(capsys, *argv)
    by_tokens = {row["tokens"]: row for row in document["ratio"] if row["basis"] == "seed"}
    (entry,) = by_tokens[200]["predicted"]
    size, pieces = 208 * 327_680, 13 * 80
    wire_ns = 4_194_304 / 9.1 + 20_500 + (size - 4_194_304) / 5.29
    assert (entry["backend"], entry["op"], entry["descriptors"]) == ("tcp", "push", pieces)
    assert entry["transfer_ms"] == pytest.approx((63_700 + 151 * pieces + wire_ns) / 1e6)
    assert entry["low_ms"] < entry["transfer_ms"] < entry["high_ms"]
    assert entry["percent"] == pytest.approx(entry["transfer_ms"] / by_tokens[200]["prefill_ms"] * 100)
    (outside,) = by_tokens[512]["predicted"]
    assert outside["transfer_ms"] is None
    assert "outside" in printed(capsys, *argv)
    told = (
        "was fitted on 5.24 … 83.9 MB in 80 … 1,280 pieces: nothing is predicted of 512 tokens (168 MB in 2,560 pieces)"
    )
    assert [notice for notice in document["notices"] if "nothing is predicted" in notice] == [
        f"tcp push in bf16 {told}"
    ]
    held_out = "and off by 3.20 % at the median on requests held out"
    fitted = f"fitted on 5.24 … 83.9 MB in 80 … 1,280 pieces, {held_out}; nothing is predicted outside"
    assert fitted in " ".join(printed(capsys, *argv).split())
    assert not any("not measured" in notice and "100 tokens" in notice for notice in document["notices"])
    together, apart = (
        planned(capsys, *argv, *more)["ratio"][0]["predicted"][0]
        for more in (["--fragmentation", "0"], ["--regions", "2"])
    )
    assert (together["descriptors"], apart["descriptors"]) == (80, 2 * 7 * 80)
    assert apart["transfer_ms"] - together["transfer_ms"] == pytest.approx(151 * 13 * 80 / 1e6)


def test_a_cost_model_takes_the_place_of_rows_that_reach_fewer_prompts(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--measured", fitted_result(tmp_path)]
    (path,) = planned(capsys, *argv, "--tokens", "100,200")["plan"]["split"]
    assert path["path"] == "tcp push, fitted on 5.24 … 83.9 MB in 80 … 1,280 pieces"
    assert (path["measured"], path["reached"]) == (True, 1)
    (path,) = planned(capsys, *argv, "--tokens", "512,8192")["plan"]["split"]
    assert path["path"] == "tcp push, measured at 512 … 8,192 tokens"
    (path,) = planned(capsys, *argv, "--tokens", "100,200,512")["plan"]["split"]
    assert path["path"].startswith("tcp push, fitted on")
    assert path["path"].endswith("66.7% of the prompts")


def test_no_verdict_from_a_cost_model_of_one_host(tmp_path: Path, capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, "--measured", fitted_result(tmp_path, "loopback"), "--tokens", "100")
    assert document["verdict"] is None
    assert [path["measured"] for path in document["plan"]["split"]] == [False] * 3
    assert document["ratio"][0]["predicted"][0]["scope"] == "loopback"


def test_a_damaged_cost_model_is_refused_and_one_between_other_ranks_not_used(tmp_path: Path, capsys: Captured) -> None:
    assert "damaged" in refused(capsys, "--measured", fitted_result(tmp_path, valid={}))
    argv = ["--model", "70b", "--measured", fitted_result(tmp_path), "--tp-prefill", "2", "--tokens", "100"]
    document = planned(capsys, *argv)
    assert "predicted" not in document["ratio"][0]
    assert any("one rank on each side" in notice for notice in document["notices"])


def test_pipelining_is_predicted_for_links_that_are_not_at_hand(capsys: Captured) -> None:
    """A layer of 80 is left of an 8192-token prompt behind a link that keeps up; serial is the ratio's own time."""
    argv = [*ARTICLE, "--tokens", "8192", "--link", "100"]
    document = planned(capsys, *argv, "--pipeline", "1")
    (path,) = document["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    assert prompt["serial_ms"] == pytest.approx(path["median_ms"])
    assert prompt["exposed_ms"] == pytest.approx(path["median_ms"] / 80)
    assert path["pipelined"]["percent"] == pytest.approx(path["percent"] / 80)
    assert path["pipelined"]["break_even_tokens"] == 16
    assert planned(capsys, *argv)["plan"]["split"][0]["pipelined"] is None
    (chunked,) = planned(capsys, *argv, "--pipeline", "80x2048")["plan"]["split"][0]["pipelined"]["prompts"]
    assert chunked["exposed_ms"] == pytest.approx(path["median_ms"] / 4)


def test_layers_weigh_what_they_keep_when_they_are_pipelined(capsys: Captured) -> None:
    """The last layer of gemma-3 keeps a window of 1,024 tokens (65 blocks), one of qwen3-next's a whole prompt."""
    argv = ["--link", "100", "--pipeline", "1", "--tokens", "32768"]
    (path,) = planned(capsys, "--model", "gemma-3-27b", *argv)["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    assert prompt["serial_ms"] == pytest.approx(path["median_ms"])
    assert prompt["exposed_ms"] == pytest.approx(65 * 16 * 8192 * 8 / 100e9 * 1e3)
    (path,) = planned(capsys, "--model", "qwen3-next-80b-a3b", *argv)["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    assert prompt["exposed_ms"] == pytest.approx(32_768 * 2048 * 8 / 100e9 * 1e3)


def test_a_state_leaves_with_the_last_chunk(capsys: Captured) -> None:
    """All layers of each chunk together: what is left is the last chunk's tokens, and all of the states."""
    argv = ["--model", "qwen3-next-80b-a3b", "--link", "100", "--tokens", "32768", "--pipeline", "48x16384"]
    document = planned(capsys, *argv)
    (path,) = document["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    moved = document["models"][0]
    left = moved["kv_bytes_per_token"] * 16_384 + moved["fixed_bytes_per_request"]
    assert prompt["exposed_ms"] == pytest.approx(left * 8 / 100e9 * 1e3)


def one_layer(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    path.write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 1000}))
    return str(path)


def test_what_pipelining_assumes_of_compute_is_said(tmp_path: Path, capsys: Captured) -> None:
    """Of one layer there is nothing to share."""
    told = "a prompt's compute is shared out evenly over its "
    one = ["--pipeline", "1", "--model", one_layer(tmp_path)]
    for argv, times in (["--pipeline", "8"], 1), ([], 0), (one, 0):
        notices = planned(capsys, *ARTICLE, *argv)["notices"]
        assert sum(told in notice for notice in notices) == times


def test_short_prompts_lose_by_pipelining_where_sends_cost(capsys: Captured) -> None:
    argv = [*ARTICLE, "--link", "100", "--fixed-ms", "2", "--send-ms", "0.5"]
    (path,) = planned(capsys, *argv, "--tokens", "16,8192", "--pipeline", "8")["plan"]["split"]
    short, long = path["pipelined"]["prompts"]
    assert short["exposed_ms"] > short["serial_ms"]
    assert long["exposed_ms"] < long["serial_ms"] / 5
    assert 16 < path["pipelined"]["break_even_tokens"] < 512
    (alone,) = planned(capsys, *argv, "--send-ms", "2", "--tokens", "16", "--pipeline", "best")["plan"]["split"]
    assert alone["pipelined"]["layers_per_send"] == 80
    text = printed(capsys, *argv, "--tokens", "64", "--pipeline", "best")
    assert "α = 2 ms for each transfer (0.5 ms of it for each send of a pipelined one) and γ = 0 µs" in text
    assert "--pipeline best takes the best of bench's sweep" in text
    assert "pays from: the shortest prompt from which on this cut is no slower than serial" in text


def test_the_verdict_counts_what_pipelining_leaves_and_says_that_it_is_a_model(capsys: Captured) -> None:
    argv = [*ARTICLE, *SERVED, *POOLS, "--link", "100gbe"]
    assert planned(capsys, *argv)["verdict"]["answer"] == "compute the ratio first"
    document = planned(capsys, *argv, "--pipeline", "best", "--fixed-ms", "0.5", "--send-ms", "0.1")
    (case,) = document["verdict"]["cases"]
    rule = rule_of(case, "slow links")
    assert rule["holds"] is False
    assert rule["numbers"]["exposed_percent"] < 1 < 29 < rule["numbers"]["percent"] + 1
    assert "leaves exposed" in rule["why"]
    assert any("by a model" in settled for settled in case["settled_by"])


def test_sends_that_are_assumed_to_cost_nothing_hide_nothing_of_the_verdict(capsys: Captured) -> None:
    """α alone is paid once, so that the most sends are still the best."""
    argv = [*ARTICLE, *SERVED, *POOLS, "--link", "100", "--pipeline", "best"]
    for more, counts in ([], False), (["--fixed-ms", "0.5"], False), (["--gamma-us", "0.01"], True):
        document = planned(capsys, *argv, *more)
        (case,) = document["verdict"]["cases"]
        rule = rule_of(case, "slow links")
        assert (rule["holds"], case["answer"] == "compute the ratio first") == (not counts, not counts)
        assert rule["rests_on"][-1] == ("model" if counts else "sends")
        assert any("--send-ms and --gamma-us" in settled for settled in case["settled_by"]) is not counts
        assert any("the most sends are always best" in notice for notice in document["notices"]) is not counts


def test_the_sizes_of_chunks_decide_and_are_an_assumption_unless_given(capsys: Captured) -> None:
    """Chunks of 128 meet a target of 50 ms that the usual ones miss."""
    argv = ["--model", "70b", "--link", "200", *SERVED, *POOLS, "--itl-target-ms", "50"]
    for chunks, answer, told in (
        ([], "strong candidate", True),
        (["--chunk", "2048,512"], "strong candidate", False),
        (["--chunk", "2048,512,256,128"], "favourable on arithmetic", False),
    ):
        (case,) = planned(capsys, *argv, *chunks)["verdict"]["cases"]
        assert case["answer"] == answer
        assert any("only the usual chunk sizes" in settled for settled in case["settled_by"]) is told


def test_one_decode_step_for_engines_with_more_sequences_is_an_assumption(capsys: Captured) -> None:
    """12 GPUs that decode make as many engines of one as all 16 of four, and more."""
    argv = ["--model", "70b", "--link", "200", *SERVED, "--itl-target-ms", "50", "--prefill-gpus", "4"]
    for more, told in (["--decode-gpus", "12"], True), (["--decode-gpus", "12", "--tp-decode", "1"], False):
        (case,) = planned(capsys, *argv, *more)["verdict"]["cases"]
        assert ("decode step" in rule_of(case, "strict ITL")["rests_on"]) is told
        assert any("equally long on colocated engines" in settled for settled in case["settled_by"]) is told


def test_pipelining_over_a_measured_path_takes_two_lengths(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--pipeline", "8", "--tokens", "512,8192"]
    (path,) = planned(capsys, *argv, "--measured", network_result(tmp_path))["plan"]["split"]
    serial = [prompt["serial_ms"] for prompt in path["pipelined"]["prompts"]]
    assert serial == pytest.approx([52.4, 912])
    assert path["pipelined"]["percent"] < path["percent"]
    result = json.loads(Path(network_result(tmp_path)).read_text())
    del result["results"][1:]
    (tmp_path / "one.json").write_text(json.dumps(result))
    document = planned(capsys, *argv, "--measured", str(tmp_path / "one.json"))
    (path,) = document["plan"]["split"]
    assert (path["measured"], path["pipelined"]) == (True, None)
    told = (
        "bf16 over tcp push, measured at 512 tokens, 50% of the prompts: one size does not tell what smaller sends take"
    )
    assert sum(told in notice for notice in document["notices"]) == 1
    without = planned(capsys, *argv[:-4], "--tokens", "512,8192", "--measured", str(tmp_path / "one.json"))
    assert not any("smaller sends" in notice for notice in without["notices"])


def test_a_measured_transfer_is_the_same_pipelined_or_not(tmp_path: Path, capsys: Captured) -> None:
    """1,000 tokens move as 63 blocks of 16."""
    argv = [*ARTICLE, "--measured", network_result(tmp_path), "--tokens", "1000", "--pipeline", "1"]
    (path,) = planned(capsys, *argv)["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    assert path["median_ms"] == pytest.approx(52.4 + (912 - 52.4) * (63 * 16 - 512) / (8192 - 512))
    assert prompt["serial_ms"] == pytest.approx(path["median_ms"])


SENDS_OF_A_ROW = {
    "compute": {"source": "--compute", "layers": 80, "layer_ns": 1_000_000},
    "cuts": [{"cut": "1", "sends": 80, "exposed_ns": 5}, {"cut": "80", "sends": 1, "exposed_ns": 9}],
    "best": {"cut": "1"},
    "model": {"latency_ns": 10_000, "occupancy_ns": 20_000, "bandwidth_gbyte_s": 2.5},
}
"""Of 8,192 tokens, whose requests take 912 ms, they take 1,074."""


def test_serial_is_told_as_the_sends_have_it_and_counts_as_requests_were_measured(
    tmp_path: Path, capsys: Captured
) -> None:
    measured = network_result(tmp_path, pipeline=SENDS_OF_A_ROW)
    argv = [*ARTICLE, *SERVED, "--measured", measured, "--tokens", "8192", "--pipeline", "80"]
    document = planned(capsys, *argv)
    (path,) = document["plan"]["split"]
    (prompt,) = path["pipelined"]["prompts"]
    prefill_ms = path["median_ms"] / path["percent"] * 100
    assert (path["median_ms"], round(prompt["serial_ms"])) == (912, 1074)
    assert path["pipelined"]["serial_percent"] == pytest.approx(prompt["serial_ms"] / prefill_ms * 100)
    assert path["pipelined"]["percent"] == path["pipelined"]["serial_percent"]
    (notice,) = (notice for notice in document["notices"] if "serial takes" in notice)
    assert "serial takes 142 % of prefill as pipelining measured its sends" in notice
    assert "and 121 % as requests took that followed each other" in notice
    assert "142% 142%" in printed(capsys, *argv)
    network_result(tmp_path)  # the same file, of rows that were not pipelined
    assert not any("serial takes" in notice for notice in planned(capsys, *argv)["notices"])


def test_a_cut_that_never_pays_is_said_to(capsys: Captured) -> None:
    argv = [*ARTICLE, "--link", "100", "--fixed-ms", "10", "--send-ms", "10", "--prefill-tokens-per-s", "1e9"]
    (path,) = planned(capsys, *argv, "--pipeline", "1")["plan"]["split"]
    assert path["pipelined"]["break_even_tokens"] is None
    assert "% never" in printed(capsys, *argv, "--pipeline", "1")
    assert "% never" not in printed(capsys, *argv, "--pipeline", "80")


def test_what_was_measured_on_one_host_is_not_pipelined_and_that_is_said(tmp_path: Path, capsys: Captured) -> None:
    argv = [*ARTICLE, "--measured", fitted_result(tmp_path, "loopback"), "--tokens", "100"]
    told = "what was measured on one host (loopback) is no path between two, and --pipeline is not looked at over it"
    document = planned(capsys, *argv, "--pipeline", "8")
    assert not any(path["measured"] for path in document["plan"]["split"])
    assert told in document["notices"]
    assert told not in planned(capsys, *argv)["notices"]


@pytest.mark.parametrize(("cut", "told"), [("8", "6.82 MB in 104 pieces"), ("80", None)])
def test_sends_that_nobody_measured_are_said_to_be_extrapolated(
    cut: str, told: str | None, tmp_path: Path, capsys: Captured
) -> None:
    """Of 200 tokens, 13 blocks of 65,536 bytes in each of 80 layers. Fitted were 5.24 to 83.9 MB in 80 to 1,280."""
    argv = [*ARTICLE, "--measured", fitted_result(tmp_path, valid=FITTED_RANGE), "--tokens", "200"]
    document = planned(capsys, *argv, "--pipeline", cut)
    (path,) = document["plan"]["split"]
    said = [notice for notice in document["notices"] if "their times are extrapolated" in notice]
    assert path["pipelined"]["reach"] == FITTED_RANGE
    if told is None:
        assert (said, path["pipelined"]["extrapolated"]) == ([], None)
        return
    assert path["pipelined"]["extrapolated"] == {"bytes": [8 * 13 * 65_536] * 2, "descriptors": [8 * 13] * 2}
    (notice,) = said
    assert f"sends of cut {cut}, {told}, " in notice
    assert "are outside what was measured, 10.0 … 83.9 MB in 80 … 1,280 pieces" in notice
    assert not any("extrapolated" in notice for notice in planned(capsys, *argv)["notices"])


def test_a_prompt_that_nobody_measured_from_which_a_cut_pays_is_said_to_be_extrapolated(
    tmp_path: Path, capsys: Captured
) -> None:
    argv = [*ARTICLE, "--measured", network_result(tmp_path), "--tokens", "8192", "--pipeline", "40"]
    document = planned(capsys, *argv)
    found = document["plan"]["split"][0]["pipelined"]
    assert found["extrapolated"] is None
    assert found["break_even_extrapolated"]
    (notice,) = (notice for notice in document["notices"] if "extrapolated" in notice)
    assert f"push, measured at 512 … 8,192 tokens: sends of {found['break_even_tokens']} tokens, from which" in notice
    assert "are outside what was measured, 168 … 2,684 MB; their" in notice


def test_pipelining_of_a_load_is_told_though_no_prompt_of_tokens_is_reached(tmp_path: Path, capsys: Captured) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("600\n700\n")
    argv = [*ARTICLE, "--measured", network_result(tmp_path), "--lengths", str(lengths), "--pipeline", "8"]
    document = planned(capsys, *argv, "--tokens", "100")
    (path,) = document["plan"]["split"]
    assert path["pipelined"]["prompts"] == []
    text = printed(capsys, *argv, "--tokens", "100")
    assert "Pipelined, by a model" in text
    assert "–: nobody measured a prompt of --tokens over that path" in text
    assert "nobody measured a prompt" not in printed(capsys, *argv)


def test_prompts_that_chunks_do_not_cut_are_said(capsys: Captured) -> None:
    argv = [*ARTICLE, "--tokens", "512,2048,8192", "--link", "400"]
    told = "--pipeline 8x2048: prompts of 512 … 2,048 tokens are no longer than a chunk, and leave as by --pipeline 8"
    assert told in planned(capsys, *argv, "--pipeline", "8x2048")["notices"]
    for cut in ("8", "best", "8x256"):
        assert not any(
            "longer than a chunk" in notice for notice in planned(capsys, *argv, "--pipeline", cut)["notices"]
        )


def test_several_requests_at_once_are_no_transfer(tmp_path: Path, capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, "--measured", network_result(tmp_path, inflight=4), "--tokens", "8192")
    assert not any(path["measured"] for path in document["plan"]["split"])
    assert not any(row["measured"] for row in document["ratio"])
    assert any("requests at once" in notice and "--inflight" in notice for notice in document["notices"])


def test_null_moves_nothing_and_is_no_path(tmp_path: Path, capsys: Captured) -> None:
    document = planned(capsys, *ARTICLE, "--measured", network_result(tmp_path, backend="null"), "--tokens", "8192")
    assert not any(path["measured"] for path in document["plan"]["split"])


def test_one_host_gives_no_verdict_though_nothing_of_it_matches(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(example_result()))
    document = planned(capsys, "--model", "8b", "--measured", str(path))
    assert document["verdict"] is None
    assert any("no verdict follows" in notice and "leave --measured out" in notice for notice in document["notices"])


def test_a_result_of_another_version_is_refused(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(example_result() | {"schema_version": 2}))
    assert "schema version 2, this kvxfer reads version 1" in refused(capsys, "--measured", str(path))


def test_unknown_parameters_leave_the_verdict_open(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "unheard_of", "num_hidden_layers": 4}))
    document = planned(capsys, "--model", str(config), "--kv-bytes-per-token", "1000", *SERVED, *POOLS)
    assert document["plan"]["prefill_source"] is None
    assert document["verdict"]["answer"] == "undetermined"
    assert any("--params" in need for need in document["verdict"]["cases"][0]["needs"])
    assert "Verdict: undetermined" in printed(capsys, "--model", str(config), "--kv-bytes-per-token", "1000")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--rate", "-1"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--output-tokens", "0"], "--output-tokens"),
        (["--objective", "speed"], "--objective"),
        (["--itl-target-ms", "-5"], "--itl-target-ms"),
        (["--decode-step-ms", "0"], "--decode-step-ms"),
        (["--chunk", "15"], "--chunk"),
        (["--chunk", ""], "--chunk"),
        (["--fixed-ms", "-1"], "--fixed-ms"),
        (["--send-ms", "-1"], "--send-ms"),
        (["--fixed-ms", "1", "--send-ms", "2"], "--send-ms 2 is more than --fixed-ms 1"),
        (["--pipeline", "0"], "--pipeline"),
        (["--pipeline", "33"], "from 1 to 32"),
        (["--pipeline", "1,2"], "plan looks at one cut"),
        (["--pipeline", "sweep"], "give off, best"),
        (["--pipeline", "all"], "give off, best"),
        (["--pipeline", "fast"], "--pipeline 'fast'"),
        (["--pipeline", "1x1", "--tokens", "8192"], "at most 4,096"),
        (["--fragmentation", "1.5"], "--fragmentation"),
        (["--regions", "3"], "--regions"),
        (["--kv-memory-gb", "0"], "--kv-memory-gb"),
        (["--total-gpus", "0"], "--total-gpus"),
        (["--gpus", "4", "--tp-prefill", "8"], "--gpus 4 are fewer than the 8 ranks of prefill"),
        (["--gpus", "7", "--tp-prefill", "4", "--pp-prefill", "2"], "--tp-prefill 4, --pp-prefill 2"),
        (["--prefill-gpus", "4", "--decode-gpus", "4", "--total-gpus", "9"], "fair comparison"),
        (["--prefill-tokens-per-s", "-3"], "--prefill-tokens-per-s"),
        (["--prefill-extrapolate"], "--prefill-csv"),
        (["--prefill-csv", "/nonexistent.csv"], "/nonexistent.csv"),
        (["--prefill-csv", "/nonexistent.csv", "--prefill-tokens-per-s", "1"], "give one"),
        (["--trace-unit", "s"], "--lengths"),
        (["--lengths", "/nonexistent.jsonl", "--trace-unit", "min"], "--trace-unit"),
        (["--lengths", "/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["--lengths", "/"], "Is a directory"),
    ],
)
def test_wrong_options_are_named(argv: list[str], names: str, capsys: Captured) -> None:
    assert names in refused(capsys, *argv)


def test_wrong_files_are_named_by_line(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert "is empty" in refused(capsys, "--lengths", str(path))
    path.write_text('{"input_length": 5}\n{"input_length": -5}\n')
    assert "line 2" in refused(capsys, "--lengths", str(path))
    path.write_text("1000,9\n2000,x\n")
    assert "line 2" in refused(capsys, "--prefill-csv", str(path))
    path.write_text("1000,9\n2000,20\n")
    assert "--prefill-extrapolate" in refused(capsys, "--prefill-csv", str(path), "--tokens", "4000")


@pytest.mark.parametrize("option", ["--measured", "--lengths", "--prefill-csv"])
def test_a_file_without_end_is_refused(option: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LARGEST_FILE", 1 << 20)
    monkeypatch.setattr(file, "LARGEST_RESULT", 1 << 20)
    told = refused(capsys, option, "/dev/zero")
    assert "'/dev/zero': it has more than 1 MiB" in told
    assert "; give " in told


LLAMA_70B = load_model("70b")


@given(
    rates=st.tuples(st.floats(1, 1000), st.floats(1, 1000)),
    sizes=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
    fixed=st.tuples(st.floats(0, 1000), st.floats(0, 1000)),
    tokens=st.integers(1, 10**5),
)
def test_the_ratio_grows_with_bytes_and_fixed_cost_and_falls_with_bandwidth(
    rates: tuple[float, float], sizes: tuple[int, int], fixed: tuple[float, float], tokens: int
) -> None:
    def percent(gbit: float, size: int, fixed_ms: float) -> float:
        assumptions = Assumptions(link_gbit=(gbit,), kv_bytes_per_token=size, fixed_ms=fixed_ms)
        row = ratio_rows(LLAMA_70B, BF16, [tokens], 16, assumptions)[0]
        return float(row["links"][0]["percent"])

    gbit, size, fixed_ms = rates[0], sizes[0], fixed[0]
    assert percent(max(rates), size, fixed_ms) <= percent(min(rates), size, fixed_ms)
    assert percent(gbit, min(sizes), fixed_ms) <= percent(gbit, max(sizes), fixed_ms)
    assert percent(gbit, size, min(fixed)) <= percent(gbit, size, max(fixed))


def test_a_whole_decision_takes_little_more_than_the_help(tmp_path: Path) -> None:
    """In CPU time, which other processes do not lengthen: most of it is starting and reading the command line."""

    def cpu_s(*argv: str) -> float:
        best = float("inf")
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "kvxfer.plan", *argv], check=True, capture_output=True, timeout=60)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return best

    everything = [*ARTICLE, *SERVED, *POOLS, "--lengths", trace(tmp_path, requests=5000), "--itl-target-ms", "50"]
    assert cpu_s(*everything) < 4 * cpu_s("--help")


def test_a_chunk_that_the_prefill_file_does_not_reach_leaves_the_target_open(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "prefill.csv"
    argv = ["--model", "70b", "--link", "200", "--tokens", "1024,8192", "--prefill-csv", str(file), *SERVED, *POOLS]
    for more, holds in (([], None), (["512,46"], False)):
        file.write_text("\n".join([*more, "1024,92.5", "8192,760"]))
        document = planned(capsys, *argv, "--itl-target-ms", "90")
        assert rule_of(document["verdict"]["cases"][0], "strict ITL")["holds"] is holds


def test_a_side_whose_engines_are_not_said_is_said_to_be_left_out(capsys: Captured) -> None:
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        notices = planned(capsys, *ARTICLE, *SERVED, f"--{one}-gpus", "8")["notices"]
        assert any(f"paths of {other}'s engines" in notice and f"--{other}-gpus" in notice for notice in notices)
    assert not any("'s engines would be" in notice for notice in planned(capsys, *ARTICLE, *SERVED, *POOLS)["notices"])
