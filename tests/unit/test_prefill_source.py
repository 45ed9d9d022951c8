"""Where a prefill's time comes from: assumed, or as the user measured it, and files of such times."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.prefill_file import read_prefill_times
from kvxfer.cost.prefill_source import PrefillRate, PrefillTimes, prefill_sources, prompt_ms
from kvxfer.errors import UsageError
from kvxfer.model.presets import load_model

LLAMA_70B = load_model("70b")
TIMES = PrefillTimes([(1000, 100.0), (2000, 220.0), (4000, 500.0)], "times.csv")


def read(tmp_path: Path, text: str, extrapolate: bool = False) -> PrefillTimes:
    path = tmp_path / "times.csv"
    path.write_text(text)
    return read_prefill_times(str(path), extrapolate)


def test_sources_are_named() -> None:
    seed, full, rate = prefill_sources(LLAMA_70B, Assumptions(params=70e9), PrefillRate(12_000))
    assert [source.basis for source in (seed, full, rate)] == ["seed", "full", "given"]
    assert seed.named() == "assumed: 2·70e9·N FLOP on 4 GPUs at 400 TFLOP/s each"
    assert full.named().startswith("assumed: (2·68.45e9·N + 2·80·64·128·N²)")
    assert rate.named() == "given: 12,000 tokens/s (--prefill-tokens-per-s)"
    assert TIMES.named() == "given: 3 lengths of 1,000 … 4,000 tokens in times.csv (--prefill-csv)"


@given(cut=st.integers(0, 10_000), tokens=st.integers(1, 10_000))
def test_parts_of_a_prompt_are_the_whole(cut: int, tokens: int) -> None:
    cut = min(cut, tokens)
    for source in prefill_sources(LLAMA_70B, Assumptions(), PrefillRate(5000)):
        parts = source.between_ms(0, cut) + source.between_ms(cut, tokens)
        assert parts == pytest.approx(source.between_ms(0, tokens))


def test_a_rate_is_the_same_for_every_token() -> None:
    assert PrefillRate(10_000).between_ms(100, 600) == pytest.approx(50)
    hits = Assumptions(prefix_hit_prefill=0.75)
    assert prompt_ms(PrefillRate(10_000), hits, 1000) == pytest.approx(25)


@pytest.mark.parametrize(("tokens", "ms"), [(1000, 100), (1500, 160), (2000, 220), (3000, 360), (4000, 500)])
def test_a_line_is_drawn_between_two_times(tokens: int, ms: float) -> None:
    assert TIMES.between_ms(0, tokens) == pytest.approx(ms)
    assert TIMES.between_ms(1000, tokens) == pytest.approx(ms - 100)


@pytest.mark.parametrize("tokens", [1, 999, 4001])
def test_outside_the_lengths_there_is_no_time_unless_that_is_said(tokens: int) -> None:
    assert not TIMES.covers(tokens)
    with pytest.raises(UsageError, match=r"outside the 1,000 … 4,000 tokens of times.csv; .*--prefill-extrapolate"):
        TIMES.between_ms(0, tokens)
    beyond = PrefillTimes(TIMES.points, "times.csv", extrapolate=True)
    assert beyond.covers(tokens)
    assert "extrapolated" in beyond.named()


def test_tokens_that_take_no_time_are_refused() -> None:
    """As where the times of a file are alike but for rounding: nothing can be set against no time."""
    alike = PrefillTimes([(1, 1e11), (10**8, 1e11 + 1e-5)], "times.csv")
    with pytest.raises(UsageError, match="take no time by given: 2 lengths"):
        prompt_ms(alike, Assumptions(prefix_hit_prefill=0.999999), 1000)


def test_extrapolation_keeps_the_first_rate_and_the_last_slope() -> None:
    beyond = PrefillTimes(TIMES.points, "times.csv", extrapolate=True)
    assert beyond.between_ms(0, 10) == pytest.approx(1)
    assert beyond.between_ms(0, 5000) == pytest.approx(640)
    assert PrefillTimes([(1000, 100.0)], "one.csv", extrapolate=True).between_ms(0, 3000) == pytest.approx(300)


@pytest.mark.parametrize(
    ("header", "factor"),
    [("", 1), ("tokens,prefill_ms\n", 1), ("tokens,time_s\n", 1000), ("n,prefill seconds\n", 1000)],
)
def test_the_header_names_the_unit(header: str, factor: float, tmp_path: Path) -> None:
    times = read(tmp_path, f"{header}2000,3\n\n1000,1\n1000,9\n1000,2\n")
    assert list(times.points) == [(1000, 2 * factor), (2000, 3 * factor)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        ("tokens,ms\n", "line 1: nothing follows the header"),
        ("tokens,minutes\n1,2\n", "line 1: the header 'tokens,minutes'"),
        ("1000,10\n2000\n", "line 2: '2000'"),
        ("1000,10\n2000,x\n", "line 2: '2000,x'"),
        ("1000,10\n2000,-1\n", "line 2: '2000,-1'"),
        ("1000,nan\n", "line 1: '1000,nan'"),
        ("1_000,10\n", "line 1: '1_000,10'"),
        ("1000,1_0\n", "line 1: '1000,1_0'"),
        ("1000,１０\n", "line 1: '1000,１０'"),
        ("1000,10\n２０００,20\n", "line 2: '２０００,20'"),
        ("1000,10,5\n", "line 1: '1000,10,5'"),
        ("0,1\n", "line 1: '0,1'"),
        ("1000,10,3\n", "line 1: '1000,10,3'"),
        ("1024,92\n8192,92\n", "line 2: 8,192 tokens take 92 ms, and 1,024 tokens 92 ms"),
        ("1000,10\n500,8\n2000,9\n", "line 3: 2,000 tokens take 9 ms, and 1,000 tokens 10 ms"),
    ],
)
def test_wrong_times_are_named_by_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert told in str(error.value)
    assert "times.csv" in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_prefill_times(str(tmp_path / "none.csv"), False)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read_prefill_times(str(tmp_path / "binary.csv"), False)
