"""Which backends reach the peer, what their rows' bytes go through, and whose pools fit into memory at once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvxfer.cache.spec import CacheSpec
from kvxfer.control.messages import HostInfo
from kvxfer.cost.assumptions import Assumptions
from kvxfer.errors import UnavailableError
from kvxfer.measure.hosts import Hosts, scope_of_all
from kvxfer.measure.request import Effort, Row
from kvxfer.measure.run import Outcome, Request, measure, require_transport, result, within_reach
from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

HERE = HostInfo("here", "6.1", "cpu", 2, 1 << 34, 32 << 20, "boot", "net:[1]", "3.11")
SAME = Hosts(HERE, HERE, 1 << 33, 1 << 33, "127.0.0.1")
ELSEWHERE = {
    "another machine": replace(SAME, there=HostInfo("there", "6.1", "cpu", 2, 1 << 34, 0, "other", "net:[1]", "3.11")),
    "another namespace": replace(SAME, there=HostInfo("here", "6.1", "cpu", 2, 1 << 34, 0, "boot", "net:[2]", "3.11")),
}
SPEC = CacheSpec(load_model("8b"), resolve_dtype("bf16"), 16, 1)


def request(*backends: str, leave_out: bool = False, tokens: int = 64) -> Request:
    rows = [Row(spec=SPEC, backend=backend, op="push", tokens=tokens) for backend in backends]
    return Request(rows, Effort(), Assumptions(), [], leave_out=leave_out)


def test_on_one_host_every_backend_reaches_the_peer() -> None:
    asked = request("tcp", "shm", "cma")
    assert within_reach(asked, SAME, ["tcp"]) is asked
    assert [SAME.scope_of(row) for row in asked.rows] == ["loopback", "host", "host"]


def test_the_scope_of_a_run_is_the_farthest_of_its_rows() -> None:
    assert scope_of_all(["host", "host"]) == "host"
    assert scope_of_all(["host", "loopback"]) == "loopback"
    assert scope_of_all(["host", "network"]) == "network"


@pytest.mark.parametrize("hosts", [SAME, *ELSEWHERE.values()], ids=["one host", *ELSEWHERE])
def test_what_memory_carried_went_through_the_host(hosts: Hosts) -> None:
    (row,) = request("ucx").rows
    beyond = "loopback" if hosts.same else "network"
    assert hosts.scope_of(row, "posix/memory") == hosts.scope_of(row, "cma/memory+sysv/memory") == "host"
    assert hosts.scope_of(row, "tcp/lo") == hosts.scope_of(row, "posix/memory+tcp/lo") == hosts.scope_of(row) == beyond


@pytest.mark.parametrize("status", ["ok", "error"])
def test_a_result_has_one_scope_of_what_memory_carried(status: str) -> None:
    asked = request("ucx")
    row = {"id": asked.rows[0].id, "status": "error", "backend": "ucx"} | (
        {"transport": "posix/memory"} if status == "ok" else {}
    )
    told = result(asked, SAME, Outcome(rows=[row]))
    scope = "host" if status == "ok" else "loopback"
    assert told["results"][0]["scope"] == told["scope"] == scope
    assert any(f"on this host ({scope})" in notice for notice in told["notices"])


def test_a_transport_that_was_asked_for_has_to_carry_every_lane() -> None:
    (row,) = request("ucx").rows
    require_transport(row, "rc_mlx5/mlx5_0:1", "rc")
    require_transport(row, "tcp/lo", "")
    with pytest.raises(UnavailableError, match="tcp/lo carried the bytes, and --require-transport wants rc"):
        require_transport(row, "rc_mlx5/mlx5_0:1+tcp/lo", "rc")


@pytest.mark.parametrize("hosts", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_backend_of_one_host_that_was_asked_for_by_name_is_an_error(hosts: Hosts) -> None:
    with pytest.raises(UnavailableError, match=r"backend shm moves bytes within one host .* such as tcp"):
        within_reach(request("tcp", "shm"), hosts, ["tcp", "shm"])


@pytest.mark.parametrize("hosts", ELSEWHERE.values(), ids=ELSEWHERE)
def test_of_all_backends_those_that_do_not_reach_are_left_out(hosts: Hosts) -> None:
    left = within_reach(request("tcp", "shm", "cma", leave_out=True), hosts, ["tcp", "shm"])
    assert [row.backend for row in left.rows] == ["tcp"]
    with pytest.raises(UnavailableError, match="no backend that can be used here reaches the peer"):
        within_reach(request("shm", "cma", leave_out=True), hosts, ["tcp", "shm", "cma"])


def test_of_all_backends_those_that_the_peer_lacks_are_left_out() -> None:
    left = within_reach(request("tcp", "shm", "cma", leave_out=True), SAME, ["tcp", "shm", "null"])
    assert [row.backend for row in left.rows] == ["tcp", "shm"]


class Order:
    """Stands for what measures a group: remembers which rows came together."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def __call__(self, session: object, group: list[Row], *_: object) -> None:
        self.groups.append([row.backend for row in group])


@pytest.mark.parametrize(("gib", "groups"), [(6, [["tcp", "shm", "cma"]]), (2, [["tcp"], ["shm"], ["cma"]])])
def test_pools_that_do_not_fit_at_once_are_measured_one_after_another(
    monkeypatch: pytest.MonkeyPatch, gib: int, groups: list[list[str]]
) -> None:
    """A request of 4096 tokens is half a GiB, so a row's two pools take one."""
    hosts = replace(SAME, usable_here=gib << 30, usable_there=gib << 30)
    monkeypatch.setattr(Hosts, "with_memory_now", lambda self: self)
    order, outcome = Order(), Outcome()
    monkeypatch.setattr("kvxfer.measure.run._measure_group", order)
    measure(None, request("tcp", "shm", "cma", tokens=4096), hosts, outcome, print)  # type: ignore[arg-type]
    assert order.groups == groups
    told = [notice for notice in outcome.notices if "one after another" in notice]
    assert len(told) == (1 if len(groups) > 1 else 0)


def test_a_row_that_does_not_fit_by_itself_is_an_error() -> None:
    hosts = replace(SAME, usable_here=1 << 29, usable_there=1 << 29)
    with pytest.raises(UnavailableError, match="not enough memory: 4096 tokens"):
        measure(None, request("tcp", "shm", tokens=4096), hosts, Outcome(), print)  # type: ignore[arg-type]


def test_of_all_backends_those_of_one_user_are_left_out_between_two() -> None:
    """By name it is tried, since the kernel may allow it: root may read everyone's memory."""
    hosts = replace(SAME, here=replace_uid(HERE, 0), there=replace_uid(HERE, 54321))
    left = within_reach(request("tcp", "shm", "cma", leave_out=True), hosts, ["tcp", "shm", "cma"])
    assert [row.backend for row in left.rows] == ["tcp", "shm"]
    asked = request("cma")
    assert within_reach(asked, hosts, ["cma"]) is asked
    with pytest.raises(UnavailableError, match="no backend that can be used here reaches the peer"):
        within_reach(request("cma", leave_out=True), hosts, ["cma"])


def replace_uid(info: HostInfo, uid: int) -> HostInfo:
    return msgspec.structs.replace(info, uid=uid)
