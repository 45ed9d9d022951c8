"""The tables say everything, in any width, and to a terminal and a file alike."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import types
from typing import Any

import pytest
from example_result import error_row, example_result, host, ok_row, reference
from rich.console import Console

from kvxfer.result.progress import Progress
from kvxfer.result.tables import TERMS, figure, make_console, plain, render

WIDTHS = (80, 100, 120, 160)


def printed(result: dict[str, Any], width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    render(result | {"ratio": []}, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def many_rows() -> dict[str, Any]:
    rows = []
    for backend, transport in (("tcp", "tcp/lo"), ("ucx", "rc_mlx5/mlx5_0:1+rc_mlx5/mlx5_1:1")):
        for op in ("push", "pull"):
            row = ok_row(8192, 912_345_678) | {"p90_ns": 1_234_567_890, "p99_ns": 98_765_432_100, "hot": True}
            rows.append(row | {"id": backend + op, "backend": backend, "op": op, "transport": transport})
    references = [reference(row["id"], kind, row["bytes"], 500_000_000) for row in rows for kind in ("bulk", "memcpy")]
    return example_result() | {"results": rows, "references": references}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("result", [example_result(), many_rows()], ids=["example", "many rows"])
def test_nothing_exceeds_the_width_and_no_figure_is_cut(result: dict[str, Any], width: int) -> None:
    text = printed(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row in result["results"]:
        if row["status"] == "ok":
            for shown in (f"{row['descriptors']:,}", figure(row["p50_ns"] / 1e6), figure(row["bandwidth_gbyte_s"])):
                assert re.search(rf"(?<![\d.,]){re.escape(shown)}(?![\d.,])", text), shown


@pytest.mark.parametrize("width", WIDTHS)
def test_percentiles_of_the_tail_are_shown_when_there_are_any(width: int) -> None:
    assert "98,765" in printed(many_rows(), width)
    assert "1,235" in printed(many_rows(), width)
    assert "p99" not in printed(example_result(), width).split("What the words mean")[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_narrow_and_wide_say_the_same(width: int) -> None:
    """Whatever figures the widest print shows, the narrow one shows too."""

    def figures(text: str) -> set[str]:
        return set(re.findall(r"[\d.,]*\d", text))

    assert figures(printed(many_rows(), width)) == figures(printed(many_rows(), 400))


def test_a_loopback_figure_is_labelled_wherever_it_stands() -> None:
    text = printed(example_result())
    assert "this says nothing about a link between two hosts" in words(text)
    titles = [line for line in text.splitlines() if line.startswith(("Transfers", "Setup", "Ceilings"))]
    assert len(titles) >= 3
    assert all("(loopback)" in title for title in titles)


def test_two_hosts_are_both_described() -> None:
    text = printed(example_result() | {"scope": "network", "peer": host("beta")})
    assert "beta: AMD" in text
    assert "says nothing" not in text
    assert "beta" not in printed(example_result())


def test_setup_shows_median_and_longest_of_every_phase() -> None:
    text = printed(example_result())
    cold = example_result()["results"][0]["setup"]["cold_ns"]
    assert f"{cold['p50'] / 1e6:.1f} ({cold['max'] / 1e6:.1f})" in text
    assert "of 5 fresh starts" in text


def test_a_row_is_set_against_its_own_ceilings() -> None:
    """2.684 GB in 912 ms is 2.94 GB/s; bulk took 801 ms (88 %), memcpy 431 ms (47 %)."""
    line = next(line for line in printed(example_result()).splitlines() if "88 %" in line)
    assert line.split() == ["8192", "2.94", "3.35", "88", "%", "6.23", "47", "%"]


def test_a_failed_row_is_shown_with_its_reason() -> None:
    text = printed(example_result())
    assert "131072 tokens" in text
    assert "the pool takes 80.0 GiB and 55.1 GiB are free" in words(text)


def test_when_every_row_failed_there_is_no_table() -> None:
    text = printed(example_result() | {"results": [error_row(512)], "references": []})
    assert "Rows that failed" in text
    assert "Transfers" not in text
    assert "What the words mean" not in text


def test_a_result_without_rows_can_be_shown() -> None:
    assert "loopback" in printed(example_result() | {"results": [], "references": []})


def test_what_rows_share_is_said_once_and_what_tells_them_apart_in_columns() -> None:
    text = printed(many_rows())
    assert text.count("llama-3.1-70b") == 1
    assert "backend  op" in text
    assert "backend tcp" not in text.split("Transfers")[0]


def test_warnings_are_shown_and_explained_only_where_they_hold() -> None:
    result = example_result()
    for word in ("hot", "noisy", "not converged", "not warm", "unverified"):
        assert not re.search(rf"\b{word}\b", printed(result)), word
    warned = {
        "hot": True,
        "noisy": True,
        "converged": False,
        "verified": "off",
        "warmup": {"samples": 1, "wall_ns": 1, "agreed": False},
    }
    result["results"][0] |= warned
    text = words(printed(result, 300))
    assert "not converged, not warm, noisy, hot, unverified" in text
    for word in ("hot", "noisy", "not converged", "not warm", "unverified"):
        assert f"{word} {words(TERMS[word])}" in text


def test_references_are_explained_only_when_there_are_any() -> None:
    assert TERMS["memcpy"] in words(printed(example_result()))
    assert "memcpy" not in printed(example_result() | {"references": []})


def test_too_few_samples_for_an_interval_are_shown_as_that() -> None:
    result = example_result()
    result["results"][0] |= {"ci95_ns": None}
    assert "52.4 ± ? %" in words(printed(result))


def test_unknown_figures_are_dashes_not_zeros() -> None:
    result = example_result()
    result["results"][0] |= {"bandwidth_gbyte_s": None, "cpu_s_per_gib": {"prefill": None, "decode": None}}
    line = next(line for line in printed(result).splitlines() if line.lstrip().startswith("512"))
    assert line.split().count("–") == 2


def test_verdict_and_notices_are_shown() -> None:
    verdict = {"answer": "split", "reasons": ["the link is fast"]}
    text = printed(example_result() | {"verdict": verdict, "notices": ["swap is in use"]})
    assert "Verdict: split" in text
    assert "- the link is fast" in text
    assert "Note  swap is in use" in text


def test_the_ratio_is_left_to_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, Any]] = []
    stub = types.ModuleType("kvxfer.result.ratio_table")
    stub.render_ratio = lambda ratio, assumptions, console: calls.append((ratio, assumptions))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvxfer.result.ratio_table", stub)
    result = example_result()
    render(result, Console(file=io.StringIO()))
    assert calls == [(result["ratio"], result["assumptions"])]


def test_names_are_shown_as_they_are_and_cannot_command_the_terminal() -> None:
    result = example_result()
    result["results"] = [row | {"model": "[red]x[/y] :smile:"} for row in result["results"]]
    result["host"]["hostname"] = "a\x1b[2Jb\nc"
    text = printed(result)
    assert "[red]x[/y] :smile:" in text
    assert "\x1b" not in text
    assert "a?[2Jb c" in text


def test_colours_only_on_a_terminal() -> None:
    assert "\x1b[" in printed(example_result(), force_terminal=True, color_system="standard")
    assert "\x1b[" not in printed(example_result())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (1234.5, "1,234"),
        (912.3, "912"),
        (52.44, "52.4"),
        (7.914, "7.91"),
        (0.1684, "0.168"),
        (0.01234, "0.0123"),
        (0.00123, "0.00123"),
    ],
)
def test_a_figure_has_three_significant_digits(value: float | None, shown: str) -> None:
    assert figure(value) == shown


def test_plain_is_one_line() -> None:
    assert plain("a\tb\n c\x07") == "a b c?"


class Stream(io.StringIO):
    """Standard output or error that says what it is told to."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_file_is_120_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(terminal=False))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == 120
    monkeypatch.setenv("COLUMNS", "90")
    assert make_console().width == 90


def test_a_character_the_output_lacks_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    render(example_result() | {"ratio": []}, make_console())
    sys.stdout.flush()
    assert b"52.4 ? 0.8 %" in raw.getvalue()


def on_a_terminal(body: str) -> str:
    """What a program with `progress` shows on a terminal of 60 columns as its standard error."""
    program = "from kvxfer.result.progress import Progress\nwith Progress(True) as progress:\n " + body
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60"}
    run = subprocess.Popen([sys.executable, "-c", program], stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody has it open any more
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    run.wait(60)
    return shown.decode()


ERASED = "\x1b[?25h\r\x1b[1A\x1b[2K"  # the cursor is visible again and the line gone


def test_progress_shows_the_step_on_a_terminal() -> None:
    shown = on_a_terminal("progress.step('70b bf16 tcp push 8192 tokens: setup 3/5'); progress.step('[x]' + 'y' * 100)")
    assert "70b bf16 tcp push 8192 tokens: setup 3/5" in shown
    assert "[x]" + "y" * 56 + "…" in shown
    assert "y" * 57 not in shown
    assert ERASED in shown


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_progress_leaves_the_terminal_clean(error: str) -> None:
    shown = on_a_terminal(f"progress.step('the step'); raise {error}")
    before, after = shown.split("Traceback")
    assert before.endswith(ERASED)
    assert "the step" in before
    assert error in after


@pytest.mark.parametrize(("enabled", "is_terminal"), [(True, False), (False, True), (False, False)])
def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch, enabled: bool, is_terminal: bool) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(enabled) as progress:
        progress.step("one")
    assert stream.getvalue() == ""
