"""A cable is pulled: before a run, while it connects, and in the middle of a transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .commands import Bench, Files, Server, keys, peer, tokens_that_take, wait_until
from .two_hosts import Hosts

pytestmark = pytest.mark.slow

StartBench = Callable[..., Bench]

TOLD_WITHIN_S = 5
"""Until a lost peer is told (issue 2, section 6)."""

LONG_S = 8
"""A single request that takes so long is always caught in the middle."""


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_an_unreachable_peer_is_told(hosts: Hosts, files: Files, server: Server, bench: StartBench, end: str) -> None:
    getattr(hosts, end).link("down")
    done = bench(*peer(hosts), *keys(files)).wait()
    done.failed(5, f"cannot reach {hosts.decode.address}")
    assert done.seconds < 10


@pytest.mark.parametrize("end", ["prefill", "decode"])
@pytest.mark.parametrize("op", ["push", "pull"])
def test_a_link_cut_in_the_middle_of_a_transfer(
    hosts: Hosts, files: Files, server: Server, bench: StartBench, op: str, end: str
) -> None:
    tokens = str(tokens_that_take(LONG_S, hosts.shape.payload_bytes_s))
    running = bench("--op", op, "--tokens", tokens, *peer(hosts), *keys(files))
    wait_until(lambda: hosts.prefill.sent_bytes() > 10e6, 20, "the transfer is under way")
    getattr(hosts, end).link("down")

    done = running.wait(TOLD_WITHIN_S)
    done.failed(5, f"the decode side at {hosts.decode.address}", "has not answered for 3 s")
    assert [row["status"] for row in done.document["results"]] == ["error"]
    assert done.document["exit_status"] == 5

    server.wait_for_words("the run is over", TOLD_WITHIN_S)
    server.wait_until_alone(1)
    getattr(hosts, end).link("up")
    assert bench(*peer(hosts), *keys(files)).wait().status == 0
