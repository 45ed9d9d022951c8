"""The options that bench and plan share: the model and its cache, the ranks of both sides, what the ratio assumes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

import typer

from kvxfer.cache.given import given_kinds, given_notice
from kvxfer.cache.hybrid_blocks import hybrid_notices
from kvxfer.cache.layout import LARGEST_RANKS, Order, RankPair, Ranks, Side, rank_pairs
from kvxfer.cache.leaving import Departures, Leaves, Leaving, Weight, by_rank, shared
from kvxfer.cache.sends import complete_blocks, send_ends
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.wire import Wire, on_the_wire, pieces
from kvxfer.cost.assumptions import Assumptions
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, PACKED, DType, resolve_dtype
from kvxfer.model.presets import load_model
from kvxfer.model.shape import ModelShape, blocks_of
from kvxfer.options import parse_choice, parse_count, parse_float, parse_int, parse_int_list, split_list
from kvxfer.topology.links import parse_links

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20

LAYOUTS: dict[str, tuple[Order, bool]] = {
    "nhd": ("nhd", False),
    "hnd": ("hnd", False),
    "nhd-together": ("nhd", True),
    "hnd-together": ("hnd", True),
}
"""Order within a block, and whether the layers of a rank lie together in one block."""


def _option(metavar: str, told: str, *name: str) -> Any:
    return typer.Option(*name, metavar=metavar, help=told)


@dataclass(frozen=True)
class Options:
    """What the user typed, unread. `takes_options` makes an option of every field."""

    model: Annotated[str, _option("NAME|FILE", "preset (8b, 70b, deepseek-v3, …) or the path of a config.json")] = "8b"
    dtype: Annotated[
        str, _option("DTYPE,…", f"of the cache: {', '.join([*DTYPES, *PACKED])}; fp8 is fp8_e4m3; several: A,B")
    ] = "bf16"
    tokens: Annotated[str, _option("N,…", "prompt lengths")] = "512,2048,8192"
    block_size: Annotated[str, _option("N", "tokens per block; whole blocks move")] = "16"
    layout: Annotated[
        str, _option("NAME", "of a block: nhd (token, head, cell) or hnd; …-together: all layers in one block")
    ] = "nhd"
    with_mtp: Annotated[bool, typer.Option("--with-mtp", help="with the layers of multi-token prediction")] = False
    kv_bytes_per_token: Annotated[
        str | None,
        _option("N", "in place of the model's: bytes per token of all layers, all rank pairs together [model's]"),
    ] = None
    tp_prefill: Annotated[
        str | None, _option("N", "tensor-parallel ranks of prefill; pairs of ranks move at once [1]")
    ] = None
    tp_decode: Annotated[str | None, _option("N", "tensor-parallel ranks of decode [1]")] = None
    pp_prefill: Annotated[str | None, _option("N", "pipeline stages of prefill: layers split over ranks [1]")] = None
    pp_decode: Annotated[str | None, _option("N", "pipeline stages of decode [1]")] = None
    prefix_hit_prefill: Annotated[
        str, _option("SHARE", "of a prompt in prefill's prefix cache (0 … 1), which is not computed")
    ] = "0"
    prefix_hit_decode: Annotated[
        str, _option("SHARE", "of a prompt in decode's prefix cache (0 … 1), whose whole blocks do not move")
    ] = "0"
    gpus: Annotated[
        str | None, _option("N", "assumed: GPUs that share a prefill [prefill's ranks if several, else 4]")
    ] = None
    eff_tflops: Annotated[str, _option("X", "assumed: TFLOP/s that each of them sustains")] = "400"
    params: Annotated[str | None, _option("COUNT", "assumed: parameters of the seed row, as 70e9 [model's]")] = None
    params_active: Annotated[
        str | None, _option("COUNT", "assumed: active parameters of the full row, embedding included [model's]")
    ] = None
    link: Annotated[str, _option("RATE,…", "assumed: line rates in Gb/s or names (100gbe, ndr)")] = "100,200,400"
    links: Annotated[
        str,
        _option(
            "shared|per-rank", "assumed: shared (all ranks of a side share one link) or per-rank (each has its own)"
        ),
    ] = "shared"


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see the fields in place of each of the command's parameters that is a dataclass of options."""
    types = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in types.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters = []
    for name, own in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name]))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        for each in fields(groups[name]):
            parameters.append(
                inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
                )
            )

    def with_options(**given: Any) -> Any:
        gathered = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        return command(**gathered, **given)

    with_options.__doc__ = command.__doc__
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


@dataclass(frozen=True)
class Asked:
    """What the user asked for, checked as far as the options go."""

    shape: ModelShape
    dtypes: list[DType]
    tokens: list[int]
    block_size: int
    layout: str
    prefill: Ranks
    decode: Ranks
    assumptions: Assumptions

    def spec(self, dtype: DType, regions_per_layer: int = 1) -> CacheSpec:
        """The cache in that dtype. Raises UsageError when there is none, or given bytes cannot be laid out."""
        order, _ = LAYOUTS[self.layout]
        given = self.assumptions.kv_bytes_per_token
        kinds = () if given is None else given_kinds(self.shape, given, regions_per_layer, self.prefill, self.decode)
        return CacheSpec(self.shape, dtype, self.block_size, regions_per_layer, order, kinds)

    def wire(self, dtype: DType, regions_per_layer: int = 1) -> Callable[[int], Wire] | None:
        """What moves between the ranks for a prompt of a length; None when each side has one rank.

        Raises UsageError for what bench would refuse too.
        """
        spec = self.spec(dtype, regions_per_layer)
        if not self.assumptions.parallel:
            return None
        pairs = _pairs(spec, self.prefill, self.decode)

        def of_prompt(tokens: int) -> Wire:
            held = self.assumptions.held_blocks(tokens, self.block_size)
            missing = blocks_of(tokens, self.block_size) > held
            return on_the_wire(pairs, spec.blocks(tokens, held)) if missing else Wire({}, 0)

        return of_prompt

    def pieces(self, dtype: DType, regions_per_layer: int, fragmentation: float) -> Callable[[int], int]:
        """Descriptors of a prompt of a length, of all rank pairs together; 0 where decode holds all of it."""
        spec = self.spec(dtype, regions_per_layer)
        of_request = pieces(_pairs(spec, self.prefill, self.decode))

        def of_prompt(tokens: int) -> int:
            held = self.assumptions.held_blocks(tokens, self.block_size)
            missing = blocks_of(tokens, self.block_size) > held
            return of_request(spec.blocks(tokens, held), fragmentation) if missing else 0

        return of_prompt

    def leaving(self, dtype: DType, regions_per_layer: int, fragmentation: float, own_links: bool) -> Leaves:
        """What of a prompt leaves with each send when layers leave as they are computed.

        All rank pairs share a link, or every rank has one of its own, and a pipeline stage sends its own layers. Ranks
        that have the same to carry are looked at once. Pieces are those that one rank posts, on a shared link the
        busiest one: ranks post at the same time.
        """
        spec = self.spec(dtype, regions_per_layer)
        layers, pairs = len(spec.kinds), _pairs(spec, self.prefill, self.decode)
        stages = spec.stages(self.prefill) if own_links else [range(layers)]
        whole = Leaving(pairs, layers, len(spec.limits))
        ranks = _unlike_ranks(spec, self.prefill, self.decode)

        def of_prompt(tokens: int, ends: Sequence[float], together: int) -> Departures:
            after = send_ends(stages, together)
            held = self.assumptions.held_blocks(tokens, self.block_size)
            if blocks_of(tokens, self.block_size) <= held:
                return Departures(after, [])
            complete = complete_blocks(ends, tokens, self.block_size, spec.blocks(tokens, held))
            links = [rank.sends(complete, fragmentation, after) for rank in ranks]
            return Departures(after, links if own_links else [shared(whole.sends(complete, 0.0, after), links)])

        return of_prompt

    def link_sides(self, dtype: DType, regions_per_layer: int, own_links: bool) -> list[frozenset[Side]]:
        """Whose each link of `leaving` is, in that order: of ranks of prefill, of decode, or of both."""
        if not own_links:
            return [frozenset({"prefill", "decode"})]
        ranks = _unlike_ranks(self.spec(dtype, regions_per_layer), self.prefill, self.decode)
        return [frozenset(sides) for sides in ranks.values()]

    def on_links(self, dtype: DType, regions_per_layer: int, fragmentation: float) -> Callable[[int], Sequence[Weight]]:
        """Bytes of a whole prompt on each link, and the pieces that one rank posts; ranks that are alike count once."""
        leaves = self.leaving(dtype, regions_per_layer, fragmentation, not self.assumptions.links_shared)
        layers = len(self.spec(dtype, regions_per_layer).kinds)

        def of_prompt(tokens: int) -> Sequence[Weight]:
            return [link[0][0] for link in leaves(tokens, [tokens], layers).links]

        return of_prompt

    @property
    def notices(self) -> list[str]:
        """What a reader of any figure of this cache should know."""
        given = self.assumptions.kv_bytes_per_token
        if given is not None:
            return [*self.shape.notices, given_notice(given)]
        blocks = hybrid_notices(map(self.spec, self.dtypes), self.prefill, self.decode)
        return [*self.shape.notices, *self.shape.dtype_notices(self.dtypes), *blocks]


@lru_cache(maxsize=8)
def _pairs(spec: CacheSpec, prefill: Ranks, decode: Ranks) -> list[RankPair]:
    """Searched once: many ranks of many layers take as long as all else that a plan does."""
    return rank_pairs(spec.regions(prefill), spec.regions(decode), spec.order)


def _unlike_ranks(spec: CacheSpec, prefill: Ranks, decode: Ranks) -> dict[Leaving, set[Side]]:
    """What goes over the links of ranks that are unlike, and which sides have such ranks."""
    found: dict[Leaving, set[Side]] = {}
    for (side, _), pairs in by_rank(_pairs(spec, prefill, decode)).items():
        found.setdefault(Leaving(pairs, len(spec.kinds), len(spec.limits)), set()).add(side)
    return found


def read(options: Options) -> Asked:
    """Raises UsageError that names the option that is wrong."""
    given = options.kv_bytes_per_token is not None
    layout = parse_choice(options.layout, "--layout", LAYOUTS)
    prefill, decode = _ranks(options, "prefill", layout), _ranks(options, "decode", layout)
    shape = load_model(options.model, cache_given=given)
    dtypes = list(dict.fromkeys(resolve_dtype(word) for word in split_list(options.dtype, "--dtype")))
    if given and len(dtypes) > 1:
        raise UsageError("--kv-bytes-per-token is for one dtype, and --dtype names several; run once for each")
    return Asked(
        shape=shape.with_mtp() if options.with_mtp else shape,
        dtypes=dtypes,
        tokens=parse_int_list(options.tokens, "--tokens", high=LARGEST_TOKENS),
        block_size=parse_int(options.block_size, "--block-size", high=LARGEST_BLOCK),
        layout=layout,
        prefill=prefill,
        decode=decode,
        assumptions=_assumptions(options, prefill, decode),
    )


def _ranks(options: Options, side: Side, layout: str) -> Ranks:
    def count(kind: str) -> int:
        text = getattr(options, f"{kind}_{side}")
        return 1 if text is None else parse_int(text, f"--{kind}-{side}", high=LARGEST_RANKS)

    return Ranks(count("tp"), count("pp"), LAYOUTS[layout][1], side)


def _assumptions(options: Options, prefill: Ranks, decode: Ranks) -> Assumptions:
    """Without --gpus a rank of prefill is a GPU, where there are several."""
    gpus = prefill.count if prefill.count > 1 else Assumptions.gpus
    if options.gpus is not None:
        gpus = parse_int(options.gpus, "--gpus", high=1_000_000)
        if gpus < prefill.count:
            raise UsageError(
                f"--gpus {gpus} are fewer than the {prefill.count} ranks of prefill (--tp-prefill {prefill.tp}, "
                f"--pp-prefill {prefill.pp}), each of which takes one; give at least {prefill.count}, or fewer ranks"
            )

    def count(text: str | None, name: str) -> float | None:
        return None if text is None else parse_count(text, name)

    given = options.kv_bytes_per_token
    return Assumptions(
        gpus=gpus,
        eff_tflops=parse_float(options.eff_tflops, "--eff-tflops", 0.001, 1e6),
        params=count(options.params, "--params"),
        params_active=count(options.params_active, "--params-active"),
        link_gbit=tuple(parse_links(options.link)),
        kv_bytes_per_token=None if given is None else parse_int(given, "--kv-bytes-per-token"),
        prefix_hit_prefill=parse_float(options.prefix_hit_prefill, "--prefix-hit-prefill", 0, 1),
        prefix_hit_decode=parse_float(options.prefix_hit_decode, "--prefix-hit-decode", 0, 1),
        tp_prefill=prefill.tp,
        tp_decode=decode.tp,
        pp_prefill=prefill.pp,
        pp_decode=decode.pp,
        links_shared=parse_choice(options.links, "--links", ["shared", "per-rank"]) == "shared",
    )
