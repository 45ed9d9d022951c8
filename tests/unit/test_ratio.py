"""The ratio: the published table exactly, and what must hold for any shape."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from example_result import example_result
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console
from shared_files import CASES

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, measured_rows
from kvxfer.cost.prefill import attention_flop, attention_formula, linear_flop
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, FP8_E4M3
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.layers import AttentionAndState, FullAttention
from kvxfer.model.presets import load_model, preset_names
from kvxfer.model.shape import ModelShape
from kvxfer.result.file import schema
from kvxfer.result.ratio_table import render_ratio

SEED_TABLE = [  # tokens, KV GB, prefill ms, transfer ms and % at 100, 200 and 400 Gb/s
    (2048, 0.67, 179, [54, 27, 13], [30, 15, 7]),
    (8192, 2.68, 717, [215, 107, 54], [30, 15, 7]),
    (32768, 10.74, 2867, [859, 429, 215], [30, 15, 7]),
]
ARTICLE = Assumptions(params=70e9)
LLAMA_70B = load_model("70b")


def rows_of(basis: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["basis"] == basis]


def as_the_article(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            row["tokens"],
            round(row["bytes"] / 1e9, 2),
            round(row["prefill_ms"]),
            [round(link["transfer_ms"]) for link in row["links"]],
            [round(link["percent"]) for link in row["links"]],
        )
        for row in rows
    ]


def test_seed_rows_are_the_articles_table() -> None:
    rows = ratio_rows(LLAMA_70B, BF16, [2048, 8192, 32768], 16, ARTICLE)
    assert as_the_article(rows_of("seed", rows)) == SEED_TABLE
    assert rows[0]["prefill_source"] == "assumed: 2·70e9·N FLOP on 4 GPUs at 400 TFLOP/s each"


def test_the_articles_table_here_is_the_one_of_the_cases() -> None:
    if not CASES.exists():
        pytest.skip("the cases are not beside this checkout")
    rows = json.loads(CASES.read_text())["seed_table"]["rows"]
    there = [(row["tokens"], row["kv_gb"], row["prefill_ms"], row["transfer_ms"], row["percent"]) for row in rows]
    assert there == SEED_TABLE


def test_full_row_by_hand() -> None:
    (row,) = rows_of("full", ratio_rows(LLAMA_70B, BF16, [32768], 16, ARTICLE))
    flop = 2 * (70_553_706_496 - 2 * 128_256 * 8192) * 32768 + 2 * 80 * 64 * 128 * 32768**2
    assert row["prefill_ms"] == pytest.approx(flop / (4 * 400e12) * 1e3)
    assert row["prefill_source"].startswith("assumed: (2·68.45e9·N + 2·80·64·128·N²) FLOP")


def test_attention_adds_30_percent_at_32768_tokens() -> None:
    assert attention_flop(LLAMA_70B, 32768) / linear_flop(70e9, 32768) == pytest.approx(0.30, abs=0.01)


def attention_of(name: str, tokens: int, cached: float = 0.0) -> float:
    return attention_flop(load_model(name), tokens, cached)


def test_attention_of_windows_by_hand() -> None:
    """gpt-oss: 18 full layers, 18 in which each token attends to 128 at most; 64 heads of 64."""
    per_pair, tokens = 4 * 64 * 64, 8192
    windows = 128**2 / 2 + (tokens - 128) * 128
    assert attention_of("gpt-oss-120b", tokens) == 18 * per_pair * (tokens**2 / 2 + windows)
    assert attention_of("gpt-oss-120b", 128) == 36 * per_pair * 128**2 / 2


def test_attention_of_chunks_by_hand() -> None:
    """Llama-4-Scout: 12 full layers, 36 in chunks of 8,192; 40 heads of 128."""
    per_pair, tokens = 4 * 40 * 128, 2 * 8192 + 100
    chunks = (2 * 8192**2 + 100**2) / 2
    assert attention_of("llama-4-scout", tokens) == per_pair * (12 * tokens**2 / 2 + 36 * chunks)


def test_attention_of_latents_by_hand() -> None:
    """128 heads of 192 (nope and rope) and 128; V3.2's indexer scores all pairs and lets 2,048 be attended to."""
    full = 61 * 2 * 128 * (192 + 128)
    assert attention_of("deepseek-v3", 8192) == full * 8192**2 / 2
    chosen = 2048**2 / 2 + (8192 - 2048) * 2048
    assert attention_of("deepseek-v3.2", 8192) == full * chosen + 61 * 2 * 64 * 128 * 8192**2 / 2


def test_a_state_is_written_corrected_and_read_once_for_each_token() -> None:
    """Qwen3-Next: 12 full layers, and 36 of 32 states of 128 · 128, whose work is small beside the weights'."""
    states = 36 * 3 * 2 * 32 * 128 * 128
    assert attention_of("qwen3-next-80b-a3b", 8192) == 12 * 4 * 16 * 256 * 8192**2 / 2 + states * 8192
    assert states * 8192 < 0.02 * linear_flop(load_model("qwen3-next-80b-a3b").params_active or 0, 8192)


def test_mamba_2_writes_and_reads_its_states() -> None:
    mamba = Mamba2(heads=8, head_dim=16, groups=2, state=32, kernel=4).layer(2, 4)
    beside = AttentionAndState(FullAttention(4, 8, 8), mamba)
    shape = ModelShape("m", "mamba_hybrid", 2, 64, 4, 4, 8, 8, layer_kinds=(mamba, beside))
    assert attention_flop(shape, 100, 40) == 2 * 2 * 2 * 8 * 16 * 32 * 60 + 2 * 4 * 16 * (100**2 - 40**2) / 2
    assert attention_formula(shape) == "4·1·8·16·32·N + 2·1·4·8·N² + 4·1·8·16·32·N"


@pytest.mark.parametrize("name", preset_names())
def test_what_is_cached_and_what_is_computed_are_the_whole_attention(name: str) -> None:
    for tokens, cached in ((20_000, 15_000), (20_000, 100), (100, 50), (9_000, 8_500)):
        whole, first = attention_of(name, tokens), attention_of(name, cached)
        assert attention_of(name, tokens, cached) == pytest.approx(whole - first)
        assert 0 < attention_of(name, tokens, cached) < whole


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gpt-oss-120b", "2·18·64·64·N² within 128 + 2·18·64·64·N²"),
        ("llama-4-scout", "2·36·40·128·N² in chunks of 8,192 + 2·12·40·128·N²"),
        ("deepseek-v3", "61·128·(192+128)·N²"),
        ("deepseek-v3.2", "61·128·(192+128)·N² within 2,048 chosen + 61·64·128·N²"),
        ("qwen3-next-80b-a3b", "6·36·32·128·128·N + 2·12·16·256·N²"),
    ],
)
def test_formulas_are_spelled_out(name: str, formula: str) -> None:
    (row,) = rows_of("full", ratio_rows(load_model(name), BF16, [512], 16, Assumptions()))
    assert f"·N + {formula}) FLOP" in row["prefill_source"]


def test_prefill_computes_no_layers_of_multi_token_prediction() -> None:
    """Their weights are not among the parameters either."""
    plain = load_model("deepseek-v3")
    assert plain.with_mtp().mtp_layers == 1
    for row, more in zip(
        ratio_rows(plain, BF16, [8192], 16, Assumptions()),
        ratio_rows(plain.with_mtp(), BF16, [8192], 16, Assumptions()),
        strict=True,
    ):
        assert (row["prefill_ms"], row["prefill_source"]) == (more["prefill_ms"], more["prefill_source"])
        assert more["bytes"] * 61 == row["bytes"] * 62


def test_hits_at_prefill_alone_turn_7_5_percent_into_75() -> None:
    """8,192 tokens of 70B at 400 Gb/s, 90 % of them in prefill's cache."""
    (without,) = rows_of("seed", ratio_rows(LLAMA_70B, BF16, [8192], 16, ARTICLE))
    (hit,) = rows_of("seed", ratio_rows(LLAMA_70B, BF16, [8192], 16, replace(ARTICLE, prefix_hit_prefill=0.9)))
    assert without["links"][2]["percent"] == pytest.approx(7.5, abs=0.05)
    assert hit["links"][2]["percent"] == pytest.approx(10 * without["links"][2]["percent"])
    assert hit["bytes"] == without["bytes"]
    assert (hit["prefill_tokens"], hit["held_tokens"]) == (819.2, 0)
    assert "prefill_tokens" not in without


def test_the_computed_tokens_attend_to_the_cached_ones() -> None:
    assumptions = replace(ARTICLE, prefix_hit_prefill=0.5)
    (row,) = rows_of("full", ratio_rows(LLAMA_70B, BF16, [32768], 16, assumptions))
    params = 70_553_706_496 - 2 * 128_256 * 8192
    flop = 2 * params * 16384 + 2 * 80 * 64 * 128 * (32768**2 - 16384**2)
    assert row["prefill_ms"] == pytest.approx(flop / (4 * 400e12) * 1e3)
    assert "the first 16,384 tokens, which are cached" in row["prefill_source"]


@pytest.mark.parametrize(
    ("hit", "tokens", "held"),
    [(0.5, 100, 48), (0.29, 1600, 464), (1.0, 100, 96), (1.0, 96, 96), (0.001, 100, 0)],
)
def test_decode_lacks_whole_blocks(hit: float, tokens: int, held: int) -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [tokens], 16, replace(ARTICLE, prefix_hit_decode=hit))
    assert row["held_tokens"] == held
    assert row["bytes"] == (-(-tokens // 16) * 16 - held) * 327_680


def test_a_window_that_decode_lacks_moves_as_far_as_it_is_lacked() -> None:
    """512 blocks of gpt-oss-20b, 508 of them held: 4 blocks in every layer, window or not."""
    assumptions = Assumptions(prefix_hit_decode=508 / 512)
    (row, _) = ratio_rows(load_model("gpt-oss-20b"), BF16, [8192], 16, assumptions)
    assert row["bytes"] == 24 * 4 * 16 * 2048


def test_a_prompt_that_is_all_cached_computes_one_token() -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [512], 16, replace(ARTICLE, prefix_hit_prefill=1.0))
    assert row["prefill_tokens"] == 1


def test_hits_and_given_bytes_per_token() -> None:
    assumptions = Assumptions(kv_bytes_per_token=1000, prefix_hit_decode=0.5)
    (row, _) = ratio_rows(LLAMA_70B, BF16, [64], 16, assumptions)
    assert row["bytes"] == 32_000


@given(prefill=st.floats(0, 1), decode=st.floats(0, 1), tokens=st.integers(1, 10**6))
def test_hits_never_add_work_nor_bytes(prefill: float, decode: float, tokens: int) -> None:
    hit = replace(ARTICLE, prefix_hit_prefill=prefill, prefix_hit_decode=decode)
    without = ratio_rows(LLAMA_70B, BF16, [tokens], 16, ARTICLE)
    for row, whole in zip(ratio_rows(LLAMA_70B, BF16, [tokens], 16, hit), without, strict=True):
        assert 0 < row["prefill_ms"] <= whole["prefill_ms"] * (1 + 1e-9)
        assert 0 <= row["bytes"] <= whole["bytes"]


def test_rows_with_hits_fit_the_schema_and_are_said_in_the_table() -> None:
    assumptions = Assumptions(prefix_hit_prefill=0.9, prefix_hit_decode=0.25)
    rows = ratio_rows(LLAMA_70B, BF16, [512], 16, assumptions)
    rules = schema()["properties"]
    Draft202012Validator(rules["ratio"]).validate(json.loads(json.dumps(rows)))
    Draft202012Validator(rules["assumptions"]).validate(assumptions.as_record(LLAMA_70B))
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        render_ratio(rows, assumptions.as_record(LLAMA_70B), console)
    assert "hits of 0.9 at prefill and 0.25 at decode" in " ".join(capture.get().split())


def test_rows_fit_the_schema() -> None:
    measured = measured_rows(example_result()["results"], "loopback")
    rows = ratio_rows(LLAMA_70B, BF16, [100, 512], 16, Assumptions(), measured)
    rules = schema()["properties"]
    Draft202012Validator(rules["ratio"]).validate(json.loads(json.dumps(rows)))
    Draft202012Validator(rules["assumptions"]).validate(Assumptions().as_record(LLAMA_70B))
    assert [row["basis"] for row in rows] == ["seed", "full"] * 2


def test_whole_blocks_are_on_the_wire_and_tokens_in_the_prefill() -> None:
    short, long = rows_of("seed", ratio_rows(LLAMA_70B, BF16, [17, 32], 16, ARTICLE))
    assert short["bytes"] == long["bytes"]
    assert short["prefill_ms"] < long["prefill_ms"]


tokens = st.integers(1, 10**6)
rates = st.floats(0.1, 10_000)


@given(tokens=tokens, slow=rates, fast=rates)
def test_faster_links_take_less_and_fewer_bytes_too(tokens: int, slow: float, fast: float) -> None:
    slow, fast = sorted((slow, fast))
    assumptions = replace(ARTICLE, link_gbit=(slow, fast))
    for row, half in zip(
        ratio_rows(LLAMA_70B, BF16, [tokens], 16, assumptions),
        ratio_rows(LLAMA_70B, FP8_E4M3, [tokens], 16, assumptions),
        strict=True,
    ):
        assert row["links"][0]["percent"] >= row["links"][1]["percent"] > 0
        assert half["links"][0]["percent"] == pytest.approx(row["links"][0]["percent"] / 2)


@given(blocks=st.lists(st.integers(1, 10**5), min_size=2, max_size=2, unique=True).map(sorted))
def test_seed_share_is_the_same_for_every_length_and_full_share_falls(blocks: list[int]) -> None:
    rows = ratio_rows(LLAMA_70B, BF16, [16 * count for count in blocks], 16, ARTICLE)
    seed = [row["links"][0]["percent"] for row in rows_of("seed", rows)]
    full = [row["links"][0]["percent"] for row in rows_of("full", rows)]
    assert seed[0] == pytest.approx(seed[1])
    assert full[0] > full[1]


UNCOUNTED = replace(LLAMA_70B, params_total=None, params_active=None, params_embedding=None)


def test_unknown_parameters_leave_out_the_rows_and_say_so() -> None:
    assert ratio_rows(UNCOUNTED, BF16, [512], 16, Assumptions()) == []
    assert "--params" in ratio_notices(UNCOUNTED, Assumptions())[0]


def test_params_alone_give_the_seed_row_and_say_what_is_missing() -> None:
    rows = ratio_rows(UNCOUNTED, BF16, [512], 16, ARTICLE)
    assert [row["basis"] for row in rows] == ["seed"]
    assert "--params-active" in ratio_notices(UNCOUNTED, ARTICLE)[0]


def test_active_params_alone_give_both() -> None:
    assumptions = Assumptions(params_active=37e9)
    assert [row["basis"] for row in ratio_rows(UNCOUNTED, BF16, [512], 16, assumptions)] == ["seed", "full"]
    assert ratio_notices(UNCOUNTED, assumptions) == []
    assert assumptions.as_record(UNCOUNTED)["params_source"] == "--params-active"


def test_fewer_active_parameters_than_the_tables_hold() -> None:
    with pytest.raises(UsageError, match="embedding"):
        ratio_rows(LLAMA_70B, BF16, [512], 16, Assumptions(params_active=1e9))


def test_bytes_on_the_wire_can_be_given() -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [17], 16, Assumptions(kv_bytes_per_token=1000))
    assert row["bytes"] == 32_000


def measured_row(**changes: Any) -> Measured:
    fields = {"of": "a", "model": "llama-3.1-70b", "dtype": "bf16", "tokens": 512, "bytes": 167_772_160}
    fields |= {"backend": "tcp", "op": "push", "scope": "loopback", "transfer_ms": 44.8, "cold_ms": None}
    return Measured(**(fields | changes))  # type: ignore[arg-type]


NOT_TIMED = measured_row(scope="network", op="pull", transfer_ms=None)


def test_measured_times_are_set_beside() -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row()])
    (entry,) = row["measured"]
    assert entry["percent"] == pytest.approx(100)  # the prefill takes 44.8 ms
    assert entry["cold_percent"] is None


def test_what_a_prefill_hid_is_set_beside_no_other_prefill() -> None:
    """Behind the article's 44.8 ms, not those of more GPUs; `full` takes another time than `seed`."""
    pipelined = measured_row(exposed_ms=9.0, behind_ms=44.8)
    seed, full = (row["measured"][0] for row in ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [pipelined]))
    assert (seed["exposed_ms"], seed["exposed_percent"]) == pytest.approx((9.0, 100 * 9 / 44.8))
    assert "exposed_ms" not in full
    more = replace(ARTICLE, gpus=64)
    assert all(
        "exposed_ms" not in row["measured"][0] for row in ratio_rows(LLAMA_70B, BF16, [512], 16, more, [pipelined])
    )


@pytest.mark.parametrize("other", [{"model": "x"}, {"dtype": "fp16"}, {"tokens": 513}, {"bytes": 1}, {"inflight": 4}])
def test_only_exact_matches_are_set_beside(other: dict[str, Any]) -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row(**other)])
    assert row["measured"] == []


def test_rows_of_a_result() -> None:
    result = example_result()
    measured = measured_rows(result["results"], result["scope"])
    good = [row for row in result["results"] if row["status"] == "ok"]
    assert [row.of for row in measured] == [row["id"] for row in good]
    assert measured[0].cold_ms == good[0]["setup"]["cold_ns"]["p50"] / 1e6
    assert [row.inflight for row in measured] == [1, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", "512"),
        ("bytes", None),
        ("p50_ns", -1),
        ("p50_ns", 1.5),
        ("setup", 3),
        ("setup", {}),
        ("model", None),
        ("inflight", "4"),
    ],
)
def test_damaged_rows_are_named(field: str, value: Any) -> None:
    row = example_result()["results"][0] | {field: value}
    with pytest.raises(UsageError, match=f"'{row['id']}' has {field}"):
        measured_rows([row], "host")


def test_results_that_are_no_rows() -> None:
    with pytest.raises(UsageError, match="damaged"):
        measured_rows([3], "host")  # type: ignore[list-item]


def printed(rows: list[dict[str, Any]], width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        render_ratio(rows, ARTICLE.as_record(LLAMA_70B), console)
    return capture.get()


def test_table_fits_80_columns_and_marks_what_is_assumed() -> None:
    text = printed(ratio_rows(LLAMA_70B, BF16, [2048, 8192], 16, ARTICLE))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("100 Gb/s", "line rate", "ASSUMED", "prefill", "ms (%)", "seed", "full", "53.7 (30.0%)", "GB"):
        assert word in text
    assert "MEASURED" not in text
    assert "…" not in text


def test_table_labels_loopback_and_never_cuts_a_figure() -> None:
    rows = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row(), NOT_TIMED])
    text = printed(rows)
    assert "loopback: says nothing about the links" in " ".join(text.split())
    for word in ("MEASURED", "tcp", "pull", "network", "44.8 (100%)", "not known", "too few samples"):
        assert word in text
    assert "…" not in printed(rows, width=50)


def test_rows_tell_their_own_scope_or_have_that_of_the_run() -> None:
    results = example_result()["results"]
    results[0]["scope"] = "host"
    measured = measured_rows(results, "loopback")
    assert [row.scope for row in measured] == ["host", "loopback"]
    assert "host: says nothing about the links" in " ".join(
        printed(ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row(scope="host")])).split()
    )
    results[0]["scope"] = 1
    with pytest.raises(UsageError, match="has scope = "):
        measured_rows(results, "loopback")


def test_result_with_unknown_parameters_is_printed_too() -> None:
    result = example_result()
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        render_ratio(result["ratio"], result["assumptions"], console)
    assert "Assumed, not measured: 4 GPUs" in capture.get()
    assert "MEASURED" in capture.get()


def test_one_table_for_each_dtype() -> None:
    rows = [row for dtype in (BF16, FP8_E4M3) for row in ratio_rows(LLAMA_70B, dtype, [512], 16, ARTICLE)]
    assert printed(rows).count("ASSUMED") == 2
    assert "ASSUMED" not in printed([])


def test_names_are_not_taken_for_markup() -> None:
    rows = ratio_rows(replace(LLAMA_70B, name="[red]x[/nothing]"), BF16, [512], 16, ARTICLE)
    assert "[red]x[/nothing]" in printed(rows)
