"""What a plan says beyond the ratio: colocated prefill, the cost of the split, the pools, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvxfer.asked import Asked
from kvxfer.cost.colocated import Mode, chunks_not_known, simulate, stall_rows
from kvxfer.cost.fitted import Fitted, fitting
from kvxfer.cost.measured import Measured
from kvxfer.cost.pipelined import Pipelining
from kvxfer.cost.pools import Pools, pools_of, pools_record
from kvxfer.cost.prefill_layers import PrefillLayers
from kvxfer.cost.prefill_source import GIVEN, PrefillSource, prefill_sources
from kvxfer.cost.rests_on import (
    ARRIVALS,
    CHUNKS,
    ENGINES,
    LAYERS,
    LENGTHS,
    MODEL,
    PREFILL,
    REACH,
    SENDS,
    STEP,
)
from kvxfer.cost.situation import Situation
from kvxfer.cost.split import (
    Path,
    PathCost,
    Traffic,
    farther_reaching,
    fitted_paths,
    line_rate_paths,
    path_cost,
    paths_between_hosts,
)
from kvxfer.cost.verdict import Decision, decide
from kvxfer.load_options import Offered
from kvxfer.model.dtypes import DType
from kvxfer.wording import told_beside

Record = Mapping[str, Any]

ONE_SIZE = (
    "{} over {}: one size does not tell what smaller sends take, and so not what pipelining leaves exposed; measure "
    "two lengths or more, or one by layers (--pipeline sweep), or a cost model (--fit), with kvxfer bench --peer"
)

OTHER_SERIAL = (
    "{} over {}: serial takes {} % of prefill as pipelining measured its sends, in turn with compute, and {} % as "
    "requests took that followed each other; what is exposed is set against the first"
)

APART = 0.05
"""By which share the two may differ and still be told as one."""

FREE_SENDS = (
    "pipelining over line rates: sends are assumed to cost nothing beside their bytes, and then the most sends are "
    "always best and pay from the first block; what they leave exposed decides no rule: --send-ms and --gamma-us"
)


@dataclass(frozen=True)
class Measurement:
    """What a result holds: measured transfers, cost models that were fitted, and the prefill of real layers."""

    rows: Sequence[Measured] = ()
    fitted: Sequence[Fitted] = ()
    layers: PrefillLayers | None = None
    other_layers: bool = False  # there are some, of another model or of prompts that were cached in part


@dataclass(frozen=True)
class Service:
    """One service under one load, before and after a split; `source` is the prefill that decides, None if unknown.

    unused are measured paths that reach none of the load's prompts.
    """

    asked: Asked
    offered: Offered
    sources: Sequence[PrefillSource]
    pools: Pools
    modes: Sequence[Mode]
    paths: Mapping[str, Sequence[PathCost]]
    wants_measured: bool
    unused: Sequence[Path]

    @property
    def source(self) -> PrefillSource | None:
        return deciding(self.sources)


def deciding(sources: Sequence[PrefillSource]) -> PrefillSource | None:
    """What the user measured, else real layers on GPUs, else `full`, else `seed`."""
    return sources[-1] if sources else None


def service_of(asked: Asked, offered: Offered, measurement: Measurement | None, ratio: Sequence[Record]) -> Service:
    """`measurement` is that of --measured, None without; `ratio` are the plan's rows, with its rows set beside."""
    load, cluster, step_ms = offered.load, offered.cluster, offered.step_ms
    layers = None if measurement is None else measurement.layers
    if layers is not None and layers_refused(asked, offered, layers) is not None:
        layers = None
    sources = prefill_sources(asked.shape, asked.assumptions, layers, offered.given)
    source = deciding(sources)
    modes: list[Mode] = []
    if source is not None and step_ms is not None and load.requests_per_s is not None:
        modes = simulate(source, load, cluster.colocated_instances, step_ms, offered.chunks, asked.assumptions)
    pools = pools_of(cluster, load, source, asked.assumptions, step_ms)
    paths: dict[str, Sequence[PathCost]] = {}
    unused: list[Path] = []
    if source is not None:
        for dtype in asked.dtypes:
            costs, without = _measured_paths(asked, offered, source, dtype, pools, measurement or Measurement(), ratio)
            own = not asked.assumptions.links_shared
            traffic = _traffic(asked, offered, source, dtype, pools, own)
            paths[dtype.name] = costs or line_rate_paths(traffic)
            unused += without
    return Service(asked, offered, sources, pools, modes, paths, measurement is not None, unused)


def layers_refused(asked: Asked, offered: Offered, layers: PrefillLayers) -> str | None:
    """Why no figure goes by the prefill of real layers; None where they do, unless the user measured it too."""
    return layers.refused(asked.assumptions, {*asked.tokens, *offered.load.prompts})


def plan_record(service: Service) -> Record:
    """The result file's `plan`."""
    asked, offered, source = service.asked, service.offered, service.source
    return {
        "load": offered.load.as_record(),
        "wanted": {
            "objective": offered.objective,
            "itl_target_ms": offered.itl_target_ms,
            "decode_step_ms": offered.step_ms,
        },
        "prefill_source": None if source is None else source.named(),
        "stalls": stall_rows(service.sources, asked.tokens, offered.chunks, asked.assumptions),
        "colocated": {
            "instances": offered.cluster.colocated_instances,
            "basis": None if source is None else source.basis,
            "modes": [mode.as_record() for mode in service.modes],
        },
        "split": [path.as_record() for paths in service.paths.values() for path in paths],
        "pools": pools_record(service.pools) | {"cache": [_cache(service, dtype) for dtype in asked.dtypes]},
    }


def verdict_record(service: Service) -> Record:
    """The result file's `verdict`: one case for each dtype and path, and one answer for those that agree."""
    cases = []
    for dtype in service.asked.dtypes:
        for path in service.paths.get(dtype.name, [None]):
            decision = decide(_situation(service, dtype, path))
            label = {"dtype": dtype.name, "path": None if path is None else path.path}
            cases.append((label, decision))
    return {
        "answer": _answer(cases, several_dtypes=len(service.asked.dtypes) > 1),
        "reasons": _reasons(cases, several_dtypes=len(service.asked.dtypes) > 1) + _warnings(service),
        "cases": [label | decision.as_record() for label, decision in cases],
    }


def pool_notices(service: Service) -> list[str]:
    """What of the pools is left out for want of their size, and what of them does nothing."""
    cluster, load, notices = service.pools.cluster, service.offered.load, []
    if load.requests_per_s is not None and len(cluster.engines) == 1:
        other = "decode" if "prefill" in cluster.engines else "prefill"
        notices.append(
            f"how busy the paths of {other}'s engines would be is not known, and not counted: --{other}-gpus"
        )
    if idle := cluster.idle:
        told = (f"{gpus} of {where} (engines of {size})" for where, gpus, size in idle)
        notices.append(f"GPUs that make no engine, and are idle here: {', '.join(told)}")
    if service.offered.kv_memory_gb is not None:
        known = {
            "--decode-gpus": cluster.decode,
            "--rate": load.requests_per_s,
            "--output-tokens": load.mean_output,
            "--decode-step-ms": service.offered.step_ms,
        }
        if missing := [name for name, value in known.items() if value is None]:
            notices.append(f"whether --kv-memory-gb holds the decode pool's cache is not known: {', '.join(missing)}")
    return notices


def unused_notices(service: Service) -> list[str]:
    """A sentence about each measured path that is not used."""
    load = service.offered.load
    prompts = f"{load.percentile(0):,} … {load.percentile(100):,} tokens"
    return [f"{path.named}, reaches none of the prompts ({prompts}) and is not used" for path in service.unused]


def pipelining_notices(service: Service) -> list[str]:
    """What a reader should know of --pipeline: paths of which it says nothing, and sends that nobody measured."""
    notices: list[str] = []
    if service.offered.cut is None:
        return notices
    paths = [path for of_dtype in service.paths.values() for path in of_dtype]
    if service.asked.assumptions.sends_cost_nothing and not all(path.measured for path in paths):
        notices.append(FREE_SENDS)
    for path in paths:
        if (found := path.pipelined) is None:
            notices.append(ONE_SIZE.format(path.dtype, path.path))
            continue
        if not math.isclose(found.serial_percent, path.percent, rel_tol=APART):
            shares = told_beside(found.serial_percent, path.percent), told_beside(path.percent, found.serial_percent)
            notices.append(OTHER_SERIAL.format(path.dtype, path.path, *shares))
        told = [f"sends of cut {found.cut}, {found.extrapolated},"] if found.extrapolated else []
        if found.break_even_extrapolated:
            told.append(f"sends of {found.break_even_tokens:,} tokens, from which cut {found.cut} pays,")
        if told:
            outside = f"{' and '.join(told)} are outside what was measured, {found.reach}"
            notices.append(f"{path.dtype} over {path.path}: {outside}; their times are extrapolated")
    return notices


def _measured_paths(
    asked: Asked,
    offered: Offered,
    source: PrefillSource,
    dtype: DType,
    pools: Pools,
    measurement: Measurement,
    ratio: Sequence[Record],
) -> tuple[list[PathCost], list[Path]]:
    """What was measured or fitted between two hosts: what that costs the load, and what reaches no prompt of it."""
    traffic = _traffic(asked, offered, source, dtype, pools, own_links=False)
    exposed = {
        entry["of"]: entry.get("exposed_ms")
        for row in ratio
        if (row["dtype"], row["basis"]) == (dtype.name, source.basis)
        for entry in row["measured"]
    }
    ranks = (asked.prefill.tp, asked.decode.tp), (asked.prefill.pp, asked.decode.pp)
    rows = paths_between_hosts(measurement.rows, asked.shape.name, dtype.name, ranks, traffic.sizes, traffic.pieces)
    models = [] if asked.assumptions.parallel else fitting(measurement.fitted, asked.shape.name, dtype.name)
    costs, unused = [], []
    for path in farther_reaching(rows, fitted_paths(models, traffic, rows), traffic.prompts):
        cost = path_cost(path, traffic, exposed)
        if cost is None:
            unused.append(path)
        else:
            costs.append(cost)
    return costs, unused


BytesOf = Callable[[int], int]


def _traffic(
    asked: Asked,
    offered: Offered,
    source: PrefillSource,
    dtype: DType,
    pools: Pools,
    own_links: bool,
) -> Traffic:
    """With own_links every rank's bytes go over a link of its own."""
    pipelining = None
    if offered.cut is not None:
        pipelining = Pipelining(
            cut=None if offered.cut == "best" else offered.cut,
            known=asked.tokens,
            layers=len(asked.spec(dtype).kinds),
            block_size=asked.block_size,
            source=source,
            assumptions=asked.assumptions,
            leaves=asked.leaving(dtype, offered.regions, offered.fragmentation, own_links),
        )
    return Traffic(
        dtype=dtype.name,
        sizes=cache(_moved(asked, dtype)),
        pieces=cache(asked.pieces(dtype, offered.regions, offered.fragmentation)),
        on_links=cache(asked.on_links(dtype, offered.regions, offered.fragmentation)),
        link_sides=asked.link_sides(dtype, offered.regions, own_links),
        tokens=asked.tokens,
        load=offered.load,
        source=source,
        assumptions=asked.assumptions,
        engines=offered.cluster.engines,
        pipelining=pipelining,
        replays=pools.replays,
    )


def _moved(asked: Asked, dtype: DType) -> BytesOf:
    """Bytes of a prompt, all rank pairs together."""
    wire, assumptions = asked.wire(dtype), asked.assumptions

    def of_prompt(tokens: int) -> int:
        between = None if wire is None else wire(tokens)
        return assumptions.moved_bytes(asked.shape, tokens, asked.block_size, dtype, between)

    return of_prompt


def _situation(service: Service, dtype: DType, path: PathCost | None) -> Situation:
    offered, source = service.offered, service.source
    assumed = set()
    if source is not None and source.basis != GIVEN:
        assumed.add(LAYERS if isinstance(source, PrefillLayers) else PREFILL)
    if not offered.from_file:
        assumed.add(LENGTHS)
    if offered.load.traced_rate is None:
        assumed.add(ARRIVALS)
    if offered.cluster.total is None:
        assumed.add(ENGINES)
    if path is not None and (service.wants_measured if path.reached is None else path.reached < 1):
        assumed.add(REACH)
    if path is not None and path.pipelined is not None:
        assumed.add(SENDS if not path.measured and service.asked.assumptions.sends_cost_nothing else MODEL)
    if not offered.chunks_given:
        assumed.add(CHUNKS)
    if not offered.cluster.decodes_alike:
        assumed.add(STEP)
    return Situation(
        objective=offered.objective,
        itl_target_ms=offered.itl_target_ms,
        step_ms=offered.step_ms,
        load=offered.load,
        pools=service.pools,
        modes=service.modes,
        ranks=offered.ranks,
        dtype=dtype,
        path=path,
        assumed=frozenset(assumed),
        chunks_not_known=() if source is None else chunks_not_known(source, offered.load, offered.chunks),
    )


def _cache(service: Service, dtype: DType) -> Record:
    """The memory that the decode pool's sequences take, on average, and has."""
    asked, offered, pools = service.asked, service.offered, service.pools
    cluster, spec = offered.cluster, asked.spec(dtype)
    tokens = math.ceil(offered.load.mean_decoding)
    blocks = spec.blocks(tokens)
    size = sum(region.block_bytes * blocks[region.group] for region in spec.regions(asked.decode))
    available = None
    if offered.kv_memory_gb is not None and cluster.decode_instances:
        available = round(offered.kv_memory_gb * 1e9 * cluster.decode_instances * cluster.decode_instance)
    return {
        "dtype": dtype.name,
        "bytes_per_sequence": size,
        "needed_bytes": None if pools.concurrency is None else round(pools.concurrency * size),
        "available_bytes": available,
    }


Case = tuple[Mapping[str, str | None], Decision]


def _answer(cases: Sequence[Case], several_dtypes: bool) -> str:
    """One answer, or each with the dtypes and paths it is of."""
    by_answer: dict[str, list[str]] = {}
    for label, decision in cases:
        where = str(label["path"] or "any path")
        told = decision.answer + " (provisional)" * (decision.provisional and decision.by is not None)
        by_answer.setdefault(told, []).append(f"{label['dtype']} over {where}" if several_dtypes else where)
    if len(by_answer) == 1:
        return next(iter(by_answer))
    return "; ".join(f"{answer}: {', '.join(where)}" for answer, where in by_answer.items())


def _reasons(cases: Sequence[Case], several_dtypes: bool) -> list[str]:
    """A reason that is the same of several dtypes is told once, with all of them."""
    decided: dict[str, dict[str, None]] = {}
    for label, decision in cases:
        if decision.by is not None:
            finding = next(one for one in decision.as_record()["rules"] if one["rule"] == decision.by)
            decided.setdefault(f"{decision.by}: {finding['why']}", {})[str(label["dtype"])] = None
    reasons = [f"{', '.join(dtypes)}: {told}" if several_dtypes else told for told, dtypes in decided.items()]
    needs = [need for _, decision in cases for need in decision.needs]
    if needs:
        reasons.append(f"not known, and could change it: {'; '.join(dict.fromkeys(needs))}")
    reasons += [settled for _, decision in cases for settled in decision.settled_by]
    return list(dict.fromkeys(reasons))


def _warnings(service: Service) -> list[str]:
    """What a split would run into whatever the rules say."""
    warnings, pools = [], service.pools
    if pools.prefill_busy is not None and pools.prefill_busy >= 1:
        busy = told_beside(100 * pools.prefill_busy, 100)
        warnings.append(f"the prefill pool is too small: the load takes {busy}% of its time")
    for path in (path for paths in service.paths.values() for path in paths):
        if path.overloaded:
            warnings.append(f"{path.dtype} over {path.path}: the load takes {path.busy}, more than it can carry")
    for dtype in service.asked.dtypes:
        cache = _cache(service, dtype)
        needed, available = cache["needed_bytes"], cache["available_bytes"]
        if needed is not None and available is not None and needed > available:
            takes, has = needed / 1e9, available / 1e9
            told = f"{told_beside(takes, has)} GB of {dtype.name} cache, and has {told_beside(has, takes)}"
            warnings.append(f"the decode pool is too small: its sequences take {told}")
    return warnings
