"""The model of pipelining: what is true of every link and request, and what can be worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cost.measured import measured_rows
from kvxfer.cost.pipeline import (
    Link,
    Ready,
    best_layers,
    break_even_tokens,
    by_layers,
    exposed_ns,
    fit_link,
    usable_ns,
)
from kvxfer.errors import UsageError

TIMES = st.floats(0, 1e10)
LINKS = st.builds(Link, st.floats(0, 1e8), st.floats(0, 1e7), st.floats(1e-3, 1e3), st.floats(0, 1e5))
COMPUTE = st.lists(TIMES, min_size=1, max_size=40)
SIZE = st.floats(1, 1e12)
PIECES = st.floats(0, 1e6)


@given(LINKS, COMPUTE, SIZE, PIECES, st.data())
def test_exposed_time_is_never_below_zero(
    link: Link, layer_ns: list[float], size: float, pieces: float, data: st.DataObject
) -> None:
    together = data.draw(st.integers(1, len(layer_ns)))
    assert exposed_ns(by_layers(size, pieces, layer_ns, together), link, sum(layer_ns)) >= 0
    assert exposed_ns(by_layers(size, pieces, layer_ns, together), link, math.inf) == 0


@given(LINKS, COMPUTE, SIZE, PIECES, st.data())
def test_the_best_is_never_worse_than_serial(
    link: Link, layer_ns: list[float], size: float, pieces: float, data: st.DataObject
) -> None:
    choices = data.draw(st.lists(st.integers(1, len(layer_ns)), max_size=10))
    best, exposed = best_layers(size, pieces, layer_ns, link, choices)
    compute = sum(layer_ns)
    serial = exposed_ns(by_layers(size, pieces, layer_ns, len(layer_ns)), link, compute)
    assert exposed <= serial
    assert best in {*choices, len(layer_ns)}
    for one in choices:
        assert exposed <= exposed_ns(by_layers(size, pieces, layer_ns, one), link, compute) + 1e-6 * serial


@given(LINKS, COMPUTE, SIZE, PIECES)
def test_serial_is_exposed_by_the_whole_transfer(link: Link, layer_ns: list[float], size: float, pieces: float) -> None:
    compute = sum(layer_ns)
    exposed = exposed_ns(by_layers(size, pieces, layer_ns, len(layer_ns)), link, compute)
    assert exposed == pytest.approx(link.alone_ns(size, pieces), rel=1e-6, abs=1e-6 * compute)


@given(LINKS, COMPUTE, SIZE, PIECES, st.data())
def test_a_slower_link_never_hides_more(
    link: Link, layer_ns: list[float], size: float, pieces: float, data: st.DataObject
) -> None:
    sends = by_layers(size, pieces, layer_ns, data.draw(st.integers(1, len(layer_ns))))
    worse = Link(
        link.latency_ns + data.draw(st.floats(0, 1e7)),
        link.occupancy_ns + data.draw(st.floats(0, 1e7)),
        link.gbyte_s / data.draw(st.floats(1, 10)),
        link.per_descriptor_ns + data.draw(st.floats(0, 1e4)),
    )
    before, after = (exposed_ns(sends, one, sum(layer_ns)) for one in (link, worse))
    assert after >= before - 1e-6 * before


def test_sends_weigh_what_the_request_does() -> None:
    sends = by_layers(700, 70, [1.0] * 7, 3)
    assert [send.at_ns for send in sends] == [3, 6, 7]
    assert [send.bytes for send in sends] == pytest.approx([300, 300, 100])
    assert [send.descriptors for send in sends] == pytest.approx([30, 30, 10])


def test_a_link_that_keeps_up_leaves_the_last_send_exposed() -> None:
    """10 layers of 100 ns; each of 10 bytes takes 5 + 10·2 + 10/1 = 35 ns, and 7 more until it is usable."""
    link = Link(latency_ns=7, occupancy_ns=5, gbyte_s=1.0, per_descriptor_ns=2)
    sends = by_layers(100, 100, [100.0] * 10, 1)
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
    found = break_even_tokens(1.0, 0.0, 32.0, 32, 1, link, 16)
    assert found == 5_008  # the next multiple of 16
    assert break_even_tokens(1.0, 0.0, 32.0, 32, 32, link, 16) == 16
    assert break_even_tokens(1.0, 0.0, 0.0, 32, 1, link, 16) is None


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
