"""bench/peers: what it makes of wrong bytes and of contenders that fail, and the whole of it at small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PEERS = Path(__file__).parents[2] / "bench" / "peers"
RUN_S = 1200
GOALS = 17
"""With two of our backends, tcp and null; every further one adds what a descriptor costs it."""


@pytest.fixture(scope="module")
def peers() -> Iterator[None]:
    """The modules of bench/peers can be imported."""
    sys.path.insert(0, str(PEERS))
    yield
    sys.path.remove(str(PEERS))


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("op", ["push", "pull"])
def test_pieces_in_the_wrong_place_are_counted(op: str) -> None:
    import pool
    from jobs import scattered

    job = scattered(op, 4096, 2, 8)
    source, target = pool.Pool(job.pool_bytes), pool.Pool(job.pool_bytes)
    pool.fill(source.address, source.bytes)
    assert pool.wrong_pieces(job, 3, target.address) == job.descriptors
    request = job.request(3)
    pieces = list(zip(job.offsets(request, "prefill"), job.offsets(request, "decode"), strict=True))
    here, there = (pool.seen(one.address, one.bytes) for one in (source, target))
    for prefill, decode in pieces:
        there[int(decode) :][:4096] = here[int(prefill) :][:4096]
    assert pool.wrong_pieces(job, 3, target.address) == 0
    first, second = (there[int(decode) :][:4096] for _, decode in pieces[:2])
    first[:], second[:] = second.copy(), first.copy()
    assert pool.wrong_pieces(job, 3, target.address) == 2


@pytest.mark.usefixtures("peers")
def test_requests_rotate_over_enough_memory_to_be_cold() -> None:
    from jobs import COLD, scattered

    from kvxfer.measure.host import last_level_cache_bytes

    job = scattered("push", 64 << 10, 4, 1)
    assert job.pool_bytes >= COLD * last_level_cache_bytes()
    used = [tuple(job.offsets(request, "decode").tolist()) for request in job.requests]
    assert len(set(used)) == len(used)


@pytest.mark.usefixtures("peers")
def test_a_contender_that_fails_is_named_with_its_reason() -> None:
    from jobs import scattered
    from offer import MOVES, Offer
    from pair import ContenderError, OursFailedError, Pair

    job = scattered("push", 4096, 1, 4)
    with pytest.raises(ContenderError, match=r"thing: prefill failed: ModuleNotFoundError: .*no_such_module"):
        Pair(Offer("thing", "no_such_module", MOVES, "tcp", ""), job)
    broken = Offer("kvxfer-none", "kvxfer_backends", MOVES, "tcp", "", options={"backend": "none"})
    with pytest.raises(OursFailedError, match=r"kvxfer-none: .*none"):
        Pair(broken, job)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("anew", [False, True])
def test_a_contender_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from environment import Environment
    from jobs import scattered
    from offer import MOVES, Offer
    from pair import Pair
    from rounds import compare

    environment = Environment(tmp_path)
    broken = Offer("thing", "no_such_module", MOVES, "tcp", "")
    ours = Offer("kvxfer-tcp", "kvxfer_backends", MOVES, "tcp", "", options={"backend": "tcp"})
    begun: list[str] = []

    def start(pair: Pair) -> None:
        begun.append(pair.offer.name)
        starts(pair)

    starts = Pair._start
    monkeypatch.setattr(Pair, "_start", start)
    found = compare("both", scattered("pull", 4096, 2, 4), [broken, ours], 3, 2, environment, anew)
    assert begun == ["thing", "kvxfer-tcp"] + ["kvxfer-tcp"] * (3 if anew else 0)
    assert [row.offer.name for row in found.rows] == ["kvxfer-tcp"]
    assert [one.name for one in environment.left_out] == ["thing in both"]
    row = found.rows[0]
    assert len(row.ns) == len(row.initiator_cpu_ns) == len(row.target_cpu_ns) == 3
    assert min(row.ns) > 0


@pytest.mark.usefixtures("peers")
def test_a_backend_with_other_options_is_a_contender_of_its_own(tmp_path: Path) -> None:
    import contenders.kvxfer_backends as ours
    from environment import Environment
    from jobs import scattered
    from pair import OursFailedError, started

    environment = Environment(tmp_path, [("tcp", {"connections": 3}), ("tcp", {"connections": 0})])
    offers = {offer.name: offer for offer in ours.offers(environment)}
    with started(offers["kvxfer-tcp:connections=3"], scattered("push", 4096, 2, 4)) as pair:
        assert [len(lanes) for lanes in pair.call("describe")] == [3, 3]
    with pytest.raises(OursFailedError, match="connections=0"):
        started(offers["kvxfer-tcp:connections=0"], scattered("push", 4096, 2, 4)).__enter__()


@pytest.mark.usefixtures("peers")
def test_a_goal_is_met_by_the_median_of_its_rounds() -> None:
    from goals import Goal

    assert Goal("", 2.0, True, [1.0, 2.0, 9.0]).met
    assert not Goal("", 2.0, True, [1.0, 1.9, 9.0]).met
    assert Goal("", 2.0, False, [1.0, 2.0, 9.0]).met
    assert not Goal("", 2.0, False, [1.0, 2.1, 2.2]).met


@pytest.mark.usefixtures("peers")
def test_ratios_are_those_of_one_round() -> None:
    from goals import Goal, Unanswered, faster
    from offer import MOVES, Offer
    from rounds import Measured

    offer = Offer("x", "x", MOVES, "tcp", "")
    ours, theirs = (Measured(offer, 1, 0, 0, ns) for ns in ([10, 20, 10], [30, 30, 40]))
    goal = faster("", 2.0, ours, theirs)
    assert isinstance(goal, Goal)
    assert np.allclose(goal.ratios, [3.0, 1.5, 4.0])
    assert isinstance(faster("", 2.0, ours, None), Unanswered)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of `make peers PEERS_ARGS=--quick`, once."""
    file = tmp_path_factory.mktemp("peers") / "peers.json"
    command = [sys.executable, PEERS, "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr + done.stdout
    record: dict[str, Any] = json.loads(file.read_text())
    return record


@pytest.mark.slow
def test_every_goal_is_answered_or_says_why_not(result: dict[str, Any]) -> None:
    assert len(result["goals"]) + len(result["unanswered"]) >= GOALS
    assert all(goal["reached"] > 0 for goal in result["goals"] if goal["unit"] != "ns")
    assert all(one["why"] for one in result["unanswered"] + result["left_out"])


@pytest.mark.slow
def test_tcp_moves_every_comparison(result: dict[str, Any]) -> None:
    comparisons = [one for one in result["comparisons"] if not one["title"].startswith("UCX")]
    assert len(comparisons) == 6
    for comparison in comparisons:
        names = [row["contender"] for row in comparison["rows"]]
        assert "kvxfer-tcp" in names
        assert len(names) > 1
        assert all(len(row["ns"]) == result["rounds"] for row in comparison["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["nixl-tcp", "nixl-shm", "mooncake-tcp", "iperf3-1", "ucx_perftest-tcp", "ucx_perftest-shm", "memcpy"],
)
def test_others_take_part(result: dict[str, Any], name: str) -> None:
    for one in result["left_out"]:
        if name.startswith(one["name"].split(" ")[0]):
            pytest.skip(f"{one['name']} was left out: {one['why']}")
    for op in ("push", "pull"):
        rows = {
            row["contender"]: row
            for comparison in result["comparisons"]
            if comparison["op"] == op
            for row in comparison["rows"]
        }
        assert min(rows[name]["ns"]) > 0
