"""What is printed: one sentence first, no figure cut, no header broken, no blanks at the end of a line."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from example_result import example_result, ok_row
from rich.console import Console

from kvxfer import model_command, plan
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.ratio import ratio_rows
from kvxfer.model.dtypes import BF16
from kvxfer.model.presets import load_model
from kvxfer.result.cold import cold_pair
from kvxfer.result.printing import Column, counted, print_pairs, print_table
from kvxfer.result.ratio_table import render_ratio
from kvxfer.result.tables import render


def printed(what: Callable[[Console], None], width: int = 120, **options: Any) -> str:
    console = Console(width=width, file=io.StringIO(), **options)
    what(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def bench_printed(result: dict[str, Any], width: int = 120) -> str:
    return printed(lambda console: render(result, console), width)


def test_the_first_sentence_is_what_the_longest_prompt_cost() -> None:
    lines = bench_printed(example_result()).splitlines()
    assert " ".join(" ".join(lines[1:3]).split()) == (
        "found llama-3.1-70b in bf16 over tcp/lo, push: 8,192 tokens move in 912 ms, 2.94 GB/s, "
        "127 % of its assumed prefill (seed), loopback"
    )


def test_the_first_sentence_says_what_to_beware_of() -> None:
    result = example_result()
    result["results"][1] |= {"noisy": True, "converged": False}
    result["ratio"] = []
    assert "2.94 GB/s, loopback (not converged, noisy)" in " ".join(bench_printed(result).split())


def test_there_is_no_such_sentence_where_nothing_moved() -> None:
    result = example_result()
    result["results"] = [ok_row(512, 50_000) | {"bandwidth_gbyte_s": None}, result["results"][2]]
    assert "found" not in bench_printed(result)


def test_cold_is_told_with_its_longest_start() -> None:
    result = example_result()
    cold = cold_pair(result["results"][0]["setup"])
    text = " ".join(bench_printed(result).split())
    assert f"{cold['p50'] / 1e6:.0f} ({cold['max'] / 1e6:.0f})" in text
    assert "of 5 fresh starts" in text
    for phase in (phase for row in result["results"][:2] for phase in row["setup"].values()):
        phase["samples"] = phase["samples"][:1]
    assert "of 1 fresh start (" in bench_printed(result)


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_no_line_ends_in_blanks_or_is_too_long(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert model_command.main(["gpt-oss-120b"]) == 0
    assert plan.main(["--model", "70b", "--tp-prefill", "2", "--links", "per-rank"]) == 0
    lines = [*capsys.readouterr().out.splitlines(), *bench_printed(example_result(), width).splitlines()]
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) <= width


def test_headers_are_not_broken_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert model_command.main(["gpt-oss-120b"]) == 0
    out = capsys.readouterr().out
    for header in ("fp8_per_token_head", "8,192 tokens", "fixed B per", "Pieces of a request of which no two blocks"):
        assert header in out


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    columns = [Column(f"column {number}", ["1234567890"]) for number in range(6)]
    text = printed(lambda console: print_table("Title", [Column("key", ["k"])], columns, console, ["a note"]), 40)
    assert text.count("Title, continued") == text.count("key") - 1 >= 1
    assert text.count("1234567890") == 6
    assert text.endswith("a note\n")


def test_on_a_terminal_too() -> None:
    styled = printed(
        lambda console: print_pairs([("word", "long " * 30)], console, style="dim"), 60, force_terminal=True
    )
    assert "\x1b[2m" in styled
    assert "long " * 3 in styled


def ratio_printed(assumptions: Assumptions) -> str:
    shape = load_model("70b")
    rows = ratio_rows(shape, BF16, [8192], 16, assumptions)
    text = printed(lambda console: render_ratio(rows, assumptions.as_record(shape), console))
    return " ".join(text.split())


def test_the_legend_says_what_n_is() -> None:
    assert "seed: prefill is 2·params·N FLOP for N tokens." in ratio_printed(Assumptions())
    hit = ratio_printed(Assumptions(prefix_hit_prefill=0.9))
    assert "2·params·N FLOP for the N tokens that its prefix cache lacks." in hit
    assert "attention to the whole prompt" in hit


def test_one_of_something_is_not_several() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2, 1000)] == ["0 GPUs", "1 GPU", "2 GPUs", "1,000 GPUs"]
    assert "not measured: 1 GPU for prefill at 400 TFLOP/s, 70.55e9" in ratio_printed(Assumptions(gpus=1))
    assert "not measured: 4 GPUs for prefill at 400 TFLOP/s each, 70.55e9" in ratio_printed(Assumptions())
