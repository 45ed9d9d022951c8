"""The robust, non-negative fit of one shape of cost model to rows of (descriptors, bytes, ns).

Errors count relatively: a request of 50 µs has as much to say as one of 500 ms. Huber's weights keep a row that
something disturbed from bending the rest. The overlapping form is linear once it is known which rows are bound by
posting and which by the wire; that is found by turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from kvxfer.cost.model import Band, CostModel, Form

Array = npt.NDArray[np.float64]

ROUNDS = 12
"""Weights, and who is bound by what, settle within so many."""

HUBER = 1.345
SMALLEST_SCALE = 0.002
"""Of relative errors: rows that fit better than this are not told apart."""


@dataclass(frozen=True)
class Shape:
    """A form, and the sizes in bytes at which the bandwidth changes, ascending."""

    form: Form
    breaks: tuple[int, ...] = ()

    @property
    def unknowns(self) -> int:
        """α, γ, β, and of each break a bandwidth and a step."""
        return 3 + 2 * len(self.breaks)


@dataclass(frozen=True)
class Rows:
    """Requests as arrays of one length."""

    descriptors: Array
    bytes: Array
    ns: Array


def solve(shape: Shape, rows: Rows) -> CostModel:
    """The model of that shape that fits best."""
    if shape.form == "sum":
        return _model(shape, _weighted(_columns(shape, rows, None), rows.ns))
    density = rows.descriptors / rows.bytes
    starts = [np.zeros(len(density), bool), density > np.median(density), np.ones(len(density), bool)]
    found = [_by_turns(shape, rows, start) for start in starts]
    return min(found, key=lambda model: loss(model, rows))


def predicted(model: CostModel, rows: Rows) -> Array:
    """ns of each row."""
    posting = model.gamma_ns * rows.descriptors
    wire = np.zeros_like(rows.bytes)
    ends = [band.from_bytes for band in model.bands[1:]] + [np.inf]
    for band, end in zip(model.bands, ends, strict=True):
        within = np.clip(rows.bytes, band.from_bytes, end) - band.from_bytes
        wire += band.ns_per_byte * within + band.step_ns * (rows.bytes > band.from_bytes)
    return model.alpha_ns + (posting + wire if model.form == "sum" else np.maximum(posting, wire))


def loss(model: CostModel, rows: Rows) -> float:
    """What the fit makes small: the mean of |relative error|, which few far rows do not decide."""
    return float(np.mean(np.abs(predicted(model, rows) / rows.ns - 1)))


def _by_turns(shape: Shape, rows: Rows, posting_bound: npt.NDArray[np.bool_]) -> CostModel:
    best: CostModel | None = None
    for _ in range(ROUNDS):
        model = _model(shape, _weighted(_columns(shape, rows, posting_bound), rows.ns))
        if best is None or loss(model, rows) < loss(best, rows):
            best = model
        wire = predicted(CostModel("sum", 0.0, 0.0, model.bands), rows)
        now = model.gamma_ns * rows.descriptors > wire
        if np.array_equal(now, posting_bound):
            break
        posting_bound = now
    assert best is not None
    return best


def _columns(shape: Shape, rows: Rows, posting_bound: npt.NDArray[np.bool_] | None) -> Array:
    """What each unknown counts in each row: α, γ, then of each band its bytes and (but for the first) its step.

    `posting_bound`: rows in which only the descriptors count, and in the others only the bytes; None: both everywhere.
    """
    edges = [0, *shape.breaks, np.inf]
    columns = [np.ones_like(rows.bytes), rows.descriptors]
    for low, high in pairwise(edges):
        columns.append(np.clip(rows.bytes, low, high) - low)
        if low:
            columns.append((rows.bytes > low).astype(float))
    table = np.stack(columns, axis=1)
    if posting_bound is not None:
        table[~posting_bound, 1] = 0
        table[posting_bound, 2:] = 0
    return table


def _weighted(table: Array, ns: Array) -> Array:
    """The unknowns, non-negative, least squares of relative errors with Huber's weights."""
    relative = table / ns[:, None]
    norms: Array = np.linalg.norm(relative, axis=0)
    norms[norms == 0] = 1
    scaled = relative / norms
    weights: Array = np.ones(len(ns))
    found: Array = np.zeros(table.shape[1])
    for _ in range(ROUNDS):
        before = found
        root = np.sqrt(weights)
        found, _ = nnls(scaled * root[:, None], root)
        error: Array = np.abs(scaled @ found - 1)
        scale = max(SMALLEST_SCALE, 1.4826 * float(np.median(error)))
        weights = np.minimum(1, HUBER * scale / np.maximum(error, 1e-300))
        if np.allclose(found, before, rtol=1e-4, atol=0):
            break
    return np.asarray(found / norms)


def _model(shape: Shape, unknowns: Sequence[float] | Array) -> CostModel:
    alpha, gamma, first, *later = (float(each) for each in unknowns)
    bands = [Band(0, first)]
    for start, per_byte, step in zip(shape.breaks, later[::2], later[1::2], strict=True):
        bands.append(Band(start, per_byte, step))
    return CostModel(shape.form, alpha, gamma, tuple(bands))
