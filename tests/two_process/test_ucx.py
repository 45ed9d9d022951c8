"""Backend ucx in two real processes: which UCX it takes, what UCX says carried the bytes, and faults."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer import _native

from .processes import Place
from .test_faults import LONG, ends, kill_decode_worker, kill_prefill_worker

pytestmark = pytest.mark.skipif(not _native.present("ucx"), reason="no UCX here")

UCX = ("--backend", "ucx")


SYSTEM_UCX = Path(f"/usr/lib/{platform.machine()}-linux-gnu/libucp.so.0")
"""Of another version than the headers of this build, which are those of the package."""

ANOTHER_VERSION = """
extern "C" void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {{
  *major = {}, *minor = {}, *release = 0;
}}
"""
"""All that this library has."""


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


def test_settings_with_which_ucx_moves_nothing(place: Place) -> None:
    """1.22 takes them, wires up, and refuses every put."""
    place.environment["UCX_PROTO_ENABLE"] = "n"
    done = place.bench(*UCX)
    if done.status == 0:
        pytest.skip("this UCX can")
    done.failed(5, "UCX cannot put or get pieces as it is set (UCX_...): Unsupported operation")


def test_without_watching_the_peer_it_uses_memory(place: Place) -> None:
    (row,) = rows(place, "--backend-option", "ucx.errors=none", "--ucx-endpoints", "2")
    assert row["options"] == {"errors": 1, "endpoints": 2}
    assert row["library"]["details"]["errors"] == "none"
    assert row["scope"] == ("host" if row["transport"].endswith("/memory") else "loopback")


@pytest.mark.parametrize(
    ("options", "transport", "protocol"),
    [
        (("pool=ucx",), "posix/memory", "put "),
        (("pool=mapped",), "tcp/lo", "put zero-copy"),
        (("pull=get",), "posix/memory", "get software emulation"),
    ],
    ids=["its own pool", "memory that it cannot map", "gets made of messages"],
)
def test_the_transport_is_that_of_the_requests(
    place: Place, options: tuple[str, ...], transport: str, protocol: str
) -> None:
    """Of several lanes. Which one depends on the memory, and on who moves the pieces: here prefill, or decode."""
    chosen = [word for one in ("errors=none", *options) for word in ("--backend-option", f"ucx.{one}")]
    (pull,) = rows(place, "--op", "pull", *chosen, UCX_TLS="posix,tcp")
    if "protocol" not in pull["library"]["details"]:
        pytest.skip("this UCX does not tell how a request goes")
    assert pull["transport"] == transport
    assert pull["library"]["details"]["protocol"].startswith(protocol)
    assert pull["library"]["warning"] == ""


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"KVXFER_UCX_LIBRARY": "/nowhere/libucp.so.0"}, "/nowhere/libucp.so.0: there is no such file"),
        ({"KVXFER_UCX_LIBRARY": "/proc/self/exe"}, "UCX cannot be loaded"),
        ({"KVXFER_UCX_LIBRARY": _native.__file__}, "is no UCX that can be used: it has no ucp_"),
        (
            {"UCX_TLS": "no_such"},
            "UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES; it has self,tcp,",
        ),
        (
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx5_7:1"},
            "UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES",
        ),
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, "do UCX_TLS and UCX_NET_DEVICES leave it that"),
        ({"UCX_TLS": "posix,cma"}, "do UCX_TLS and UCX_NET_DEVICES leave it that"),
    ],
    ids=[
        "missing",
        "no_library",
        "another_library",
        "no_transport",
        "no_device",
        "not_its_device",
        "no_way_to_connect",
    ],
)
def test_a_ucx_that_cannot_be_used(place: Place, environment: dict[str, str], says: str) -> None:
    place.environment |= environment
    place.bench(*UCX).failed(3, says)


def test_the_library_that_was_named_is_the_one_that_is_loaded() -> None:
    """A bare name is a file here, not one of the system's."""
    library = Path(_native.probe("ucx").library_path)
    asks = "from kvxfer import _native; print(_native.probe('ucx').library_path)"
    environment = os.environ | {"KVXFER_UCX_LIBRARY": library.name}
    found = subprocess.run(
        [sys.executable, "-c", asks], cwd=library.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == library


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++")
@pytest.mark.parametrize(
    ("version", "says"),
    [
        ((1, 12), "is UCX 1.12.0, and it takes 1.13 or a later 1.x: earlier ones have no client ids, which tell"),
        ((2, 0), "is UCX 2.0.0, and it takes 1.13 or a later 1.x"),
        ((1, 22), "is no UCX that can be used: it has no ucp_get_version_string"),
    ],
    ids=["too old", "too new", "without a function"],
)
def test_a_ucx_of_another_version(place: Place, version: tuple[int, int], says: str) -> None:
    """Refused by its number, whatever else it lacks; `doctor` tells the same."""
    library = place.directory / "libucp.so.0"
    source = ANOTHER_VERSION.format(*version)
    compiler = ["g++", "-x", "c++", "-", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    place.environment["KVXFER_UCX_LIBRARY"] = str(library)
    place.bench(*UCX).failed(3, f"{library} {says}")
    told = json.loads(place.start("kvxfer.doctor", "--json", "-").wait().out)
    (ucx,) = (one for one in told["backends"] if one["name"] == "ucx")
    assert not ucx["available"]
    assert f"{library} {says}" in ucx["why_not"]


@pytest.mark.skipif(not SYSTEM_UCX.exists(), reason="no UCX of the system's")
def test_a_ucx_of_another_version_than_the_headers(place: Place) -> None:
    """What it has not (1.13 tells no transports when asked) is found out in another way."""
    for row in rows(place, "--op", "both", KVXFER_UCX_LIBRARY=str(SYSTEM_UCX)):
        assert row["library"]["path"] == str(SYSTEM_UCX)
        assert (row["transport"], row["verified"]) == ("tcp/lo", "full")


@pytest.mark.slow
@pytest.mark.skipif(not SYSTEM_UCX.exists(), reason="no UCX of the system's")
def test_sides_with_a_ucx_of_their_own(place: Place) -> None:
    """They may understand each other, or not; then it is said what to do."""
    server = place.serve()
    place.environment["KVXFER_UCX_LIBRARY"] = str(SYSTEM_UCX)
    done = place.bench(*UCX, "--peer", server.address)
    del place.environment["KVXFER_UCX_LIBRARY"]
    if done.status == 0:
        assert "the libraries of the two sides differ" in done.err
    else:
        done.failed(3, "do both sides use the same version of UCX")
    place.serves(server, *UCX)


def test_a_ucx_without_verbs_that_is_asked_for_them(place: Place) -> None:
    """As the package's is: it says what it has, and moves nothing in another way."""
    has = _native.probe("ucx").transports
    if "ib" in has.split(","):
        pytest.skip("this UCX has verbs, so what it is asked for may be there; the wheel's has none")
    place.environment["UCX_TLS"] = "rc"
    place.bench(*UCX).failed(3, f"UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES; it has {has})")


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
