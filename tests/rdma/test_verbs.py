"""`kvxfer bench --backend ucx` over the verbs of a real (if emulated) RDMA device, and what it does when that fails."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .guest.cases import Ran
from .packages import NIXL_FOLDER, NIXL_LIBRARIES, SYSTEM_UCX

pytestmark = pytest.mark.slow

MTU = 4096
"""Of rxe0: what a packet carries at most."""

TOLD_WITHIN_S = 30
"""By the guest's clock. A peer that died is told in seconds; what hangs, hangs for good."""


def refused(ran: Ran, status: int, *says: str) -> None:
    """Assert the exit status, and one clear error that says this."""
    assert ran.status == status, ran
    assert ran.err.count("kvxfer bench: error: ") == 1, ran
    assert "Traceback" not in ran.err, ran
    for words in says:
        assert words in ran.err, ran


def test_all_bytes_arrive_over_verbs(ran: Callable[[str], Ran]) -> None:
    moved = ran("verbs")
    assert moved.status == 0, moved.err
    rows = moved.document["results"]
    assert [(row["dtype"], row["op"]) for row in rows] == [
        ("bf16", "push"),
        ("bf16", "pull"),
        ("fp8_e4m3", "push"),
        ("fp8_e4m3", "pull"),
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert row["verified"] == "full"
        assert row["verified_bytes"] == 2 * row["bytes"]  # the first request and the last


def test_the_result_names_the_device(ran: Callable[[str], Ran]) -> None:
    for row in ran("verbs").document["results"]:
        for lane in row["transport"].split("+"):
            assert lane.startswith("rc_verbs/rxe0"), row["transport"]
        assert row["library"]["path"] == str(SYSTEM_UCX)


def test_the_device_is_found_without_any_setting(ran: Callable[[str], Ran]) -> None:
    plain = ran("plain")
    assert plain.status == 0, plain.err
    (row,) = plain.document["results"]
    assert "rxe0" in row["transport"]
    assert plain.sent >= row["bytes"] * (1 + len(row["samples_ns"])) // MTU


def test_the_device_counted_all_bytes(ran: Callable[[str], Ran]) -> None:
    """Both ends are this device, so each packet is sent and received; acknowledgements come on top."""
    moved = ran("verbs")
    least = sum(row["bytes"] * (1 + len(row["samples_ns"])) for row in moved.document["results"]) // MTU
    assert moved.sent >= least > 0
    assert moved.received >= least


@pytest.mark.parametrize("name", ["push, decode killed", "pull, prefill killed"])
def test_a_peer_killed_in_mid_transfer_is_told(ran: Callable[[str], Ran], name: str) -> None:
    killed = ran(name)
    assert killed.struck, killed
    refused(killed, 5)
    assert killed.seconds < TOLD_WITHIN_S


def test_memory_that_may_not_be_registered(ran: Callable[[str], Ran]) -> None:
    refused(ran("too little memlock"), 3, "ulimit -l")


def test_a_device_that_is_not_there(ran: Callable[[str], Ran]) -> None:
    refused(ran("wrong device"), 3, "UCX_NET_DEVICES")


def test_a_ucx_without_verbs_does_not_pass_for_rdma(ran: Callable[[str], Ran]) -> None:
    """It moves the bytes by tcp; who asked for rc is told. That it has no verbs is told in any case."""
    refused(
        ran("wheel"), 3, "--require-transport wants rc", "tcp/", "warning: ", "built without verbs: it will use TCP"
    )


def test_the_ucx_that_nixl_brings_is_chosen_where_the_systems_has_no_verbs(ran: Callable[[str], Ran]) -> None:
    """By itself, with the system's libibverbs. Its own would find no device, and end the process with a crash."""
    moved = ran("bundled")
    assert moved.status == 0, moved.err
    assert moved.err == ""
    push, pull = moved.document["results"]
    for row in (push, pull):
        assert row["verified"] == "full"
        assert row["transport"] == "rc_verbs/rxe0:1"
        assert row["library"]["path"].startswith(f"{NIXL_FOLDER / NIXL_LIBRARIES}/libucp-")
        assert row["library"]["warning"] == ""
    least = sum(row["bytes"] * (1 + len(row["samples_ns"])) for row in (push, pull)) // MTU
    assert moved.sent >= least > 0
    assert moved.received >= least


def test_the_ucx_that_nixl_brings_is_left_alone_without_libibverbs(ran: Callable[[str], Ran]) -> None:
    doctor = ran("no libibverbs")
    assert doctor.status == 0, doctor.err
    (ucx,) = (one for one in json.loads(doctor.out)["backends"] if one["name"] == "ucx")
    assert ucx["available"]
    assert not ucx["library_path"].startswith(str(NIXL_FOLDER))
    for words in ("was built without verbs", str(NIXL_FOLDER), "the system has no libibverbs.so.1"):
        assert words in ucx["warning"]
