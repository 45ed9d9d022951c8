"""Figures in sentences: no powers of ten, and a limit is never told as what is beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.wording import digits, three_digits, told_beside


@pytest.mark.parametrize(
    ("value", "count", "told"),
    [
        (0.0698, 3, "0.0698"),
        (99.7, 2, "100"),
        (1563, 2, "1,563"),
        (3683.2, 3, "3,683"),
        (8192, 6, "8,192"),
        (1_234_567.0, 6, "1,234,567"),
    ],
)
def test_digits(value: float, count: int, told: str) -> None:
    assert digits(value, count) == told


@pytest.mark.parametrize(
    ("value", "limits", "told"),
    [
        (15.04, (15, 30), "15.04"),
        (29.996, (15, 30), "29.996"),
        (30, (15, 30), "30"),
        (100.4, (100.2,), "100.4"),
        (7.996, (8,), "7.996"),
        (7.9, (8,), "7.9"),
        (8 - 1e-12, (8,), "8"),
    ],
)
def test_what_is_beside_a_limit_is_not_told_as_the_limit(value: float, limits: tuple[float, ...], told: str) -> None:
    assert told_beside(value, *limits) == told


@given(st.floats(1e-3, 1e6), st.floats(-0.01, 0.01))
def test_what_is_told_is_on_the_limit_s_side_that_the_value_is_on(limit: float, share: float) -> None:
    value = limit * (1 + share)
    told = float(told_beside(value, limit).replace(",", ""))
    assert abs(share) < 1e-5 or (told > limit) == (value > limit)
    assert told == pytest.approx(value, rel=0.006)
    assert told_beside(value) == three_digits(value)
