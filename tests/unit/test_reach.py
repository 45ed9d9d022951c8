"""Which backends reach the peer, what their rows' bytes go through, and whose pools fit into memory at once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvxfer.cache.spec import CacheSpec
from kvxfer.control.messages import HostInfo
from kvxfer.cost.assumptions import Assumptions
from kvxfer.errors import UnavailableError
from kvxfer.measure.hosts import Hosts
from kvxfer.measure.request import Effort, Row
from kvxfer.measure.run import Outcome, Request, measure, within_reach
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


def test_the_scope_of_a_run_is_that_of_its_rows_or_loopback() -> None:
    assert SAME.scope(request("shm", "cma").rows) == "host"
    assert SAME.scope(request("tcp").rows) == "loopback"
    assert SAME.scope(request("shm", "tcp").rows) == "loopback"
    assert ELSEWHERE["another machine"].scope(request("tcp").rows) == "network"


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
