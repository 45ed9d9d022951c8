"""The options that bench and plan share: the ranks of both sides, and what the ratio assumes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvxfer.cache.layout import Order, Ranks
from kvxfer.cost.assumptions import Assumptions
from kvxfer.options import parse_choice, parse_count, parse_float, parse_int
from kvxfer.topology.links import parse_links

LARGEST_RANKS = 64

LAYOUTS: dict[str, tuple[Order, bool]] = {
    "nhd": ("nhd", False),
    "hnd": ("hnd", False),
    "nhd-together": ("nhd", True),
    "hnd-together": ("hnd", True),
}
"""Order within a block, and whether the layers of a rank lie together in one block."""

Layout = Annotated[
    str, typer.Option(help="of a block: nhd (token, head, cell) or hnd; …-together: all layers in one block")
]
TpPrefill = Annotated[
    str | None, typer.Option(help="tensor-parallel ranks of prefill; pairs of ranks move at once [1]")
]
TpDecode = Annotated[str | None, typer.Option(help="tensor-parallel ranks of decode [1]")]
PpPrefill = Annotated[str | None, typer.Option(help="pipeline stages of prefill: layers split over ranks [1]")]
PpDecode = Annotated[str | None, typer.Option(help="pipeline stages of decode [1]")]
PrefixHitPrefill = Annotated[
    str, typer.Option(help="share of a prompt in prefill's prefix cache (0 … 1), which is not computed")
]
PrefixHitDecode = Annotated[
    str, typer.Option(help="share of a prompt in decode's prefix cache (0 … 1), whose whole blocks do not move")
]
Gpus = Annotated[
    str | None, typer.Option(help="assumed: GPUs that share a prefill [prefill's ranks if several, else 4]")
]
EffTflops = Annotated[str, typer.Option(help="assumed: TFLOP/s that each of them sustains")]
Params = Annotated[str | None, typer.Option(help="assumed: parameters of the seed row, as 70e9 [model's]")]
ParamsActive = Annotated[
    str | None, typer.Option(help="assumed: active parameters of the full row, embedding included [model's]")
]
Link = Annotated[str, typer.Option(help="assumed: line rates in Gb/s or names (100gbe, ndr)")]
Links = Annotated[
    str, typer.Option(help="assumed: shared (all ranks of a side share one link) or per-rank (each has its own)")
]


def read_ranks(
    layout: str, tp_prefill: str | None, tp_decode: str | None, pp_prefill: str | None, pp_decode: str | None
) -> tuple[Order, Ranks, Ranks]:
    """The order within a block, and the ranks of prefill and of decode."""
    order, together = LAYOUTS[parse_choice(layout, "--layout", LAYOUTS)]

    def count(text: str | None, name: str) -> int:
        return 1 if text is None else parse_int(text, name, high=LARGEST_RANKS)

    prefill = Ranks(count(tp_prefill, "--tp-prefill"), count(pp_prefill, "--pp-prefill"), together)
    decode = Ranks(count(tp_decode, "--tp-decode"), count(pp_decode, "--pp-decode"), together)
    return order, prefill, decode


def read_assumptions(
    prefill: Ranks,
    decode: Ranks,
    *,
    gpus: str | None,
    eff_tflops: str,
    params: str | None,
    params_active: str | None,
    link: str,
    links: str,
    prefix_hit_prefill: str,
    prefix_hit_decode: str,
    kv_bytes_per_token: str | None = None,
) -> Assumptions:
    """The assumptions. Without --gpus a rank of prefill is a GPU, where there are several."""
    by_ranks = prefill.count if prefill.count > 1 else Assumptions.gpus
    return Assumptions(
        gpus=by_ranks if gpus is None else parse_int(gpus, "--gpus", high=1_000_000),
        eff_tflops=parse_float(eff_tflops, "--eff-tflops", 0.001, 1e6),
        params=None if params is None else parse_count(params, "--params"),
        params_active=None if params_active is None else parse_count(params_active, "--params-active"),
        link_gbit=tuple(parse_links(link)),
        kv_bytes_per_token=None
        if kv_bytes_per_token is None
        else parse_int(kv_bytes_per_token, "--kv-bytes-per-token"),
        prefix_hit_prefill=parse_float(prefix_hit_prefill, "--prefix-hit-prefill", 0, 1),
        prefix_hit_decode=parse_float(prefix_hit_decode, "--prefix-hit-decode", 0, 1),
        tp_prefill=prefill.tp,
        tp_decode=decode.tp,
        pp_prefill=prefill.pp,
        pp_decode=decode.pp,
        links_shared=parse_choice(links, "--links", ["shared", "per-rank"]) == "shared",
    )
