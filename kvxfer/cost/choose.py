"""Which form a cost model has and where its bandwidth changes: what predicts rows that it has not seen better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvxfer.cost.model import FORMS
from kvxfer.cost.solve import Rows, Shape, predicted, solve

MOST_BREAKS = 2
LEAST_ON_A_SIDE = 3
"""Rows on each side of a break: with fewer there, its bandwidth and its step would only repeat them."""

WORTH_A_BREAK = 0.75
"""A break has to bring the error on unseen rows down to this share of it, and by at least LEAST_GAIN."""

LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Candidate:
    """A shape, and its mean |relative error| on rows that were held out of the fit."""

    shape: Shape
    error: float


def choose(rows: Rows) -> list[Candidate]:
    """The candidates, the best of each number of breaks, as far as breaks are worth it; the chosen one is the last."""
    best = _best(rows, [()])
    found = [best]
    while len(best.shape.breaks) < MOST_BREAKS:
        sets = [tuple(sorted({*best.shape.breaks, size})) for size in _possible_breaks(rows, best.shape.breaks)]
        enough = [one for one in sets if Shape("sum", one).unknowns + LEAST_ON_A_SIDE <= len(rows.ns)]
        if not enough:
            break
        further = _best(rows, enough)
        if further.error > WORTH_A_BREAK * best.error or further.error > best.error - LEAST_GAIN:
            break
        best = further
        found.append(best)
    return found


def held_out_error(shape: Shape, rows: Rows) -> float:
    """Each row inside the range of the others is predicted from the others, in turn; the mean |relative error|.

    At the edge of the range it would be extrapolation, which the model is not for.
    """
    errors = []
    for number in _inside(rows):
        left = np.arange(len(rows.ns)) != number
        model = solve(shape, _take(rows, left))
        one = _take(rows, ~left)
        errors.append(abs(float(predicted(model, one)[0] / one.ns[0] - 1)))
    return float(np.mean(errors))


def _best(rows: Rows, break_sets: Sequence[tuple[int, ...]]) -> Candidate:
    tried = [Candidate(shape, held_out_error(shape, rows)) for shape in _shapes(break_sets)]
    return min(tried, key=lambda candidate: candidate.error)


def _shapes(break_sets: Sequence[tuple[int, ...]]) -> Iterator[Shape]:
    for breaks in break_sets:
        for form in FORMS:
            yield Shape(form, breaks)


def _possible_breaks(rows: Rows, taken: Sequence[int]) -> list[int]:
    """Between each two neighbouring sizes, where enough rows are left on each side (up to the next break)."""
    sizes = np.unique(rows.bytes)
    between = [round(float(np.sqrt(low * high))) for low, high in pairwise(sizes)]
    return [size for size in between if size not in taken and _populated(rows, sorted({*taken, size}))]


def _populated(rows: Rows, breaks: Sequence[int]) -> bool:
    edges = [0, *breaks, np.inf]
    return all(
        np.count_nonzero((rows.bytes > low) & (rows.bytes <= high)) >= LEAST_ON_A_SIDE for low, high in pairwise(edges)
    )


def _inside(rows: Rows) -> list[int]:
    """Rows that have neither the fewest nor the most bytes or descriptors (all rows, where that leaves too few)."""
    edge = np.zeros(len(rows.ns), bool)
    for values in (rows.bytes, rows.descriptors):
        for extreme in (values.min(), values.max()):
            if np.count_nonzero(values == extreme) == 1:
                edge |= values == extreme
    inside = np.flatnonzero(~edge)
    return [int(each) for each in (inside if len(inside) >= LEAST_ON_A_SIDE else np.arange(len(edge)))]


def _take(rows: Rows, chosen: np.typing.NDArray[np.bool_]) -> Rows:
    return Rows(rows.descriptors[chosen], rows.bytes[chosen], rows.ns[chosen])
