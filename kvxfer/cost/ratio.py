"""The ratio of transfer to prefill: assumed line rates, and measured times beside them.

Two bases per prompt length. `seed` is 2 · params · N without attention; with 70e9 parameters on 4 GPUs at 400 TFLOP/s
it is the published table this project started from. `full` takes the active parameters without the embedding tables and
adds the attention over the prompt. A third, `given`, is what the user measured, and a fourth, `layers`, real layers.
All set the same bytes, whole blocks, against their prefill.

Prefix-cache hits shrink the two sides differently: prefill computes the tokens that it lacks (their attention still
goes over the whole prompt), and what moves are the blocks that decode lacks.

With several ranks on a side the bytes are those between all rank pairs. Over one link that they share all of them
count; where every rank has a link of its own those of the busiest rank do.

A fixed cost per request (routing hop, allocation at decode, posting) is nothing unless it is given, nor is one for each
of its pieces. The first makes the ratio of a short prompt unlike that of a long one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvxfer.cache.leaving import Weight
from kvxfer.cache.wire import Wire
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, matching
from kvxfer.cost.prefill_layers import PrefillLayers
from kvxfer.cost.prefill_source import PrefillSource, prefill_sources, prompt_ms
from kvxfer.model.dtypes import DType
from kvxfer.model.shape import ModelShape

ONE_LINK = (
    "--links per-rank changes nothing here: each side is one rank with one link, whatever --gpus says; --tp-prefill "
    "and --tp-decode (--pp-…) name more"
)

SAME_PREFILL = 0.01
"""By which share the compute of a pipelined row may be off a prefill and still be that: layers take whole ns."""


def ratio_rows(
    shape: ModelShape,
    dtype: DType,
    tokens: Sequence[int],
    block_size: int,
    assumptions: Assumptions,
    measured: Sequence[Measured] = (),
    wires: Mapping[int, Wire] | None = None,
    given: PrefillSource | None = None,
    layers: PrefillLayers | None = None,
    on_links: Callable[[int], Sequence[Weight]] | None = None,
) -> list[dict[str, Any]]:
    """Rows of the result file's `ratio`: for each prompt length `seed`, `full`, and what was `given` as measured.

    `layers` are those of a measured result, which have a row of each prompt length that they reach.

    A basis whose parameters are unknown has no rows (`ratio_notices` says so). Of `measured`, every row of this model,
    dtype, prompt length and number of bytes is set beside. `wires` is what moves between the ranks by prompt length;
    without it each side has one. `on_links` tells the bytes and the pieces of a prompt on each link, where pieces cost
    something. Raises UsageError when fewer parameters are assumed active than the embedding tables
    alone hold, or `given` does not reach a prompt length.
    """
    rows = []
    sources = prefill_sources(shape, assumptions, layers, given)
    for count in tokens:
        wire = None if wires is None else wires[count]
        size = assumptions.moved_bytes(shape, count, block_size, dtype, wire)
        busiest = size if wire is None else wire.busiest_rank_bytes
        on_a_link = size if assumptions.links_shared else busiest
        weights = [(on_a_link, 0.0)] if on_links is None else on_links(count)
        beside = matching(measured, shape.name, dtype.name, count, size)
        for source in sources:
            if layers is not None and source is layers and not layers.reaches(assumptions, count):
                continue
            milliseconds = prompt_ms(source, assumptions, count)
            rows.append(
                {
                    "model": shape.name,
                    "dtype": dtype.name,
                    "tokens": count,
                    "basis": source.basis,
                    "bytes": size,
                    "prefill_ms": milliseconds,
                    "prefill_source": f"{source.named()}{_hit(assumptions, count)}",
                    "links": [_link(weights, gbit, assumptions, milliseconds) for gbit in assumptions.link_gbit],
                    "measured": [_beside(row, milliseconds) for row in beside],
                    **_hits(assumptions, count, block_size),
                    **({} if wire is None else _between_ranks(wire, assumptions)),
                }
            )
    return rows


def ratio_notices(shape: ModelShape, assumptions: Assumptions) -> list[str]:
    """What a reader of the ratio should know: the bases that are missing and why, and links that nobody has."""
    notices = [] if assumptions.links_shared or assumptions.parallel else [ONE_LINK]
    if assumptions.seed_params(shape) is None:
        notices.append(
            f"no ratio for {shape.name}: its parameters are not known here; pass --params and --params-active"
        )
    elif assumptions.full_params(shape) is None:
        notices.append(
            f"no `full` row for {shape.name}: its active parameters are not known here; pass --params-active"
        )
    return notices


def _hit(assumptions: Assumptions, tokens: int) -> str:
    cached = assumptions.cached_tokens(tokens)
    return f", less the first {cached:,.0f} tokens, which are cached" if cached > 0 else ""


def _hits(assumptions: Assumptions, tokens: int, block_size: int) -> dict[str, float]:
    """What prefix-cache hits leave, for rows that have some."""
    if not assumptions.prefix_hits:
        return {}
    return {
        "prefill_tokens": round(tokens - assumptions.cached_tokens(tokens), 6),  # 0.9 has no exact binary form
        "held_tokens": assumptions.held_blocks(tokens, block_size) * block_size,
    }


def _between_ranks(wire: Wire, assumptions: Assumptions) -> dict[str, Any]:
    return {
        "busiest_rank_bytes": wire.busiest_rank_bytes,
        "links_shared": assumptions.links_shared,
        "rank_pairs": len(wire.pair_bytes),
        "pieces": wire.pieces,
    }


def wire_ms(size: float, line_gbit: float) -> float:
    """Milliseconds of so many bytes at a line rate."""
    return size * 8 / (line_gbit * 1e9) * 1e3


def line_rate_ms(weights: Sequence[Weight], line_gbit: float, assumptions: Assumptions) -> float:
    """Milliseconds of what each link carries, (bytes, pieces), until the last one is through; 0 if nothing moves.

    What a request and its pieces are assumed to cost comes before the bytes.
    """
    each = [
        assumptions.fixed_ms + assumptions.gamma_us * pieces / 1e3 + wire_ms(size, line_gbit)
        for size, pieces in weights
        if size
    ]
    return max(each, default=0.0)


def _link(weights: Sequence[Weight], line_gbit: float, assumptions: Assumptions, prefill: float) -> dict[str, float]:
    transfer_ms = line_rate_ms(weights, line_gbit, assumptions)
    return {"line_gbit": line_gbit, "transfer_ms": transfer_ms, "percent": transfer_ms / prefill * 100}


def _beside(row: Measured, prefill: float) -> dict[str, Any]:
    return {
        "of": row.of,
        "backend": row.backend,
        "op": row.op,
        "scope": row.scope,
        "tp": _sides(row.tp),
        "pp": _sides(row.pp),
        "transfer_ms": row.transfer_ms,
        "percent": _percent(row.transfer_ms, prefill),
        "cold_ms": row.cold_ms,
        "cold_percent": _percent(row.cold_ms, prefill),
        "cold_pair_ms": row.cold_pair_ms,
        "cold_pair_longest_ms": row.cold_pair_longest_ms,
        "cold_pair_percent": _percent(row.cold_pair_ms, prefill),
        "cold_pair_over_steady": _over(row.cold_pair_ms, row.transfer_ms),
        **_exposed(row, prefill),
    }


def _exposed(row: Measured, prefill: float) -> dict[str, float]:
    """What this prefill did not hide: nothing is known of one that takes another time than what was computed."""
    if row.exposed_ms is None or row.behind_ms is None:
        return {}
    if not math.isclose(row.behind_ms, prefill, rel_tol=SAME_PREFILL):
        return {}
    return {"exposed_ms": row.exposed_ms, "exposed_percent": row.exposed_ms / prefill * 100}


def _sides(counts: tuple[int, int]) -> dict[str, int]:
    return {"prefill": counts[0], "decode": counts[1]}


def _percent(milliseconds: float | None, prefill: float) -> float | None:
    return None if milliseconds is None else milliseconds / prefill * 100


def _over(milliseconds: float | None, steady_ms: float | None) -> float | None:
    return milliseconds / steady_ms if milliseconds is not None and steady_ms else None
