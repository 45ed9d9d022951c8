"""The small simplex, held against scipy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from kvxfer.cost.bounds import Limit, between, bounds

SMALL = st.integers(-30, 30).map(lambda tenths: tenths / 10)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[Limit]]:
    """A figure and limits of up to five unknowns, none of which may pass 5."""
    unknowns = draw(st.integers(1, 5))
    vector = st.lists(SMALL, min_size=unknowns, max_size=unknowns)
    limits = [Limit(draw(vector), draw(SMALL)) for _ in range(draw(st.integers(0, 6)))]
    limits += between(draw(vector), *([draw(SMALL)] * 2)) if draw(st.booleans()) else []
    limits += [Limit([float(each == one) for each in range(unknowns)], 5.0) for one in range(unknowns)]
    return draw(vector), limits


@settings(max_examples=300, deadline=None)
@given(problems())
def test_as_scipy_does(problem: tuple[list[float], list[Limit]]) -> None:
    figure, limits = problem
    further = [1.0] * len(figure)
    table = np.array([limit.coefficients for limit in limits])
    most = [limit.most for limit in limits]
    found = bounds([figure, further], limits)
    if linprog(figure, table, most).status == 2:
        assert found is None
        return
    assert found is not None
    for each, ends in zip((figure, further), found, strict=True):
        least, largest = linprog(each, table, most), linprog([-one for one in each], table, most)
        assert ends == pytest.approx((least.fun, -largest.fun), abs=1e-6)


def test_what_nothing_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing bounds"):
        bounds([[1.0, 0.0]], [Limit([0.0, 1.0], 1.0)])
