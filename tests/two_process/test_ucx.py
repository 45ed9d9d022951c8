"""Backend ucx in two real processes: which UCX it takes, what UCX says carried the bytes, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer import _native

from .processes import Place
from .test_faults import LONG, ends, kill_decode_worker, kill_prefill_worker

pytestmark = pytest.mark.skipif(not _native.present("ucx"), reason="no UCX here")

UCX = ("--backend", "ucx")


def rows(place: Place, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    place.environment |= environment
    done = place.bench(*UCX, "--json", "-", *arguments)
    assert done.status == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["results"]
    return found


def test_its_library_and_settings_are_in_the_result(place: Place) -> None:
    push, pull = rows(place, "--op", "both", UCX_TLS="rc,tcp", UCX_RNDV_THRESH="300000")
    assert push["transport"] == pull["transport"] == "tcp/lo"  # no RDMA device carries a loopback address
    assert Path(push["library"]["path"]).name.startswith("libucp")
    details = pull["library"]["details"]
    assert (details["UCX_TLS"], details["UCX_RNDV_THRESH"]) == ("rc,tcp", "300000")
    assert (details["errors"], details["pull"]) == ("peer", "put by the target, when asked")


def test_without_watching_the_peer_it_uses_memory(place: Place) -> None:
    (row,) = rows(place, "--backend-option", "ucx.errors=none", "--ucx-endpoints", "2")
    assert row["options"] == {"errors": 1, "endpoints": 2}
    assert row["library"]["details"]["errors"] == "none"
    assert row["scope"] == ("host" if row["transport"].endswith("/memory") else "loopback")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"KVXFER_UCX_LIBRARY": "/nowhere/libucp.so.0"}, "/nowhere/libucp.so.0: there is no such file"),
        ({"KVXFER_UCX_LIBRARY": "/proc/self/exe"}, "UCX cannot be loaded"),
        ({"KVXFER_UCX_LIBRARY": _native.__file__}, "is no UCX that can be used: it has no ucp_"),
        ({"UCX_TLS": "no_such"}, "UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES)"),
    ],
    ids=["missing", "no_library", "another_library", "no_transport"],
)
def test_a_ucx_that_cannot_be_used(place: Place, environment: dict[str, str], says: str) -> None:
    place.environment |= environment
    place.bench(*UCX).failed(3, says)


def test_another_transport_than_the_required_one(place: Place) -> None:
    done = place.bench(*UCX, "--require-transport", "rc", "--quiet")
    done.failed(3, "tcp/lo carried the bytes", "--require-transport wants rc")


@pytest.mark.parametrize("errors", ["peer", "none"])
@pytest.mark.parametrize(
    ("op", "victim"), [("push", kill_decode_worker), ("pull", kill_prefill_worker)], ids=["push", "pull"]
)
def test_a_worker_killed_while_bytes_move(place: Place, errors: str, op: str, victim: Any) -> None:
    server = place.serve()
    options = ("--backend-option", f"ucx.errors={errors}", "--op", op, "--tokens", "20000")
    bench = place.start_bench("--peer", server.address, *UCX, *options, *LONG, terminal=True)
    bench.says(" samples", times=3)
    ends(place, bench, server, victim).failed(5, "worker was killed by SIGKILL")
    server.says("the run is over")
    place.serves(server, *UCX)
