"""Reading option values: right ones come through, every other one is an error that names the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.options import parse_choice, parse_choice_list, parse_count, parse_float, parse_int, parse_int_list


def test_right_values() -> None:
    assert parse_int(" 16 ", "--block-size") == 16
    assert parse_int_list("512, 2048,512", "--tokens") == [512, 2048]
    assert parse_float("0.5", "--fragmentation", 0, 1) == 0.5
    assert parse_float("1", "--fragmentation", 0, 1) == 1.0
    assert parse_count("70e9", "--params") == 70e9
    assert parse_count("8030261248", "--params") == 8_030_261_248
    assert parse_choice("TCP", "--backend", ["auto", "tcp"]) == "tcp"
    assert parse_choice_list("tcp,null,tcp", "--backend", ["null", "tcp"]) == ["tcp", "null"]


@given(st.lists(st.integers(1, 1 << 40), min_size=1))
def test_lists_keep_order_and_drop_repetitions(values: list[int]) -> None:
    assert parse_int_list(",".join(map(str, values)), "--tokens") == list(dict.fromkeys(values))


PARSERS: list[Callable[[str], Any]] = [
    lambda text: parse_int(text, "--option", 1, 100),
    lambda text: parse_int_list(text, "--option", 1, 100),
    lambda text: parse_float(text, "--option", 0, 1, above_low=True),
    lambda text: parse_count(text, "--option"),
    lambda text: parse_choice(text, "--option", ["push", "pull"]),
    lambda text: parse_choice_list(text, "--option", ["push", "pull"]),
]
WRONG = [
    "",
    " ",
    "0",
    "-1",
    "x",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1_0",
    "٣",
    "0x10",
    "1,,2",
    "9" * 5000,
    "1\n2",
    "\0",
    "70 e9",
]


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", WRONG)
def test_wrong_values_are_one_short_line_that_names_the_option(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("--option ")
    assert "\n" not in message
    assert len(message) < 250


@given(st.text())
def test_any_text_is_a_value_or_a_usage_error(text: str) -> None:
    messages = []
    for parse in PARSERS:
        try:
            parse(text)
        except UsageError as error:
            messages.append(str(error))
    assert not any("\n" in message for message in messages)


def test_nearest_choice_is_suggested() -> None:
    with pytest.raises(UsageError, match=r"did you mean push\?.*push, pull"):
        parse_choice("pusj", "--op", ["push", "pull"])
