"""The ratio: the published table exactly, and what must hold for any shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_result import example_result
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, measured_rows
from kvxfer.cost.prefill import attention_flop, linear_flop
from kvxfer.cost.ratio import ratio_notices, ratio_rows
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, FP8_E4M3
from kvxfer.model.presets import load_model
from kvxfer.result.file import schema
from kvxfer.result.ratio_table import LOOPBACK, ratio_tables, render_ratio

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "geometry-and-ratio.json"

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


def test_measured_times_are_set_beside() -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row()])
    (entry,) = row["measured"]
    assert entry["percent"] == pytest.approx(100)  # the prefill takes 44.8 ms
    assert entry["cold_percent"] is None


@pytest.mark.parametrize("other", [{"model": "x"}, {"dtype": "fp16"}, {"tokens": 513}, {"bytes": 1}])
def test_only_exact_matches_are_set_beside(other: dict[str, Any]) -> None:
    (row, _) = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row(**other)])
    assert row["measured"] == []


def test_rows_of_a_result() -> None:
    result = example_result()
    measured = measured_rows(result["results"], result["scope"])
    good = [row for row in result["results"] if row["status"] == "ok"]
    assert [row.of for row in measured] == [row["id"] for row in good]
    assert measured[0].cold_ms == good[0]["setup"]["cold_ns"]["p50"] / 1e6


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", "512"), ("bytes", None), ("p50_ns", -1), ("p50_ns", 1.5), ("setup", 3), ("setup", {}), ("model", None)],
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
        for table in ratio_tables(rows):
            console.print(table)
    return capture.get()


def test_table_fits_80_columns_and_marks_what_is_assumed() -> None:
    text = printed(ratio_rows(LLAMA_70B, BF16, [2048, 8192], 16, ARTICLE))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("100 Gb/s", "line rate", "ASSUMED", "prefill", "ms (%)", "seed", "full", "53.7 (30.0%)", "GB"):
        assert word in text
    assert "MEASURED" not in text
    assert "…" not in text


def test_table_labels_loopback_and_never_cuts_a_figure() -> None:
    rows = ratio_rows(LLAMA_70B, BF16, [512], 16, ARTICLE, [measured_row(), measured_row(scope="network", op="pull")])
    text = printed(rows)
    assert LOOPBACK in " ".join(text.split())
    for word in ("MEASURED", "tcp", "pull", "network", "44.8 (100%)", "too few samples"):
        assert word in text
    assert "…" not in printed(rows, width=50)


def test_result_with_unknown_parameters_is_printed_too() -> None:
    result = example_result()
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        render_ratio(result["ratio"], result["assumptions"], console)
    assert "Assumed, not measured: 4 GPUs" in capture.get()
    assert "MEASURED" in capture.get()


def test_one_table_for_each_dtype() -> None:
    rows = [row for dtype in (BF16, FP8_E4M3) for row in ratio_rows(LLAMA_70B, dtype, [512], 16, ARTICLE)]
    assert len(ratio_tables(rows)) == 2
    assert ratio_tables([]) == []


def test_names_are_not_taken_for_markup() -> None:
    rows = ratio_rows(replace(LLAMA_70B, name="[red]x[/nothing]"), BF16, [512], 16, ARTICLE)
    assert "[red]x[/nothing]" in printed(rows)
