"""vLLM's Prometheus text: what its histograms mean, and one error with a line number where it is no such text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cost.prometheus import scrape
from kvxfer.errors import UsageError

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-70B"} 3.0
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="m"} 0.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.2",model_name="m"} 9.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 1.738
vllm:nixl_post_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 1.291
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 10.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 3.28204288e+09
vllm:nixl_num_descriptors_count{engine="0",model_name="m"} 10.0
vllm:nixl_num_descriptors_sum{engine="0",model_name="m"} 400640.0
"""


POST_COUNT = 'post_time_seconds_count{{engine="0",model_name="m"}} {}'


def test_the_mean_transfer() -> None:
    found = scrape(TEXT, "metrics")
    observation = found.observation
    assert (observation.ms, observation.post_ms) == pytest.approx((173.8, 129.1))
    assert (observation.bytes, observation.descriptors) == pytest.approx((328_204_288, 40_064))
    assert found.transfers == 10
    assert found.notices[0].endswith("of one engine")
    assert "half of them took at most 200 ms, 90 % at most 200 ms (upper edges of buckets)" in found.notices


def test_engines_are_added_up() -> None:
    other = TEXT.replace('engine="0"', 'engine="1"').replace(" 1.738\n", " 1.438\n")
    found = scrape(TEXT + other, "metrics")
    assert found.transfers == 20
    assert found.observation.ms == pytest.approx(1e3 * (1.738 + 1.438) / 20)
    assert "of 2 engines or models" in found.notices[0]


def test_a_mean_that_few_long_ones_carry_is_told() -> None:
    assert "a few very long ones" in " ".join(scrape(TEXT.replace(" 1.738\n", " 40\n"), "m").notices)


def test_posting_for_longer_than_the_transfer_takes_is_refused() -> None:
    """As the same figures are by hand."""
    text = TEXT.replace(" 1.738\n", " 1\n").replace(" 1.291\n", " 5\n")
    with pytest.raises(UsageError, match=r"^metrics: the mean of vllm:nixl_post_time_seconds is 500 ms .* 100 ms"):
        scrape(text, "metrics")
    assert scrape(text.replace(" 5\n", " 1\n"), "metrics").observation.post_ms == 100


def test_what_was_not_counted_is_not_known() -> None:
    """Other connectors and older versions have fewer histograms."""
    few = "".join(
        line for line in TEXT.splitlines(keepends=True) if "post_time" not in line and "descriptors" not in line
    )
    observation = scrape(few, "metrics").observation
    assert observation.post_ms is None
    assert observation.descriptors is None
    assert observation.bytes == pytest.approx(328_204_288)


def test_counts_that_differ_are_told() -> None:
    text = TEXT.replace('post_time_seconds_count{engine="0",model_name="m"} 10', POST_COUNT.format(9))
    assert "different numbers of transfers" in " ".join(scrape(text, "m").notices)


@pytest.mark.parametrize(
    "again",
    [
        'vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 1.738',
        'vllm:nixl_xfer_time_seconds_sum{ model_name="m" ,engine="0",} 2',
        'vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 10',
        'vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.2",model_name="m"} 9',
    ],
)
def test_a_series_that_is_there_twice_is_refused(again: str) -> None:
    lines = TEXT.splitlines()
    first = 1 + next(number for number, line in enumerate(lines) if line.startswith(again.partition("{")[0]))
    first += "0.2" in again
    with pytest.raises(UsageError, match=rf"line {1 + len(lines)}: .* is the same series as in line {first};"):
        scrape(TEXT + again + "\n", "m")
    with pytest.raises(UsageError, match=rf"line {5 + len(lines)}: .* is the same series as in line 5;"):
        scrape(TEXT + TEXT, "m")


@pytest.mark.parametrize("end", ["", "8", "vllm:nixl_xfer_time_seconds_sum 11.738", "# EO"])
def test_a_text_that_ends_inside_a_line_is_refused(end: str) -> None:
    text = TEXT + end if end else TEXT[:-1]
    with pytest.raises(UsageError, match=rf"line {text.count(chr(10)) + 1}: "):
        scrape(text, "m")


@pytest.mark.parametrize("part", ["count", "sum"])
def test_a_histogram_that_is_not_whole_is_refused(part: str) -> None:
    whole = f'vllm:nixl_bytes_transferred_{part}{{engine="0"'
    text = "".join(line for line in TEXT.splitlines(keepends=True) if not line.startswith(whole))
    with pytest.raises(UsageError, match=rf"nixl_bytes_transferred\{{engine=0, model_name=m\}} has no _{part}: "):
        scrape(text, "m")


def test_posting_of_which_nothing_was_counted_is_not_told() -> None:
    counted = 'post_time_seconds_sum{engine="0",model_name="m"} '
    text = TEXT.replace(f"{counted}1.291", f"{counted}0")
    assert text != TEXT
    assert scrape(text, "m").observation.post_ms is None


@pytest.mark.parametrize(
    ("metric", "total", "told"),
    [
        ("xfer_time_seconds", "0", "ms = 0"),
        ("xfer_time_seconds", "1e-320", "ms = "),
        ("xfer_time_seconds", "1e306", r"the sum of a histogram is 1e\+306"),
        ("xfer_time_seconds", "1e30", r"ms = 1e\+32"),
        ("bytes_transferred", "0", "bytes = 0"),
        ("num_descriptors", "0", "descriptors = 0"),
        ("num_descriptors", "1e20", r"descriptors = 1e\+19"),
    ],
)
def test_a_mean_that_no_transfer_has_is_refused(metric: str, total: str, told: str) -> None:
    start = f'vllm:nixl_{metric}_sum{{engine="0",model_name="m"}} '
    text = "".join(start + total + "\n" if line.startswith(start) else line for line in TEXT.splitlines(keepends=True))
    assert text != TEXT
    with pytest.raises(UsageError, match=told):
        scrape(text, "m")


@pytest.mark.parametrize(
    "line",
    [
        'a{b="c d\\"} e"} 1',
        'a{b="1",} 1',
        "a 1 1700000000000",
        "a NaN",
        "a +Inf",
        "a\t1e-3",
        'a_bucket{le="1"} 2 # {trace_id="x"} 0.5 1700000000.0',
        "# EOF",
        "   ",
        'a { b = "c" } .5',
    ],
)
def test_the_rest_of_the_format_is_passed_over(line: str) -> None:
    assert scrape(TEXT + line + "\n", "m").transfers == 10


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "{}",
        'a{b="c} 1',
        "a{b=c} 1",
        "a",
        "a one",
        "a 1 2 3",
        "1a 1",
        'a{b="c"',
        'vllm:nixl_xfer_time_seconds_count{engine="0"} -1',
        'vllm:nixl_xfer_time_seconds_sum{engine="0"} NaN',
        'vllm:nixl_xfer_time_seconds_bucket{engine="0"} 1',
    ],
)
def test_malformed_text_is_one_error_with_its_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"^metrics, line 3: "):
        scrape("# one\n\n" + line + "\n" + TEXT, "metrics")


@pytest.mark.parametrize(
    ("sample", "value"),
    [('nixl_num_descriptors_count{engine="0"', "10.5"), ('nixl_xfer_time_seconds_bucket{engine="0",le="0.2"', "9.5")],
)
def test_what_is_counted_is_whole(sample: str, value: str) -> None:
    lines = TEXT.splitlines()
    (number,) = [number for number, line in enumerate(lines) if sample in line]
    lines[number] = f"{lines[number].rpartition(' ')[0]} {value}"
    with pytest.raises(UsageError, match=rf"line {number + 1}: the (count|bucket) of a histogram is {value}, and it"):
        scrape("\n".join([*lines, ""]), "m")


def test_the_bucket_of_all_and_the_count_are_the_same() -> None:
    with pytest.raises(UsageError, match=r"m\} has 12 in its bucket of all \(le=\+Inf\) and 10 as its _count; scrape"):
        scrape(TEXT.replace('le="+Inf",model_name="m"} 10', 'le="+Inf",model_name="m"} 12'), "m")


def test_buckets_that_fall_are_refused() -> None:
    with pytest.raises(UsageError, match=r"nixl_xfer_time_seconds\{engine=0, model_name=m\} has buckets that fall"):
        scrape(TEXT.replace('le="0.005",model_name="m"} 0.0', 'le="0.005",model_name="m"} 99'), "m")


def test_engines_with_buckets_of_their_own() -> None:
    """Of all together only the edges are known that all have."""
    other = TEXT.replace('engine="0"', 'engine="1"').replace('le="0.005"', 'le="0.01"')
    notices = scrape(TEXT + other, "m").notices
    assert "of 2 engines" in notices[0]
    assert notices[1] == "half of them took at most 200 ms, 90 % at most 200 ms (upper edges of buckets)"
    apart = other.replace('le="0.2",model_name="m"} 9', 'le="0.3",model_name="m"} 8')
    assert [notice for notice in scrape(TEXT + apart, "m").notices if "half" in notice] == []


def test_nothing_moved_yet() -> None:
    with pytest.raises(UsageError, match="has no vllm:nixl_xfer_time_seconds"):
        scrape("up 1\n", "m")
    with pytest.raises(UsageError, match="has counted no transfer yet"):
        scrape('vllm:nixl_xfer_time_seconds_count{engine="0"} 0\nvllm:nixl_xfer_time_seconds_sum{engine="0"} 0\n', "m")


@given(st.text(max_size=200) | st.lists(st.sampled_from(list('{}",=_le 1a\n#\\\t')), max_size=60).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(UsageError):
        scrape(text, "m")


def test_a_long_malformed_line_takes_no_time() -> None:
    for line in ("a" + " " * 300_000 + "b", "a{" + 'b="c",' * 50_000, 'a{b="' + "\\x" * 100_000):
        with pytest.raises(UsageError, match="line 1"):
            scrape(line, "m")
