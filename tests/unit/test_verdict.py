"""The seven rules: each alone, their order, and what an answer rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.cache.layout import Ranks
from kvxfer.cost.colocated import Mode
from kvxfer.cost.load import Load
from kvxfer.cost.pipelined import Pipelined
from kvxfer.cost.pools import Cluster, Pools
from kvxfer.cost.rests_on import CHUNKS, ENGINES, LINE_RATE, MODEL, PREFILL, REACH, SENDS, STEP
from kvxfer.cost.situation import Finding, Situation
from kvxfer.cost.split import Busy, PathCost
from kvxfer.cost.verdict import RULES, decide
from kvxfer.cost.verdict_rules import (
    fast_links,
    offline_batch,
    parallelism_differs,
    short_prompts,
    slow_links,
    small_cluster,
    strict_itl,
)
from kvxfer.model.dtypes import BF16, DTYPES, FP8_E4M3, PACKED, DType

CLUSTER = Cluster(4, 4, 8, 8, 16)
POOLS = Pools(CLUSTER, prefill_busy=0.6, prefill_wait_ms=10, decode_batch=20, concurrency=40)


def mode(chunk: int | None, itl_p99_ms: float | None, busy: float = 0.5) -> Mode:
    return Mode(chunk, busy, 0.1, 1.0, 0.0, 0.0, itl_p99_ms)


def path(gbit: float, percent: float, **changes: Any) -> PathCost:
    cost = PathCost(
        "bf16", f"{gbit:g} Gb/s line rate", False, None, gbit, percent, None, None, None, None, Busy(0.1, None)
    )
    return replace(cost, **changes)


CALM = Situation(
    objective="latency",
    itl_target_ms=100,
    step_ms=30,
    load=Load([8192], "here", outputs=[300], rate=1),
    pools=POOLS,
    modes=[mode(None, 750), mode(512, 80)],
    ranks=(Ranks(4), Ranks(4)),
    dtype=BF16,
    path=path(150, 20),
    assumed=frozenset(),
)
"""Everything is known, and no rule holds."""


def changed(**changes: Any) -> Situation:
    return replace(CALM, **changes)


def pools(**changes: Any) -> Pools:
    return replace(POOLS, **changes)


def test_no_rule_holds() -> None:
    decision = decide(CALM)
    assert (decision.answer, decision.by, decision.provisional, decision.needs) == (
        "no ground to split",
        None,
        False,
        [],
    )
    assert [finding.holds for finding in decision.findings] == [False] * 7


HOLDS: dict[str, dict[str, Any]] = {
    "offline batch": {"objective": "throughput"},
    "short prompts": {"load": Load([100], "here", outputs=[3], rate=1), "pools": pools(concurrency=7.9)},
    "small cluster": {"pools": pools(prefill_busy=0.29, decode_batch=7.9)},
    "slow links": {"path": path(100, 30)},
    "strict ITL": {"itl_target_ms": 79},
    "parallelism": {"ranks": (Ranks(8), Ranks(4))},
    "fast links": {"path": path(200, 15)},
}


@pytest.mark.parametrize("name", HOLDS)
def test_each_rule_alone_decides(name: str) -> None:
    decision = decide(changed(**HOLDS[name]))
    (rule,) = (rule for rule in RULES if rule.name == name)
    assert (decision.answer, decision.by, decision.provisional) == (rule.verdict, name, False)
    assert sum(finding.holds is True for finding in decision.findings) == 1


def test_the_order_and_the_answers() -> None:
    """With all of them at once, and then without the first, and so on; what excludes another is left out."""
    assert [rule.name for rule in RULES] == list(HOLDS)
    skips, rest = [rule.verdict for rule in RULES[:3]], [rule.verdict for rule in RULES[3:]]
    assert all(verdict.startswith("skip: ") for verdict in skips)
    assert rest == ["compute the ratio first", "strong candidate", "strong candidate", "favourable on arithmetic"]
    together = HOLDS["offline batch"] | HOLDS["small cluster"] | HOLDS["slow links"] | HOLDS["strict ITL"]
    for name in ("offline batch", "small cluster", "slow links", "strict ITL"):
        assert decide(changed(**together)).by == name
        together = {key: value for key, value in together.items() if key not in HOLDS[name]}


def test_an_open_rule_before_makes_an_answer_provisional() -> None:
    decision = decide(changed(objective=None, itl_target_ms=79))
    assert (decision.answer, decision.provisional) == ("strong candidate", True)
    assert decision.needs == ["--objective latency|throughput"]


def test_an_open_rule_after_the_answer_does_not() -> None:
    decision = decide(changed(ranks=None, objective="throughput"))
    assert not decision.provisional
    assert decision.needs == []


def test_nothing_holds_and_something_is_open() -> None:
    decision = decide(changed(ranks=None))
    assert (decision.answer, decision.provisional) == ("undetermined", True)
    assert "--tp-prefill" in decision.needs[0]


def test_an_answer_on_an_assumption_says_what_settles_it() -> None:
    decision = decide(changed(assumed=frozenset({PREFILL}), path=path(200, 15)))
    assert any("--prefill-csv" in settled for settled in decision.settled_by)
    assert any("kvxfer bench --fit --peer" in settled for settled in decision.settled_by)
    measured = decide(changed(path=path(200, 15, measured=True)))
    assert (measured.by, measured.settled_by) == ("fast links", [])
    assert decide(changed(assumed=frozenset({PREFILL}), objective="throughput")).settled_by == []


def found(finding: Finding, needs: Sequence[str] = ()) -> bool | None:
    assert finding.why
    assert list(finding.needs) == list(needs)
    return finding.holds


def test_offline_batch() -> None:
    assert found(offline_batch(changed(objective="throughput"))) is True
    assert found(offline_batch(CALM)) is False
    assert found(offline_batch(changed(objective=None)), ["--objective latency|throughput"]) is None


def test_short_prompts() -> None:
    short = Load([1024] * 9 + [100_000], "here")
    few, many, unknown = pools(concurrency=7.9), pools(concurrency=8), pools(concurrency=None)
    assert found(short_prompts(changed(load=short, pools=few))) is True
    assert found(short_prompts(changed(load=short, pools=many))) is False
    needs = ["--rate", "--output-tokens", "--decode-step-ms"]
    assert found(short_prompts(changed(load=short, pools=unknown, step_ms=None)), needs) is None
    # of long prompts nothing else is asked
    assert found(short_prompts(changed(load=Load([1025], "here"), pools=unknown, step_ms=None))) is False


def test_small_cluster() -> None:
    assert found(small_cluster(changed(pools=pools(cluster=Cluster(4, 4, total=7))))) is True
    assert found(small_cluster(changed(pools=pools(prefill_busy=0.29, decode_batch=8)))) is False
    assert found(small_cluster(changed(pools=pools(prefill_busy=0.3, decode_batch=1)))) is False
    # either pool that is busy enough is an answer
    assert found(small_cluster(changed(pools=pools(prefill_busy=0.3, decode_batch=None)))) is False
    assert found(small_cluster(changed(pools=pools(prefill_busy=None, decode_batch=8)))) is False
    open_one = pools(cluster=Cluster(4, 4), prefill_busy=None, decode_batch=None)
    assert found(small_cluster(changed(pools=open_one)), ["--prefill-gpus", "--decode-gpus"]) is None


@pytest.mark.parametrize(
    ("gbit", "percent", "holds"), [(100, 30, True), (100, 15, False), (101, 30, False), (25, 99, True)]
)
def test_slow_links(gbit: float, percent: float, holds: bool) -> None:
    assert found(slow_links(changed(path=path(gbit, percent)))) is holds
    assert found(slow_links(changed(path=path(gbit, percent, measured=True)))) is holds


@pytest.mark.parametrize(("percent", "holds"), [(16, False), (29.9, False), (30, True), (144, True)])
def test_one_byte_is_no_answer_to_a_transfer_that_is_still_hard_to_hide(percent: float, holds: bool) -> None:
    assert found(slow_links(changed(path=path(10, percent), dtype=FP8_E4M3))) is holds


@pytest.mark.parametrize(
    ("cost", "dtype", "told"),
    [
        (path(100, 14), BF16, "a transfer is 14 % of its prefill; 15 % or less is little"),
        (path(25, 24.4), BF16, "24.4 % of its prefill; more than 15 % is not little, and 30 % is hard to hide"),
        (path(101, 24.4), BF16, "24.4 % of its prefill; slow is 100 Gb/s or less"),
        (path(25, 24.4), FP8_E4M3, "of a cache in one byte (fp8_e4m3) 30 % would be hard to hide"),
        (path(25, 31), FP8_E4M3, "of a cache in one byte (fp8_e4m3) 30 % or more is hard to hide"),
    ],
)
def test_slow_links_tell_the_threshold_that_decided(cost: PathCost, dtype: DType, told: str) -> None:
    assert slow_links(changed(path=cost, dtype=dtype)).why.endswith(told)


def test_the_words_of_fast_links_fit_a_measured_path_of_any_rate() -> None:
    cost = path(60.5, 12, measured=True)
    finding = fast_links(changed(path=cost))
    assert finding.holds
    assert finding.why.endswith(
        "(60.5 Gb/s): a transfer is 12 % of its prefill; of a measured path 15 % or less is little"
    )
    (rule,) = (rule for rule in RULES if rule.name == "fast links")
    assert rule.situation.endswith("or measured to take little")
    assert fast_links(CALM).why.endswith("fast is 200 Gb/s or more, and 30 % is hard to hide")


def test_what_is_near_a_threshold_is_told_apart_from_it() -> None:
    """As of three digits it would be told as the threshold itself, or as what is beyond it."""
    assert "a transfer is 15.04 % of its prefill; more than 15 %" in slow_links(changed(path=path(100, 15.04))).why
    assert "a transfer is 29.98 %" in fast_links(changed(path=path(200, 29.98))).why
    misses = strict_itl(changed(modes=[mode(None, 100.4), mode(512, 100.3)], itl_target_ms=100.2))
    assert "misses the target of 100.2 ms (whole prompts: 100.4 ms; chunks of 512: 100.3 ms;" in misses.why
    meets = strict_itl(changed(modes=[mode(None, 0.31)], step_ms=0.3, itl_target_ms=0.4))
    assert "the p99 ITL is 0.31 ms, within the target of 0.4" in meets.why
    few = changed(load=Load([100], "here"), pools=pools(concurrency=7.996))
    assert "7.996 sequences decode at once, fewer than 8" in short_prompts(few).why
    idle = changed(pools=pools(prefill_busy=0.29996, decode_batch=7.996))
    assert "busy 29.996% of the time, less than 30%" in small_cluster(idle).why
    assert "works on 7.996 sequences at once, fewer than 8" in small_cluster(idle).why


def test_small_clusters_and_short_prompts_tell_their_thresholds() -> None:
    assert "busy 60% of the time, and 30% is enough" in small_cluster(CALM).why
    idle = pools(prefill_busy=0.29)
    assert "20 sequences at once, and 8 are enough" in small_cluster(changed(pools=idle)).why
    assert "29% of the time, less than 30%" in small_cluster(changed(pools=replace(idle, decode_batch=4))).why
    assert short_prompts(CALM).why == "p90 of the prompts is 8,192 tokens, more than 1,024"
    short = changed(load=Load([100], "here"))
    assert "no more than 1,024; 40 sequences decode at once, and fewer than 8 are few" in short_prompts(short).why


def test_every_cache_in_one_byte_counts_as_fp8() -> None:
    for dtype in (*DTYPES.values(), *PACKED.values()):
        holds = slow_links(changed(path=path(100, 29), dtype=dtype)).holds
        assert holds is ("fp8" not in dtype.name and "fp4" not in dtype.name)


def test_a_p99_that_draws_of_the_load_have_on_both_sides_of_the_target_decides_nothing() -> None:
    unsure = replace(mode(None, 74), itl_p99_range_ms=(74.0, 209.0))
    finding = strict_itl(changed(itl_target_ms=78, modes=[unsure, mode(512, 80)]))
    assert (finding.holds, finding.needs[0][:9]) == (None, "--lengths")
    assert "from 74 to 209 ms" in finding.why
    assert found(strict_itl(changed(itl_target_ms=50, modes=[unsure, mode(512, 80)]))) is True
    assert found(strict_itl(changed(itl_target_ms=210, modes=[unsure, mode(512, 80)]))) is False
    assert found(strict_itl(changed(itl_target_ms=80, modes=[unsure, mode(512, 80)]))) is False  # chunks surely do


def test_chunks_whose_prefill_is_not_known_leave_it_open_unless_others_meet_the_target() -> None:
    finding = strict_itl(changed(itl_target_ms=79, chunks_not_known=[512]))
    assert (finding.holds, finding.needs) == (None, ("the prefill of 512 tokens, in --prefill-csv or --measured",))
    assert found(strict_itl(changed(itl_target_ms=80, chunks_not_known=[256]))) is False


def test_strict_itl() -> None:
    assert found(strict_itl(changed(itl_target_ms=79))) is True
    assert found(strict_itl(changed(itl_target_ms=80))) is False
    assert "512" in strict_itl(CALM).why
    # chunks that meet the target do not help where prefill cannot keep up with them
    assert found(strict_itl(changed(modes=[mode(None, 750), mode(512, 80, busy=1.0)]))) is True
    assert found(strict_itl(changed(modes=[mode(None, None, busy=1.2)]))) is True
    assert "cannot meet it" in strict_itl(changed(itl_target_ms=29)).why
    assert found(strict_itl(changed(itl_target_ms=29))) is False
    nothing = changed(itl_target_ms=None, step_ms=None, load=Load([1], "here"), modes=[])
    assert found(strict_itl(nothing), ["--itl-target-ms", "--decode-step-ms", "--rate"]) is None


def test_strict_itl_tells_that_other_chunks_and_larger_batches_were_not_looked_at() -> None:
    """Chunks that meet the target do so at the efficiency of whole prompts; whole prompts that do rest on no chunk."""
    assumed = frozenset({CHUNKS, STEP})
    missed = strict_itl(changed(itl_target_ms=79, assumed=assumed, pools=pools(decode_batch=20, concurrency=40)))
    assert missed.rests_on == (CHUNKS, STEP)
    assert "(whole prompts: 750 ms; chunks of 512: 80 ms; no other chunks were looked at, and what small" in missed.why
    assert missed.why.endswith("30 ms, with 20 sequences on an engine of the split as with 10 on a colocated one")
    assert (missed.numbers["decode_batch"], missed.numbers["colocated_batch"]) == (20, 10)
    met = strict_itl(changed(assumed=assumed))
    assert (met.holds, met.rests_on) == (False, (CHUNKS,))
    assert "what such chunks cost of prefill's efficiency is not modelled" in met.why
    whole = strict_itl(changed(assumed=assumed, itl_target_ms=750, modes=[mode(None, 750)]))
    assert (whole.holds, whole.rests_on) == (False, ())


def pipelined(percent: float, serial_percent: float = 100) -> Pipelined:
    return Pipelined("1", 1, None, percent, serial_percent, None, None, 16, None, None, False, [])


@pytest.mark.parametrize(("exposed", "serial", "counts"), [(5, 65, 5), (60, 65, 53), (65, 65, 53), (80, 65, 80)])
def test_a_cut_that_pays_counts_for_no_more_than_the_whole_transfer_as_measured(
    exposed: float, serial: float, counts: float
) -> None:
    """Requests took 53 % of prefill, and serial 65 by the sends of the pipelined row."""
    found = changed(path=replace(path(200, 53), pipelined=pipelined(exposed, serial)), assumed=frozenset({MODEL}))
    assert found.waiting_percent == counts


def test_what_is_exposed_of_sends_that_cost_nothing_decides_nothing() -> None:
    """Over a slow path and over a fast one: by the model 1 % is exposed, of 29 and of 40."""
    for rule, cost, held in ((slow_links, path(100, 29), True), (fast_links, path(200, 40), False)):
        situation = changed(path=replace(cost, pipelined=pipelined(1)))
        counted = rule(replace(situation, assumed=frozenset({MODEL})))
        assert (counted.holds, counted.rests_on) == (not held, (LINE_RATE, MODEL))
        assert "and what pipelining by 1 leaves exposed 1 %" in counted.why
        free = rule(replace(situation, assumed=frozenset({SENDS})))
        assert (free.holds, free.rests_on) == (held, (LINE_RATE, SENDS))
        assert "(what pipelining by 1 leaves exposed is not counted, as its sends are assumed to cost" in free.why


def test_an_overload_of_engines_that_are_assumed_is_no_missed_target() -> None:
    """More engines would keep up, with chunks that meet it; where none would meet it, they do not help."""
    overload = [mode(None, None, busy=3.0), mode(512, 80, busy=4.0)]
    one = changed(modes=overload, assumed=frozenset({ENGINES}))
    assert found(strict_itl(one), ["--total-gpus"]) is None
    assert found(strict_itl(changed(modes=overload))) is True
    assert found(strict_itl(changed(modes=[mode(None, 750), mode(512, 120)], assumed=frozenset({ENGINES})))) is True


@pytest.mark.parametrize("name", ["strict ITL", "parallelism", "fast links"])
def test_nothing_speaks_for_a_split_that_cannot_hold_the_load(name: str) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    situation = changed(**HOLDS[name])
    small = replace(situation, pools=pools(prefill_busy=1.0))
    assert found(rule.find(small), ["--prefill-gpus that hold the load"]) is None
    assert decide(small).answer == "undetermined"
    assert situation.path is not None
    fewer = replace(situation, path=replace(situation.path, busy=Busy(1.0, "decode")))
    assert found(rule.find(fewer), ["--decode-gpus that hold the load, each engine with its path"]) is None
    told = "Gb/s line rate: the load takes 100% of the time that the path of each decode engine has"
    assert told in rule.find(fewer).why
    assert rule.find(fewer).numbers["busy_side"] == "decode"
    both = replace(situation, path=replace(situation.path, busy=Busy(3.2, "decode", 1.6)))
    assert found(fast_links(both)) is False  # more engines of decode alone would not do
    narrow = replace(situation, path=replace(situation.path, busy=Busy(1.0, None)))
    assert found(rule.find(narrow)) is False
    assert decide(narrow).answer == "no ground to split"


@pytest.mark.parametrize(
    ("prefill", "decode", "holds"),
    [((4, 1), (4, 1), False), ((8, 1), (4, 1), True), ((4, 1), (4, 2), True), ((4, 1), (6, 1), False)],
)
def test_parallelism(prefill: tuple[int, int], decode: tuple[int, int], holds: bool) -> None:
    assert found(parallelism_differs(changed(ranks=(Ranks(*prefill), Ranks(*decode))))) is holds


def test_fast_links() -> None:
    assert found(fast_links(changed(path=path(200, 29.9)))) is True
    assert found(fast_links(changed(path=path(200, 30)))) is False
    assert found(fast_links(changed(path=path(199, 5)))) is False
    assert found(fast_links(changed(path=path(400, 5, busy=Busy(1.0, None))))) is False
    # what was measured speaks for itself, whatever the rate
    assert found(fast_links(changed(path=path(120, 15, measured=True)))) is True
    assert found(fast_links(changed(path=path(300, 16, measured=True)))) is False


def test_without_a_prefill_no_path_can_be_judged() -> None:
    for rule in (slow_links, fast_links):
        assert found(rule(changed(path=None)), ["--params and --params-active"]) is None


def test_findings_tell_what_they_rest_on() -> None:
    situation = changed(assumed=frozenset({PREFILL}), path=path(200, 15))
    assert fast_links(situation).rests_on == (LINE_RATE, PREFILL)
    assert fast_links(changed(path=path(200, 15, measured=True))).rests_on == ()
    # what was measured is not asked for again, but that it reaches further
    for measured in (False, True):
        situation = changed(assumed=frozenset({REACH}), path=path(200, 15, measured=measured))
        assert fast_links(situation).rests_on == slow_links(situation).rests_on == (REACH,)
