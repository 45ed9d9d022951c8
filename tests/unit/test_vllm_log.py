"""vLLM's own line of its transfers: what it means, alone and in a log, and one error where it tells of none."""

from __future__ import annotations

import pytest

from kvxfer.cost.vllm_log import is_log, read_log
from kvxfer.errors import UsageError

LINE = (
    "(EngineCore pid=428) INFO 07-13 16:33:58 [metrics.py:103] KV Transfer metrics: Num successful transfers=4, "
    "Avg xfer time (ms)=173.8, P90 xfer time (ms)=180.5, Avg post time (ms)=129.1, P90 post time (ms)=133.0, "
    "Avg MB per transfer=313.0, Throughput (MB/s)=1800.921, Avg number of descriptors=40064.0"
)
FAILED = "KV Transfer metrics: Num successful transfers=0, Avg xfer time (ms)=0, Avg MB per transfer=0"
OFFLOADING = "KV Transfer metrics: GPU_to_CPU_total_bytes=12"


def test_a_line_tells_the_mean_transfer() -> None:
    """Its MB are 2^20 bytes: 313 in vLLM #34054 are 40,064 pieces of 8,192."""
    found = read_log(LINE, "line")
    one = found.observation
    assert (one.ms, one.bytes, one.descriptors, one.post_ms) == (173.8, 40_064 * 8192, 40_064, 129.1)
    assert found.transfers == 4
    assert found.notices[0] == "the mean of 4 transfers in one interval of vLLM's log, whose MB are 2^20 bytes"
    assert "90 % of them took at most 180.5 ms" in found.notices


@pytest.mark.parametrize("before", ["", "KV Transfer metrics: "])
def test_it_does_without_what_a_logger_puts_before_it(before: str) -> None:
    text = before + LINE.partition("metrics: ")[2]
    assert is_log(text)
    assert read_log(text, "line").observation == read_log(LINE, "line").observation


def test_a_wrapped_line_is_one() -> None:
    assert read_log(LINE.replace(" time", "\n  time"), "line") == read_log(LINE, "line")


@pytest.mark.parametrize("width", [47, 80, 97, 120, 133])
@pytest.mark.parametrize("after", ["", "2026-07-13 16:34:08 INFO GET /", "INFO 07-13"])
def test_a_line_that_a_terminal_cut_is_one(width: int, after: str) -> None:
    cut = "\n".join([LINE[start : start + width] for start in range(0, len(LINE), width)])
    assert read_log(f"{cut}\n{after}\n", "line").observation == read_log(LINE, "line").observation


@pytest.mark.parametrize("figure", ["173.8", "129.1", "313.0", "40064.0"])
def test_a_figure_that_a_terminal_cut_is_one(figure: str) -> None:
    for at in range(len(figure)):
        cut = LINE.replace(f"={figure}", f"={figure[:at]}\n{figure[at:]}")
        assert read_log(cut, "line").observation == read_log(LINE, "line").observation


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    """17 ms, of 173.8."""
    earlier = LINE.replace("=173.8", "=150.5")
    for cut in (LINE[: LINE.index("3.8")], LINE.replace("=40064.0", "=400\n64")):
        found = read_log(f"{earlier}\n{cut}", "log", is_whole=False)
        assert found.observation.ms == 150.5
        assert found.notices[0] == "line 2 ends without a newline: it may be cut off, and is left out"
        with pytest.raises(UsageError, match="line 1 ends without a newline"):
            read_log(cut, "log", is_whole=False)
    assert read_log(f"{earlier}\n{LINE}\nINFO GE", "log", is_whole=False).observation.ms == 173.8


@pytest.mark.parametrize("form", ['{{"msg":"{}"}}', "b'{}'", "({})", "[{}]", "\x1b[32m{}\x1b[0m", '{{"log":"{}\\n"}}'])
def test_it_does_with_what_a_logger_puts_around_it(form: str) -> None:
    assert read_log(form.format(LINE), "line").observation == read_log(LINE, "line").observation


def test_of_a_log_the_last_line_that_tells_of_transfers_counts() -> None:
    later = LINE.replace("=173.8", "=150.5")
    found = read_log("\n".join(["INFO Started", LINE, "INFO GET /", later, "INFO", FAILED, OFFLOADING, ""]), "log")
    assert found.observation.ms == 150.5
    assert found.notices[0] == "line 4 is the last of 2 such lines; give another one itself as --observed"


def test_what_a_connector_does_not_log_is_not_known() -> None:
    """Mooncake's has no time of posting; a figure that is rounded to 0 says no more."""
    one = read_log(
        "KV Transfer metrics: Num successful transfers=2, Avg xfer time (ms)=1.5, Avg MB per transfer=0.0, "
        "Avg number of descriptors=5.0, Num failed transfers=0",
        "line",
    ).observation
    assert (one.ms, one.bytes, one.descriptors, one.post_ms) == (1.5, None, 5, None)


def test_a_mean_above_the_tail_is_told() -> None:
    assert "carry it" in read_log(LINE.replace("=180.5", "=100"), "line").notices[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FAILED, "line tells of no successful transfer"),
        (OFFLOADING, "line tells of no successful transfer"),
        (LINE.replace("=173.8", "=nan"), r"line: Avg xfer time \(ms\) is 'nan'"),
        (LINE.replace("=313.0", "=-1"), "line: Avg MB per transfer is '-1'"),
        (LINE.replace("=313.0", "=1e400"), "it should be a number from 0"),
        (LINE.replace("=40064.0", "="), "Avg number of descriptors is ''"),
        (LINE.replace("=173.8", "=0.0"), "has no Avg xfer time"),
        (LINE.replace("=173.8", "=100"), "129.1 and Avg xfer time \\(ms\\) 100, of which it is a part"),
        (f"INFO\n{LINE}x\n{LINE.replace('=173.8', '=x')}\n", "line, line 3: Avg xfer time"),
    ],
)
def test_a_line_that_tells_of_none_is_one_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_log(text, "line")


def test_what_no_transfer_takes_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="ms would be 1e-09, and it is from 1e-06 to 1e"):
        read_log("KV Transfer metrics: Num successful transfers=1, Avg xfer time (ms)=1e-9", "here")
