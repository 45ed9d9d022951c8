"""The least and the most that a linear figure of unknowns can be, given what is known of them: a small simplex.

In plain Python: there are a handful of unknowns, and nothing that a plan prints should wait for a solver to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXACT = 1e-9
"""Figures are near 1 here (callers scale them); less than this is rounding."""

Vector = Sequence[float]


@dataclass(frozen=True)
class Limit:
    """coefficients · unknowns ≤ most. Unknowns are never negative."""

    coefficients: Vector
    most: float


def between(coefficients: Vector, low: float, high: float) -> list[Limit]:
    """low ≤ coefficients · unknowns ≤ high."""
    return [Limit(coefficients, high), Limit([-each for each in coefficients], -low)]


def bounds(figures: Sequence[Vector], limits: Sequence[Limit]) -> list[tuple[float, float]] | None:
    """The least and the most of each figure · unknowns (at least 0); None where nothing fulfils all limits.

    The limits have to bound every figure from above; raises ValueError where they do not.
    """
    tableau = _Tableau.feasible(limits)
    if tableau is None:
        return None
    return [(-tableau.largest([-each for each in figure]), tableau.largest(figure)) for figure in figures]


class _Tableau:
    """Rows [unknowns, slacks | value], one basic variable in each; the values are never negative."""

    def __init__(self, rows: list[list[float]], basis: list[int], unknowns: int) -> None:
        self._rows = rows
        self._basis = basis
        self._unknowns = unknowns

    @classmethod
    def feasible(cls, limits: Sequence[Limit]) -> _Tableau | None:
        """A vertex of what the limits allow. One more unknown relaxes all of them, and is then driven to 0."""
        unknowns = len(limits[0].coefficients)
        width = unknowns + 1 + len(limits)
        rows = []
        for number, limit in enumerate(limits):
            slack = [0.0] * len(limits)
            slack[number] = 1.0
            rows.append([*limit.coefficients, -1.0, *slack, limit.most])
        tableau = cls(rows, list(range(unknowns + 1, width)), unknowns)
        worst = min(range(len(limits)), key=lambda number: limits[number].most)
        if limits[worst].most < 0:
            tableau._pivot(worst, unknowns)
            relaxing = [0.0] * unknowns + [-1.0]
            if tableau.largest(relaxing) < -EXACT:
                return None
            if unknowns in tableau._basis:
                tableau._drop(unknowns)
        for row in tableau._rows:
            row[unknowns] = 0.0
        return tableau

    def _drop(self, basic: int) -> None:
        """Let another column take the place of a basic one whose value is 0."""
        number = self._basis.index(basic)
        row = self._rows[number]
        self._pivot(number, next(j for j, each in enumerate(row[:-1]) if j != basic and abs(each) > EXACT))

    def largest(self, figure: Vector) -> float:
        """The largest value of a figure; the tableau stays at the vertex that has it."""
        costs = [*figure, *[0.0] * (len(self._rows[0]) - 1 - len(figure))]
        while True:
            gains = [
                cost - sum(costs[basic] * row[column] for basic, row in zip(self._basis, self._rows, strict=True))
                for column, cost in enumerate(costs)
            ]
            entering = next((column for column, gain in enumerate(gains) if gain > EXACT), None)  # Bland: no circles
            if entering is None:
                return sum(costs[basic] * row[-1] for basic, row in zip(self._basis, self._rows, strict=True))
            leaving = [
                (row[-1] / row[entering], self._basis[number], number)
                for number, row in enumerate(self._rows)
                if row[entering] > EXACT
            ]
            if not leaving:
                raise ValueError("nothing bounds the figure from above")
            self._pivot(min(leaving)[2], entering)

    def _pivot(self, number: int, column: int) -> None:
        pivot = self._rows[number]
        scale = pivot[column]
        pivot[:] = [each / scale for each in pivot]
        for other, row in enumerate(self._rows):
            if other != number and row[column]:
                factor = row[column]
                row[:] = [each - factor * one for each, one in zip(row, pivot, strict=True)]
        self._basis[number] = column
