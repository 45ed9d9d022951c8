"""bench/peers, UCX: the bare loop of UCP's calls moves what it should, and the goals compare what they say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer import _native

PEERS = Path(__file__).parents[2] / "bench" / "peers"
PIECE = 4096
BLOCKS = 16
REGIONS = 2

pytestmark = pytest.mark.skipif(not _native.probe("ucx").available, reason=f"no UCX: {_native.probe('ucx').why_not}")


@pytest.fixture(scope="module", autouse=True)
def peers() -> Iterator[None]:
    """The modules of bench/peers can be imported."""
    sys.path.insert(0, str(PEERS))
    yield
    sys.path.remove(str(PEERS))


@pytest.fixture(scope="module")
def bare(peers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The bare loops by name."""
    import contenders.bare_ucp
    from environment import Environment

    environment = Environment(tmp_path_factory.mktemp("environment"))
    offers = contenders.bare_ucp.offers(environment)
    assert not environment.left_out
    return {offer.name: offer for offer in offers}


def _small(op: str) -> Any:
    """A job of scattered pieces in pools that are as small as can be."""
    from job import Job, Request

    order = np.random.default_rng(0)
    regions = np.repeat(np.arange(REGIONS, dtype=np.uint32), BLOCKS)

    def offsets() -> Any:
        return np.concatenate([order.permutation(BLOCKS).astype(np.uint64) * np.uint64(PIECE) for _ in range(REGIONS)])

    lengths = np.full(len(regions), PIECE, np.uint64)
    request = Request(regions, offsets(), regions, offsets(), lengths, np.zeros(1, np.uint32))
    return Job(op, [PIECE * BLOCKS] * REGIONS, [request])


@pytest.mark.parametrize(
    ("name", "op"),
    [("bare-ucx-tcp", "push"), ("bare-ucx-tcp", "pull"), ("bare-ucx-cma", "push"), ("bare-ucx-mapped", "push")],
)
def test_the_bare_loop_moves_every_piece_to_its_place(bare: dict[str, Any], name: str, op: str) -> None:
    from pair import ContenderError, started

    with started(bare[name], _small(op)) as pair:
        with pytest.raises(ContenderError, match="32 of 32 pieces arrived wrong"):
            pair.verify()
        moved = pair.move(3)
        pair.verify()
    assert len(moved.ns) == 3
    assert min(moved.ns) > 0


def test_a_library_that_fails_says_how(bare: dict[str, Any]) -> None:
    from pair import ContenderError, Pair

    nowhere = replace(bare["bare-ucx-tcp"], environ={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "no-such-device"})
    with pytest.raises(ContenderError, match=r"bare-ucx-tcp: .* context: No such device"):
        Pair(nowhere, _small("push"))


def test_ours_is_held_against_the_faster_bare_loop_of_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import cases.ucx as case
    from goals import Goal
    from offer import FLOOR, MOVES, Offer
    from rounds import Comparison, Measured

    ours = Offer("kvxfer-ucx", "kvxfer_backends", MOVES, "tcp", "", options={"backend": "ucx"})
    others = {
        "bare-ucx-tcp": ("tcp", [90, 90, 90]),
        "bare-ucx-tcp-polling": ("tcp", [200, 200, 200]),
        "bare-ucx-cma": ("memory", [40, 40, 40]),
        "bare-ucx-mapped": ("memory", [30, 30, 30]),
        "nixl-tcp": ("tcp", [150, 160, 120]),
    }
    modules = {"bare": "bare_ucp", "nixl": "nixl"}
    offers = [Offer(name, modules[name.split("-")[0]], FLOOR, way, "") for name, (way, _) in others.items()]
    own = {"kvxfer-ucx-tcp": [100, 100, 80], "kvxfer-ucx-cma": [41, 41, 41], "kvxfer-ucx-mapped": [31, 30, 29]}

    def compare(title: str, job: Any, chosen: list[Any], _: int, anew: bool) -> Comparison:
        assert anew == ("tcp" not in title)
        assert {offer.transport for offer in chosen} == {"tcp" if "tcp" in title else "memory"}
        ns = own | {name: taken for name, (_, taken) in others.items()}
        return Comparison(title, job, [Measured(offer, 1, 0, 0, ns[offer.name]) for offer in chosen])

    run: Any = SimpleNamespace(
        offers=[ours, *offers], offered=lambda _: ours, compare=compare, megabytes=lambda op, _: _small(op), goals=[]
    )
    monkeypatch.setattr(case, "_around_ucx", lambda *_: None)
    case.measure(run)
    goals = {goal.what: goal for goal in run.goals if isinstance(goal, Goal)}
    assert len(goals) == len(run.goals) == 7
    reached = {what.split(" ÷ ")[0]: goal for what, goal in goals.items() if "bare" in what}
    assert reached["ucx, tcp, push"].ratios == [0.9, 0.9, 90 / 80]
    assert not reached["ucx, tcp, push"].met
    assert np.isclose(reached["ucx, cma, push"].reached, 40 / 41)
    assert reached["ucx, cma, push"].met
    assert np.allclose(reached["ucx, mapped, push"].ratios, [30 / 31, 1, 30 / 29])
    nixl = {what: goal for what, goal in goals.items() if "NIXL" in what}
    assert [goal.met for goal in nixl.values()] == [True, False]  # 1.5 times as fast: enough of a write, not of a read
