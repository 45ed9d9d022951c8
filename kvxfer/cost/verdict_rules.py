"""The rules of the verdict, one predicate each, with the numbers that decide it.

A finding holds, does not hold, or is open (None) for lack of inputs, which it asks for; an input is asked for only
where it could change the finding. docs/verdict.md says where the thresholds come from.
"""

from __future__ import annotations

from kvxfer.cost.colocated import Mode
from kvxfer.cost.load import DRAWS
from kvxfer.cost.pools import Pools
from kvxfer.cost.rests_on import (
    ARRIVALS,
    CHUNKS,
    ENGINES,
    LAYERS,
    LENGTHS,
    LINE_RATE,
    MODEL,
    PREFILL,
    REACH,
    SENDS,
    STEP,
)
from kvxfer.cost.situation import Finding, Number, Situation, unknown
from kvxfer.cost.split import PathCost
from kvxfer.wording import three_digits, told_beside

SHORT_TOKENS = 1024
"""90 % of short prompts have no more."""
LOW_CONCURRENCY = 8
"""Sequences that decode at once in the whole service."""
LEAST_BATCH = 8
"""Sequences per decode step below which the reading of all weights is hardly shared."""
LEAST_BUSY = 0.3
"""Of a prefill pool's time: below it most of its GPUs' time is lost."""
SLOW_GBIT = 100.0
FAST_GBIT = 200.0
SMALL_PERCENT = 15.0
"""Of prefill: what the published table has at 200 Gb/s."""
LARGE_PERCENT = 30.0
"""Of prefill: hard to hide; what the published table has at 100 Gb/s."""
CLEARLY = 2.0
"""Ranks of one side per rank of the other from which on their parallelism differs."""

OTHER_CHUNKS = "no other chunks were looked at, and what small ones cost of prefill's efficiency is not modelled"


def offline_batch(situation: Situation) -> Finding:
    """Only total throughput counts."""
    if situation.objective is None:
        return unknown("what counts is not said", ("--objective latency|throughput",))
    return Finding(
        situation.objective == "throughput",
        f"what counts is {situation.objective}",
        {"objective": situation.objective},
    )


def short_prompts(situation: Situation) -> Finding:
    """Nine in ten prompts are short, and few sequences decode at once."""
    p90, concurrency = situation.load.percentile(90), situation.pools.concurrency
    numbers: dict[str, Number] = {"prompt_p90_tokens": p90, "concurrency": concurrency}
    thresholds = {"short_tokens": SHORT_TOKENS, "low_concurrency": LOW_CONCURRENCY}
    rests_on = situation.rests_on(LENGTHS)
    if p90 > SHORT_TOKENS:
        why = f"p90 of the prompts is {p90:,} tokens, more than {SHORT_TOKENS:,}"
        return Finding(False, why, numbers, thresholds, (), rests_on)
    why = f"p90 of the prompts is {p90:,} tokens, no more than {SHORT_TOKENS:,}"
    if concurrency is None:
        needs = situation.missing("--rate", "--output-tokens", "--decode-step-ms")
        return unknown(f"{why}; how many sequences decode at once is not known", needs, numbers, thresholds)
    few = concurrency < LOW_CONCURRENCY
    beside = f"fewer than {LOW_CONCURRENCY}" if few else f"and fewer than {LOW_CONCURRENCY} are few"
    why += f"; {told_beside(concurrency, LOW_CONCURRENCY)} sequences decode at once, {beside}"
    return Finding(few, why, numbers, thresholds, (), rests_on)


def small_cluster(situation: Situation) -> Finding:
    """The GPUs do not make two engines, or both pools would stand idle most of the time."""
    pools, cluster = situation.pools, situation.pools.cluster
    numbers: dict[str, Number] = {
        "total_gpus": cluster.total,
        "prefill_busy": pools.prefill_busy,
        "decode_batch": pools.decode_batch,
    }
    thresholds = {"least_busy": LEAST_BUSY, "least_batch": LEAST_BATCH}
    if cluster.too_small:
        prefill, decode, total = cluster.prefill_instance, cluster.decode_instance, cluster.total
        why = f"an engine of prefill takes {prefill} GPU{'s' * (prefill > 1)} and one of decode {decode}"
        why += f", and there {'are' if total != 1 else 'is'} {total} in all"
        return Finding(True, why, numbers, thresholds)
    rests_on = situation.rests_on(PREFILL, LAYERS, LENGTHS)
    if pools.prefill_busy is not None and pools.prefill_busy >= LEAST_BUSY:
        why = f"prefill is busy {_percent(pools.prefill_busy, LEAST_BUSY)} of the time, and {LEAST_BUSY:.0%} is enough"
        return Finding(False, why, numbers, thresholds, (), rests_on)
    if pools.decode_batch is not None and pools.decode_batch >= LEAST_BATCH:
        sequences = told_beside(pools.decode_batch, LEAST_BATCH)
        why = f"a decode engine works on {sequences} sequences at once, and {LEAST_BATCH} are enough"
        return Finding(False, why, numbers, thresholds)
    if pools.prefill_busy is None or pools.decode_batch is None:
        needs = situation.missing("--prefill-gpus", "--decode-gpus", "--rate", "--output-tokens", "--decode-step-ms")
        return unknown("how busy the pools would be is not known", needs or ("--params",), numbers, thresholds)
    why = (
        f"prefill is busy {_percent(pools.prefill_busy, LEAST_BUSY)} of the time, less than {LEAST_BUSY:.0%}, and a "
        f"decode engine works on {told_beside(pools.decode_batch, LEAST_BATCH)} sequences at once, fewer than "
        f"{LEAST_BATCH}"
    )
    return Finding(True, why, numbers, thresholds, (), rests_on)


def slow_links(situation: Situation) -> Finding:
    """The path is slow, and the transfer more than little beside prefill, or for a cache in one byte hard to hide."""
    path = situation.path
    if path is None:
        return _no_prefill()
    numbers: dict[str, Number] = {"gbit": path.gbit, "percent": path.percent, "dtype": situation.dtype.name}
    numbers |= _exposed(path)
    thresholds = {"slow_gbit": SLOW_GBIT, "small_percent": SMALL_PERCENT, "large_percent": LARGE_PERCENT}
    why, waiting = _path(situation, path), situation.waiting_percent
    rests_on = _path_rests_on(situation)
    if path.gbit > SLOW_GBIT:
        why = f"{why}; slow is {SLOW_GBIT:g} Gb/s or less"
        return Finding(False, why, numbers, thresholds, (), _rate_rests_on(situation))
    if waiting <= SMALL_PERCENT:
        return Finding(False, f"{why}; {SMALL_PERCENT:g} % or less is little", numbers, thresholds, (), rests_on)
    if situation.dtype.bytes > 1:
        why = f"{why}; more than {SMALL_PERCENT:g} % is not little, and {LARGE_PERCENT:g} % is hard to hide"
        return Finding(True, why, numbers, thresholds, (), rests_on)
    hard = waiting >= LARGE_PERCENT
    beside = "or more is hard to hide" if hard else "would be hard to hide"
    why = f"{why}; of a cache in one byte ({situation.dtype.name}) {LARGE_PERCENT:g} % {beside}"
    return Finding(hard, why, numbers, thresholds, (), rests_on)


def strict_itl(situation: Situation) -> Finding:
    """With whole prompts and every chunk size that was looked at colocated engines miss the p99 ITL target.

    Decode alone would not.
    """
    target, step_ms = situation.itl_target_ms, situation.step_ms
    needs = situation.missing("--itl-target-ms", "--decode-step-ms", "--rate")
    numbers: dict[str, Number] = {"itl_target_ms": target, "decode_step_ms": step_ms}
    numbers |= {"prompt_p99_tokens": situation.load.percentile(99), "burstiness": situation.load.burstiness}
    if target is not None and step_ms is not None and step_ms > target:
        why = f"a decode step alone takes {step_ms:g} ms, more than the target of {target:g}: a split cannot meet it"
        return Finding(False, why, numbers)
    if needs or target is None or step_ms is None:
        return unknown("what colocated prefill does to the ITL cannot be told", needs, numbers)
    if not situation.modes:
        return _no_prefill(numbers)
    rests_on = situation.rests_on(PREFILL, LAYERS, LENGTHS, ARRIVALS, ENGINES)
    numbers |= {f"itl_p99_ms_{_named(mode)}": mode.itl_p99_ms for mode in situation.modes}
    able = [mode for mode in situation.modes if not mode.overloaded and mode.itl_p99_ms is not None]
    meets = [mode for mode in able if _itl_ends(mode)[1] <= target]
    if meets:
        best = min(meets, key=lambda mode: mode.busy)
        itl, longest = told_beside(best.itl_p99_ms or 0.0, target), three_digits(best.stall_max_ms or 0.0)
        why = f"colocated with {_words(best)} the p99 ITL is {itl} ms, within the target of {target:g}"
        why += f" (the longest stall is {longest} ms"
        if best.chunk_tokens is None:
            return Finding(False, f"{why})", numbers, {}, (), rests_on)
        why += "; what such chunks cost of prefill's efficiency is not modelled)"
        return Finding(False, why, numbers, {}, (), (*rests_on, *situation.rests_on(CHUNKS)))
    if unsure := [mode for mode in able if _itl_ends(mode)[0] <= target]:
        told = "; ".join(f"with {_words(mode)} from {_told_ends(mode, target)} ms" for mode in unsure)
        why = f"colocated the p99 ITL is about the target of {target:g} ms, in {DRAWS} draws of the load {told}"
        return unknown(why, ("--lengths with timestamps of your load, or a target that is not so near",), numbers)
    if ENGINES in rests_on and any(_only_overloaded(mode, target) for mode in situation.modes):
        why = "one engine cannot keep up with this load; what prefill does to the ITL where enough do is not known"
        return unknown(why, ("--total-gpus",), numbers)
    if (unheld := _unheld(situation)) is not None:
        return Finding(unheld.holds, unheld.why, numbers | unheld.numbers, {}, unheld.needs, rests_on)
    if situation.chunks_not_known:
        lengths = ", ".join(f"{size:,}" for size in situation.chunks_not_known)
        why = f"whether chunks of {lengths} tokens meet the target of {target:g} ms is not known: their prefill is not"
        return unknown(why, (f"the prefill of {lengths} tokens, in --prefill-csv or --measured",), numbers)
    told = "; ".join(f"{_words(mode)}: {_itl(mode, target)}" for mode in situation.modes)
    why = f"colocated the p99 ITL misses the target of {target:g} ms ({told}; {OTHER_CHUNKS}); decode alone takes "
    why += f"{step_ms:g} ms{_batches(situation.pools)}"
    numbers |= {"decode_batch": situation.pools.decode_batch, "colocated_batch": situation.pools.colocated_batch}
    return Finding(True, why, numbers, {}, (), (*rests_on, *situation.rests_on(CHUNKS, STEP)))


def parallelism_differs(situation: Situation) -> Finding:
    """The sides are best with clearly other ranks."""
    thresholds = {"ranks_per_rank": CLEARLY}
    if situation.ranks is None:
        needs = ("the best --tp-prefill, --tp-decode (--pp-prefill, --pp-decode) of each side",)
        return unknown("the parallelism of the sides is not said", needs, {}, thresholds)
    prefill, decode = situation.ranks
    numbers: dict[str, Number] = {"tp_prefill": prefill.tp, "tp_decode": decode.tp}
    numbers |= {"pp_prefill": prefill.pp, "pp_decode": decode.pp}
    differs = any(max(pair) >= CLEARLY * min(pair) for pair in ((prefill.tp, decode.tp), (prefill.pp, decode.pp)))
    why = f"prefill has TP {prefill.tp} and PP {prefill.pp}, decode TP {decode.tp} and PP {decode.pp}"
    why += f"; a factor of {CLEARLY:g} is a clear difference"
    if differs and (unheld := _unheld(situation)) is not None:
        return Finding(unheld.holds, f"{why}; {unheld.why}", numbers | unheld.numbers, thresholds, unheld.needs)
    return Finding(differs, why, numbers, thresholds)


def fast_links(situation: Situation) -> Finding:
    """The path is fast, can carry the load, and the transfer is not much of prefill; measured, that it is little."""
    path = situation.path
    if path is None:
        return _no_prefill()
    waiting = situation.waiting_percent
    numbers: dict[str, Number] = {"gbit": path.gbit, "percent": path.percent}
    numbers |= _busy(path) | _exposed(path)
    thresholds = {"fast_gbit": FAST_GBIT, "small_percent": SMALL_PERCENT, "large_percent": LARGE_PERCENT}
    why, rests_on = _path(situation, path), _path_rests_on(situation)
    if path.measured:
        fast = waiting <= SMALL_PERCENT
        why += f"; of a measured path {SMALL_PERCENT:g} % or less is little"
    else:
        fast = path.gbit >= FAST_GBIT and waiting < LARGE_PERCENT
        why += f"; fast is {FAST_GBIT:g} Gb/s or more, and {LARGE_PERCENT:g} % is hard to hide"
    if fast and (unheld := _unheld(situation)) is not None:
        why, numbers = f"{why}; {unheld.why}", numbers | unheld.numbers
        return Finding(unheld.holds, why, numbers, thresholds, unheld.needs, rests_on)
    return Finding(fast, why, numbers, thresholds, (), rests_on)


def _unheld(situation: Situation) -> Finding | None:
    """What keeps a split from carrying the load, whatever speaks for it: this path, or a pool that can grow."""
    path, prefill = situation.path, situation.pools.prefill_busy
    if path is not None and path.busy is not None and path.overloaded:
        why = f"{path.path}: the load takes {path.busy}, more than it can carry"
        if path.busy.both_overloaded:
            return Finding(False, why, _busy(path))
        return unknown(why, (f"--{path.busy.side}-gpus that hold the load, each engine with its path",), _busy(path))
    if prefill is not None and prefill >= 1:
        why = f"the prefill pool of the split cannot keep up: the load takes {_percent(prefill, 1)} of its time"
        return unknown(why, ("--prefill-gpus that hold the load",), {"prefill_busy": prefill})
    return None


def _only_overloaded(mode: Mode, target: float) -> bool:
    """Whether all that keeps this way to run from the target is that prefill cannot keep up."""
    return mode.overloaded and (mode.itl_p99_ms is None or mode.itl_p99_ms <= target)


def _no_prefill(numbers: dict[str, Number] | None = None) -> Finding:
    return unknown("how long a prefill takes is not known", ("--params and --params-active",), numbers)


def _batches(pools: Pools) -> str:
    """For how many sequences at once the decode step is the same."""
    split, colocated = pools.decode_batch, pools.colocated_batch
    if split is None or colocated is None:
        return ""
    on_split, on_colocated = three_digits(split), three_digits(colocated)
    return f", with {on_split} sequences on an engine of the split as with {on_colocated} on a colocated one"


def _path(situation: Situation, path: PathCost) -> str:
    rate = f"{path.path} ({told_beside(path.gbit, SLOW_GBIT)} Gb/s)" if path.measured else path.path
    told = f"{rate}: a transfer is {told_beside(path.percent, SMALL_PERCENT, LARGE_PERCENT)} % of its prefill"
    if path.pipelined is None:
        return told
    leaves = f"what pipelining by {path.pipelined.cut} leaves exposed"
    if situation.counts_pipelining:
        return f"{told}, and {leaves} {told_beside(path.pipelined.percent, SMALL_PERCENT, LARGE_PERCENT)} %"
    return f"{told} ({leaves} is not counted, as its sends are assumed to cost nothing)"


def _percent(share: float, limit: float) -> str:
    return f"{told_beside(100 * share, 100 * limit)}%"


def _busy(path: PathCost) -> dict[str, Number]:
    return {"path_busy": None} if path.busy is None else {"path_busy": path.busy.share, "busy_side": path.busy.side}


def _exposed(path: PathCost) -> dict[str, Number]:
    return {} if path.pipelined is None else {"exposed_percent": path.pipelined.percent}


def _path_rests_on(situation: Situation) -> tuple[str, ...]:
    return (*_rate_rests_on(situation), *situation.rests_on(PREFILL, LAYERS, MODEL, SENDS))


def _rate_rests_on(situation: Situation) -> tuple[str, ...]:
    """A measurement that does not reach far enough is not asked for as if there were none."""
    assert situation.path is not None
    return situation.rests_on(REACH) or (() if situation.path.measured else (LINE_RATE,))


def _named(mode: Mode) -> str:
    return "whole" if mode.chunk_tokens is None else f"chunk_{mode.chunk_tokens}"


def _words(mode: Mode) -> str:
    return "whole prompts" if mode.chunk_tokens is None else f"chunks of {mode.chunk_tokens:,}"


def _itl(mode: Mode, target: float) -> str:
    if mode.itl_p99_ms is None:
        return "prefill cannot keep up"
    return f"{_told_ends(mode, target)} ms{', and prefill cannot keep up' if mode.overloaded else ''}"


def _itl_ends(mode: Mode) -> tuple[float, float]:
    """The least and the most p99 of the load's draws."""
    assert mode.itl_p99_ms is not None
    return mode.itl_p99_range_ms or (mode.itl_p99_ms, mode.itl_p99_ms)


def _told_ends(mode: Mode, target: float) -> str:
    return " to ".join(dict.fromkeys(told_beside(end, target) for end in _itl_ends(mode)))
