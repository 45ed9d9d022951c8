"""The ratio of transfer to prefill: assumed line rates, and measured times beside them.

Two bases per prompt length. `seed` is 2 · params · N without attention; with 70e9 parameters on 4 GPUs at 400 TFLOP/s
it is the published table this project started from. `full` takes the active parameters without the embedding tables and
adds the attention over the prompt. Both set the same bytes, whole blocks, against their prefill.

Prefix-cache hits shrink the two sides differently: prefill computes the tokens that it lacks (their attention still
goes over the whole prompt), and what moves are the blocks that decode lacks.

With several ranks on a side the bytes are those between all rank pairs. Over one link that they share all of them
count; where every rank has a link of its own those of the busiest rank do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.cache.wire import Wire
from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.measured import Measured, matching
from kvxfer.cost.prefill import attention_flop, attention_formula, linear_flop, prefill_ms
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DType
from kvxfer.model.shape import ModelShape


def ratio_rows(
    shape: ModelShape,
    dtype: DType,
    tokens: Sequence[int],
    block_size: int,
    assumptions: Assumptions,
    measured: Sequence[Measured] = (),
    wires: Mapping[int, Wire] | None = None,
) -> list[dict[str, Any]]:
    """Rows of the result file's `ratio`: for each prompt length `seed`, then `full`.

    A basis whose parameters are unknown has no rows (`ratio_notices` says so). Of `measured`, every row of this model,
    dtype, prompt length and number of bytes is set beside. `wires` is what moves between the ranks by prompt length;
    without it each side has one. Raises UsageError when fewer parameters are assumed active than the embedding tables
    alone hold.
    """
    rows = []
    for count in tokens:
        wire = None if wires is None else wires[count]
        size = assumptions.moved_bytes(shape, count, block_size, dtype, wire)
        busiest = size if wire is None else wire.busiest_rank_bytes
        on_a_link = size if assumptions.links_shared else busiest
        beside = matching(measured, shape.name, dtype.name, count, size)
        for basis, flop, formula in _prefill_work(shape, count, assumptions):
            milliseconds = prefill_ms(flop, assumptions.gpus, assumptions.eff_tflops)
            rows.append(
                {
                    "model": shape.name,
                    "dtype": dtype.name,
                    "tokens": count,
                    "basis": basis,
                    "bytes": size,
                    "prefill_ms": milliseconds,
                    "prefill_source": f"assumed: {formula} FLOP on {_group(assumptions)}{_hit(assumptions, count)}",
                    "links": [_link(on_a_link, gbit, milliseconds) for gbit in assumptions.link_gbit],
                    "measured": [_beside(row, milliseconds) for row in beside],
                    **_hits(assumptions, count, block_size),
                    **({} if wire is None else _between_ranks(wire, assumptions)),
                }
            )
    return rows


def ratio_notices(shape: ModelShape, assumptions: Assumptions) -> list[str]:
    """What a reader of the ratio should know: the bases that are missing and why."""
    if assumptions.seed_params(shape) is None:
        return [f"no ratio for {shape.name}: its parameters are not known here; pass --params and --params-active"]
    if assumptions.full_params(shape) is None:
        return [f"no `full` row for {shape.name}: its active parameters are not known here; pass --params-active"]
    return []


def _prefill_work(shape: ModelShape, tokens: int, assumptions: Assumptions) -> list[tuple[str, float, str]]:
    """Basis, FLOP and formula of every basis whose parameters are known."""
    work = []
    seed, full = assumptions.seed_params(shape), assumptions.full_params(shape)
    cached = assumptions.cached_tokens(tokens)
    if seed is not None:
        work.append(("seed", linear_flop(seed[0], tokens - cached), f"2·{_billions(seed[0])}·N"))
    if full is not None:
        working = _without_embedding(shape, *full)
        attention = attention_formula(shape)
        formula = f"2·{_billions(working)}·N" + (f" + {attention}" if attention else "")
        flop = linear_flop(working, tokens - cached) + attention_flop(shape, tokens, cached)
        work.append(("full", flop, f"({formula})"))
    return work


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


def _without_embedding(shape: ModelShape, active: float, source: str) -> float:
    """Active parameters that work on every token of a prompt; where the tables are not known none are taken off."""
    working = active - (shape.params_embedding or 0)
    if working <= 0:
        raise UsageError(
            f"{source} {active:g} is not more than the embedding tables of {shape.name} alone "
            f"({shape.params_embedding:,}); give all active parameters, embedding included"
        )
    return working


def _link(size: int, line_gbit: float, prefill: float) -> dict[str, float]:
    transfer_ms = size * 8 / (line_gbit * 1e9) * 1e3
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
    }


def _sides(counts: tuple[int, int]) -> dict[str, int]:
    return {"prefill": counts[0], "decode": counts[1]}


def _percent(milliseconds: float | None, prefill: float) -> float | None:
    return None if milliseconds is None else milliseconds / prefill * 100


def _group(assumptions: Assumptions) -> str:
    gpus = "1 GPU" if assumptions.gpus == 1 else f"{assumptions.gpus} GPUs"
    return f"{gpus} at {assumptions.eff_tflops:g} TFLOP/s each"


def _billions(count: float) -> str:
    return f"{count / 1e9:.4g}e9"
