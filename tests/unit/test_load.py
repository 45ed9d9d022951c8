"""The offered load: files of lengths and traces, what is drawn without them, and every wrong line."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cost import lines
from kvxfer.cost.load import DRAWN, Load
from kvxfer.cost.load_file import TraceUnit, read_load
from kvxfer.errors import UsageError

MOONCAKE = [
    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]},
    {"timestamp": 4000, "input_length": 100, "output_length": 0, "hash_ids": []},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.6805900,879,55
"""


QWEN = [
    {"chat_id": 159, "timestamp": 61, "input_length": 521, "output_length": 132, "type": "text", "turn": 1},
    {"chat_id": 160, "timestamp": 62, "input_length": 600, "output_length": 132, "type": "text", "turn": 1},
]


def read(tmp_path: Path, text: str, unit: TraceUnit | None = None) -> Load:
    path = tmp_path / "load"
    path.write_text(text)
    return read_load(str(path), unit)


def test_lengths_one_a_line(tmp_path: Path) -> None:
    load = read(tmp_path, "512\n\n 8192 \n2048\n")
    assert list(load.prompts) == [512, 8192, 2048]
    assert load.requests_per_s is None
    assert load.mean_output is None
    assert "3 lengths of" in load.source


def test_a_trace_as_mooncakes(tmp_path: Path) -> None:
    load = read(tmp_path, "\n".join(map(json.dumps, MOONCAKE)))
    assert list(load.prompts) == [6755, 7322, 100]
    assert list(load.arrivals_s) == [0, 3, 4]
    assert load.requests_per_s == pytest.approx(0.5)
    assert load.mean_output == 330
    assert load.burstiness == pytest.approx(0.5)


def test_a_trace_as_azures_in_csv_and_in_order_of_arrival(tmp_path: Path) -> None:
    load = read(tmp_path, AZURE)
    assert list(load.prompts) == [374, 879, 396]
    assert list(load.arrivals_s) == pytest.approx([0, 2, 4.314579])
    assert list(load.outputs) == [44, 55, 109]


def test_azures_names_in_json_lines(tmp_path: Path) -> None:
    load = read(
        tmp_path,
        '{"TIMESTAMP": "2024-05-10 00:00:00.009930+00:00", "ContextTokens": 2162, "GeneratedTokens": 5}\n'
        '{"TIMESTAMP": "2024-05-10T00:00:01.009930Z", "ContextTokens": 2399, "GeneratedTokens": 6}\n',
    )
    assert load.requests_per_s == pytest.approx(1)


def test_numbers_have_the_unit_that_is_said(tmp_path: Path) -> None:
    qwen, mooncake = ("\n".join(map(json.dumps, trace)) for trace in (QWEN, MOONCAKE))
    assert read(tmp_path, qwen, "s").requests_per_s == pytest.approx(1)
    assert read(tmp_path, qwen, "ms").requests_per_s == pytest.approx(1000)
    assert read(tmp_path, mooncake, "ms") == read(tmp_path, mooncake)
    assert read(tmp_path, '{"input_length": 1, "timestamp": 0.5}', "s").prompts[0] == 1
    assert read(tmp_path, AZURE, "ms").arrivals_s == read(tmp_path, AZURE).arrivals_s  # a date has none


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(QWEN[0]),
        '{"input_length": 5, "timestamp": 0}\n{"input_length": 5, "timestamp": 61.8}',
        '{"input_length": 5, "timestamp": 1764460800}',
    ],
    ids=["Qwen's", "fractions", "since 1970"],
)
def test_numbers_that_may_be_seconds_are_asked_about(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="say --trace-unit s, or ms"):
        read(tmp_path, text)


def test_a_trace_may_lack_times_and_answers(tmp_path: Path) -> None:
    load = read(tmp_path, '{"input_length": 5}\n{"input_length": 6}\n')
    assert (len(load.outputs), len(load.arrivals_s)) == (0, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("512\nmany\n", "line 2: 'many' is no prompt length"),
        ("512\n\n-1\n", "line 3: '-1' is no prompt length"),
        ("512\n0\n", "line 2: '0' is no prompt length"),
        ("512\n1e3\n", "line 2: '1e3'"),
        ('{"input_length": 5}\n{"input_length": \n', "line 2: "),
        ('{"input_length": 5}\n[5]\n', "line 2: '[5]' is no JSON object"),
        ('{"output_length": 5}\n', "line 1: there is no input_length nor ContextTokens"),
        ('{"input_length": 5.5}\n', "line 1: input_length is 5.5"),
        ('{"input_length": -5}\n', "line 1: input_length is -5"),
        ('{"input_length": true}\n', "line 1: input_length is True"),
        ('{"input_length": 5, "output_length": -1}\n', "line 1: output_length is -1"),
        ('{"input_length": 5, "timestamp": -1}\n', "line 1: timestamp is -1"),
        ('{"input_length": 5, "timestamp": NaN}\n', "line 1: timestamp is nan"),
        ('{"input_length": 5, "timestamp": "noon"}\n', "line 1: timestamp is 'noon'"),
        ('{"input_length": 5, "timestamp": "2023-13-01 00:00:00"}\n', "line 1: timestamp is '2023-13-01"),
        ('{"input_length": 5, "timestamp": 1}\n{"input_length": 5}\n', "line 2: this request has no timestamp"),
        (
            '{"input_length": 5}\n{"input_length": 5, "output_length": 1}\n',
            "line 2: the first request has no output length",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request follows the header"),
        (AZURE + "2023-11-16 18:15:46,5\n", "line 5: '2023-11-16 18:15:46,5' has 2 fields, the header 3"),
        (AZURE + "2023-11-16 18:15:46,x,5\n", "line 5: ContextTokens is 'x'"),
    ],
)
def test_wrong_files_are_named_by_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert told in str(error.value)
    assert "give a prompt length on each line" in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"input_length": 5, "timestamp": 1}\n{"input_length": 5, "timestamp": "2024-05-10 00:00:00"}\n',
            "line 2: the timestamp is a date, and the first request's a number; give one kind",
        ),
        (
            '{"input_length": 5, "timestamp": "2024-05-10 00:00:00"}\n{"input_length": 5, "timestamp": 1}\n',
            "line 2: the timestamp is a number, and the first request's a date; give one kind",
        ),
    ],
)
def test_timestamps_are_all_of_one_kind(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert told in str(error.value)


def test_a_file_is_kept_as_numbers_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 20_000
    lengths = "".join(f"{number}\n" for number in range(1, count + 1))
    trace = "".join(f'{{"timestamp": {number}, "input_length": 9}}\n' for number in range(count))
    for text, each in ((lengths, 4), (trace, 12)):
        path = tmp_path / "load"
        path.write_text(text)
        tracemalloc.start()
        read_load(str(path))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2.5 * each * count + (1 << 18)  # while an array grows there are two; and the file's buffers
    monkeypatch.setattr(lines, "MOST_LINES", count - 1)
    with pytest.raises(UsageError, match=r"line 20000: more than 19,999 lines are not read; give a part"):
        read_load(str(path))
    monkeypatch.setattr(lines, "LONGEST_LINE", 10)
    with pytest.raises(UsageError, match=r"line 1: it has \d\d characters"):
        read_load(str(path))


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    assert list(read(tmp_path, "\ufeff512\r\n1024\r\n").prompts) == [512, 1024]


def test_percentiles() -> None:
    load = Load(list(range(100, 0, -1)), "here")
    assert [load.percentile(percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=400), st.integers(5, 100))
def test_what_stands_for_a_load_has_its_requests_and_its_tokens(prompts: list[int], most: int) -> None:
    load = Load(prompts, "here")
    standing = load.standing(most)
    assert len(standing) <= most
    assert list(standing) == sorted(standing)
    assert sum(standing.values()) == len(prompts)
    assert min(prompts) <= min(standing)
    assert max(standing) <= max(prompts)
    tokens = sum(prompt * count for prompt, count in standing.items())
    assert tokens == pytest.approx(sum(prompts), abs=len(prompts) / 2)


def test_few_lengths_stand_for_themselves_and_a_few_long_ones_are_kept_apart() -> None:
    assert Load([512, 8192, 512], "here").standing(5) == {512: 2, 8192: 1}
    standing = Load([*range(100, 200), 10**6], "here").standing(10)
    assert (min(standing) < 200, standing[10**6]) == (True, 1)


def test_drawn_requests_are_the_same_each_time_and_come_at_the_rate() -> None:
    load = Load([10, 20], "here", rate=4.0)
    requests = load.requests()
    assert requests == load.requests()
    assert len(requests) == DRAWN
    assert requests[-1][0] / 1e3 == pytest.approx(DRAWN / 4, rel=0.03)
    assert sum(prompt for _, prompt in requests) / DRAWN == pytest.approx(15, rel=0.02)
    assert load.requests(2)[-1][0] == pytest.approx(2 * requests[-1][0])


def test_a_trace_is_dealt_in_turn_and_stretched_to_a_rate() -> None:
    load = Load([1, 2, 3, 4], "here", arrivals_s=[0.0, 1.0, 2.0, 3.0])
    assert load.requests() == [(0, 1), (1000, 2), (2000, 3), (3000, 4)]
    assert load.requests(2) == [(0, 1), (2000, 3)]
    assert Load(load.prompts, "", arrivals_s=load.arrivals_s, rate=2.0).requests() == [
        (0, 1),
        (500, 2),
        (1000, 3),
        (1500, 4),
    ]


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    load = Load([1, 2], "here", arrivals_s=[0.0, 0.0])
    assert load.requests_per_s is None
    assert load.as_record()["arrivals"] is None


def test_long_answers_are_more_of_what_decodes_at_once_than_of_the_requests() -> None:
    """Of 1,000 steps 900 have the sequence of 3,000 tokens, and 450 of its answer in the mean."""
    assert Load([1000, 3000], "here", outputs=[100, 900]).mean_decoding == pytest.approx(0.1 * 1050 + 0.9 * 3450)
    assert Load([1000, 3000], "here", outputs=[500]).mean_decoding == 2250
    assert Load([1000, 3000], "here", outputs=[0, 0]).mean_decoding == 2000
    assert Load([1000, 3000], "here").mean_decoding == 2000
