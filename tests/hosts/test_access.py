"""Who may measure against a server of another host, and by which of its addresses it is reached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer import _native
from kvxfer.backend.probe import MEASURES_NOTHING, is_one_host, probe_all

from .commands import Bench, Files, Server, keys, peer, serving
from .two_hosts import Hosts

pytestmark = pytest.mark.slow

StartBench = Callable[..., Bench]


def test_a_stranger_is_refused_and_the_server_goes_on(
    hosts: Hosts, files: Files, server: Server, bench: StartBench
) -> None:
    bench(*peer(hosts), *keys(files, ours="stranger")).wait().failed(2, "refused our key", "--allow")
    assert "a run begins" not in server.said()
    assert bench(*peer(hosts), *keys(files)).wait().status == 0


def test_another_server_than_the_pinned_one_is_not_talked_to(
    hosts: Hosts, files: Files, server: Server, bench: StartBench
) -> None:
    bench(*peer(hosts), *keys(files, theirs="stranger")).wait().failed(2, "another key than --server-key")
    assert "a run begins" not in server.said()
    assert bench(*peer(hosts), *keys(files)).wait().status == 0


def test_another_host_is_not_spoken_to_without_keys(hosts: Hosts, server: Server, bench: StartBench) -> None:
    bench(*peer(hosts)).wait().failed(2, "is beyond this host, and that needs keys", "`kvxfer keys`")
    assert hosts.prefill.connections_begun() == 0
    assert "a run begins" not in server.said()


def test_the_required_transport_is_the_interface_of_the_link(
    hosts: Hosts, files: Files, server: Server, bench: StartBench
) -> None:
    link = f"tcp/{hosts.prefill.interface}"
    assert bench(*peer(hosts), *keys(files), "--require-transport", link).wait().status == 0
    done = bench(*peer(hosts), *keys(files), "--require-transport", "tcp/lo").wait()
    done.failed(3, f"{link} carried the bytes", "--require-transport wants tcp/lo")
    assert [row["status"] for row in done.document["results"]] == ["error"]


def test_backends_of_one_host_do_not_reach_another(
    hosts: Hosts, files: Files, server: Server, bench: StartBench
) -> None:
    """Two network namespaces are two hosts to them; it is said before anything is measured."""
    for backend in ("shm", "tcp,cma"):
        done = bench(*peer(hosts), *keys(files), "--backend", backend).wait()
        done.failed(3, "moves bytes within one host and network namespace", "use a backend that crosses hosts")
        assert done.document == {}
    done = bench(*peer(hosts), *keys(files), "--backend", "all").wait()
    assert done.status == 0, done.err
    crossing = [one.name for one in probe_all() if one.available and not is_one_host(one.name)]
    reach = [(name, "network") for name in crossing if name not in MEASURES_NOTHING]
    assert [(row["backend"], row["scope"]) for row in done.document["results"]] == reach


@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]", "address", "[address_6]"])
def test_every_address_to_listen_on_is_reached(
    hosts: Hosts, files: Files, bench: StartBench, tmp_path: Path, bind: str
) -> None:
    """A server that listens everywhere cannot tell its clients where: they use the address they know it by."""
    bind = bind.replace("address_6", hosts.decode.address_6).replace("address", hosts.decode.address)
    reached = f"[{hosts.decode.address_6}]" if ":" in bind else hosts.decode.address
    with serving(hosts, files, tmp_path / "serve.log", bind) as server:
        done = bench(*peer(hosts, reached), *keys(files)).wait()
        assert done.status == 0, (done.err, server.said())
    (row,) = done.document["results"]
    assert row["transport"] == f"tcp/{hosts.prefill.interface}"
    assert done.document["scope"] == "network"


@pytest.mark.skipif(not _native.present("ucx"), reason="no UCX here")
def test_ucx_is_reached_by_the_address_that_it_takes(
    hosts: Hosts, files: Files, bench: StartBench, tmp_path: Path
) -> None:
    """Of an interface with both that is the IPv4 one: by the other it is told so, where UCX would end the process."""
    by_ipv6 = f"[{hosts.decode.address_6}]"
    for bind, reached in (("0.0.0.0", hosts.decode.address), ("[::]", by_ipv6)):
        with serving(hosts, files, tmp_path / f"serve {reached}", bind):
            done = bench(*peer(hosts, reached), *keys(files), "--backend", "ucx").wait()
        if reached == by_ipv6:
            done.failed(3, "set UCX_TCP_AF_PRIO=inet6,inet on both sides")
        else:
            assert done.status == 0, done.err
            assert [row["transport"] for row in done.document["results"]] == [f"tcp/{hosts.prefill.interface}"]
