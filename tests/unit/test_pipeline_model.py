"""The model of pipelining: what is true of every link and request, and what can be worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache.leaving import Weight
from kvxfer.cache.sends import send_ends
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.pipeline import (
    Link,
    Ready,
    best_layers,
    break_even_tokens,
    computed_sends,
    exposed_ns,
    fit_link,
    usable_ns,
)
from kvxfer.errors import UsageError

TIMES = st.floats(0, 1e11)
LINKS = st.builds(Link, st.floats(0, 1e8), st.floats(0, 1e7), st.floats(1e-3, 1e3), st.floats(0, 1e5))
KEPT = st.tuples(st.floats(1, 1e12), st.floats(0, 1e6))
LAYERS = st.lists(st.one_of(KEPT, st.just((0.0, 0.0))), min_size=1, max_size=40)
"""Bytes and pieces of each layer, some of which keep nothing."""


def sends_of(layers: list[Weight], compute_ns: float, together: int) -> list[Ready]:
    parts = [layers[first : first + together] for first in range(0, len(layers), together)]
    weights = [(sum(size for size, _ in part), sum(pieces for _, pieces in part)) for part in parts]
    return computed_sends([(compute_ns, weights)], send_ends([range(len(layers))], together))


@given(LINKS, TIMES, LAYERS, st.data())
def test_exposed_time_is_never_below_zero(
    link: Link, compute_ns: float, layers: list[Weight], data: st.DataObject
) -> None:
    sends = sends_of(layers, compute_ns, data.draw(st.integers(1, len(layers))))
    assert exposed_ns(sends, link, compute_ns) >= 0
    assert exposed_ns(sends, link, math.inf) == 0


@given(LINKS, TIMES, LAYERS, st.data())
def test_the_best_is_never_worse_than_serial(
    link: Link, compute_ns: float, layers: list[Weight], data: st.DataObject
) -> None:
    def exposed(together: int) -> float:
        return exposed_ns(sends_of(layers, compute_ns, together), link, compute_ns)

    choices = data.draw(st.lists(st.integers(1, len(layers)), max_size=10))
    best, serial = best_layers(exposed, len(layers), choices), exposed(len(layers))
    assert exposed(best) <= serial
    assert best in {*choices, len(layers)}
    for one in choices:
        assert exposed(best) <= exposed(one) + 1e-6 * serial


@given(LINKS, TIMES, LAYERS.filter(lambda layers: any(size for size, _ in layers)))
def test_serial_is_exposed_by_the_whole_transfer(link: Link, compute_ns: float, layers: list[Weight]) -> None:
    size, pieces = sum(size for size, _ in layers), sum(pieces for _, pieces in layers)
    exposed = exposed_ns(sends_of(layers, compute_ns, len(layers)), link, compute_ns)
    assert exposed == pytest.approx(link.alone_ns(size, pieces), rel=1e-6, abs=1e-6 * compute_ns)


@given(LINKS, TIMES, LAYERS, st.data())
def test_a_slower_link_never_hides_more(
    link: Link, compute_ns: float, layers: list[Weight], data: st.DataObject
) -> None:
    sends = sends_of(layers, compute_ns, data.draw(st.integers(1, len(layers))))
    worse = Link(
        link.latency_ns + data.draw(st.floats(0, 1e7)),
        link.occupancy_ns + data.draw(st.floats(0, 1e7)),
        link.gbyte_s / data.draw(st.floats(1, 10)),
        link.per_descriptor_ns + data.draw(st.floats(0, 1e4)),
    )
    before, after = (exposed_ns(sends, one, compute_ns) for one in (link, worse))
    assert after >= before - 1e-6 * before


def test_sends_weigh_what_their_layers_do_and_wait_for_them() -> None:
    """Seven layers, the fourth to sixth of which keep nothing: what has no bytes is not sent."""
    sends = computed_sends([(7.0, [(300, 30), (0, 0), (90, 9)])], [3, 6, 7])
    assert [(send.at_ns, send.bytes, send.descriptors) for send in sends] == [(3, 300, 30), (7, 90, 9)]


def test_chunks_by_hand() -> None:
    """Two layers, chunks of 6 and 2 ns: sends of one layer are ready after 3, 6, 7 and 8."""
    sends = computed_sends([(6.0, [(300, 3), (290, 2)]), (2.0, [(100, 1), (0, 0)])], [1, 2])
    assert [(send.at_ns, send.bytes, send.descriptors) for send in sends] == [(3, 300, 3), (6, 290, 2), (7, 100, 1)]


def test_a_heavy_last_layer_is_what_stays_exposed() -> None:
    """Of as many bytes in all: what matters is when they are computed."""
    link = Link(0, 0, 1.0)
    early, late = [(70.0, 1.0), (10.0, 1.0)], [(10.0, 1.0), (70.0, 1.0)]
    assert [exposed_ns(sends_of(layers, 1000, 1), link, 1000) for layers in (early, late)] == [10, 70]


def test_a_link_that_keeps_up_leaves_the_last_send_exposed() -> None:
    """10 layers of 100 ns; each of 10 bytes takes 5 + 10·2 + 10/1 = 35 ns, and 7 more until it is usable."""
    link = Link(latency_ns=7, occupancy_ns=5, gbyte_s=1.0, per_descriptor_ns=2)
    sends = sends_of([(10, 10)] * 10, 1000, 1)
    assert usable_ns(sends, link) == [100 * (layer + 1) + 42 for layer in range(10)]
    assert exposed_ns(sends, link, 1000) == 42


def test_a_link_that_does_not_keep_up_is_busy_from_the_first_send() -> None:
    link = Link(latency_ns=7, occupancy_ns=150, gbyte_s=1.0)
    sends = [Ready(100.0 * (layer + 1), 10) for layer in range(10)]
    assert exposed_ns(sends, link, 1000) == 100 + 10 * 160 + 7 - 1000


def test_nothing_to_send_is_not_exposed() -> None:
    assert exposed_ns([], Link(1, 1, 1), 10) == 0


@given(st.floats(0, 1e5), st.floats(1, 1e5), st.floats(0.1, 100), st.integers(2, 100))
def test_a_link_is_found_from_its_transfers(latency: float, occupancy: float, gbyte_s: float, layers: int) -> None:
    link, size = Link(latency, occupancy, gbyte_s), 1e9
    alone = [
        (count, latency + count * occupancy + size / gbyte_s) for count in range(1, layers + 1) if layers % count == 0
    ]
    found = fit_link(size, alone, (size / layers, link.alone_ns(size / layers, 0)))
    assert found.occupancy_ns == pytest.approx(occupancy, rel=1e-3, abs=1)
    assert found.gbyte_s == pytest.approx(gbyte_s, rel=1e-3)
    assert found.alone_ns(size, 0) == pytest.approx(link.alone_ns(size, 0), rel=1e-6)


def test_what_fits_no_link_is_still_one() -> None:
    """Noise: more sends were faster, or a part took as long as the whole."""
    for alone, part in (
        ([(1, 100.0), (4, 50.0)], (10.0, 30.0)),
        ([(1, 100.0)], (100.0, 100.0)),
        ([(1, 100.0)], (10.0, 500.0)),
        ([(1, 100.0), (2, 110.0)], (50.0, 20.0)),
    ):
        found = fit_link(100, alone, part)
        assert found.latency_ns >= 0
        assert found.occupancy_ns >= 0
        assert found.gbyte_s > 0


def test_break_even_is_where_a_layers_compute_pays_for_its_send() -> None:
    """Compute of 1 ns per token and layer: from 5,000 tokens on a layer takes longer than the 5,000 ns of a send."""
    link = Link(latency_ns=100, occupancy_ns=5_000, gbyte_s=1e9)

    def found(together: int, layer_ns: float = 1.0) -> int | None:
        def exposed(tokens: int, together: int) -> float:
            compute_ns = 32 * layer_ns * tokens
            return exposed_ns(sends_of([(tokens / 32, 0.0)] * 32, compute_ns, together), link, compute_ns)

        return break_even_tokens(exposed, together, 32, 16)

    assert found(1) == 5_008  # the next multiple of 16
    assert found(32) == 16
    assert found(1, layer_ns=0.0) is None


@pytest.mark.parametrize(("loses", "found"), [(range(16, 97), 112), (range(100, 1001), 1008), (range(99, 10**9), None)])
def test_break_even_is_past_all_prompts_at_which_the_cut_loses(loses: range, found: int | None) -> None:
    """Sends of sizes that were measured to be slow may lose where smaller and larger ones pay."""

    def exposed(tokens: int, together: int) -> float:
        return 2.0 if together == 1 and tokens in loses else 1.0

    assert break_even_tokens(exposed, 1, 32, 16) == found


@pytest.mark.parametrize(
    "damage",
    [{"cuts": []}, {"best": None}, {"compute": {"source": 3}}, {"compute": {"source": "spin", "layers": "32"}}, 7],
)
def test_a_damaged_pipeline_of_a_result_is_refused(damage: object) -> None:
    good = {
        "compute": {"source": "assumed prefill (full)", "layers": 32, "layer_ns": 400_000},
        "cuts": [{"cut": "4", "exposed_ns": 1_500_000}],
        "best": {"cut": "4", "ties": []},
    }
    row = {
        "status": "ok",
        "id": "a",
        "model": "m",
        "dtype": "bf16",
        "tokens": 1,
        "bytes": 1,
        "backend": "tcp",
        "op": "push",
        "p50_ns": 1,
    }
    (read,) = measured_rows([row | {"pipeline": good}], "network")
    assert (read.exposed_ms, read.behind_ms) == (1.5, 12.8)
    with pytest.raises(UsageError, match="row 'a' has pipeline"):
        measured_rows([row | {"pipeline": good | damage if isinstance(damage, dict) else damage}], "network")
