"""Where data connections may go: nowhere but to a port, or to a socket of ours without a file."""

from __future__ import annotations

import pytest

from kvxfer.errors import PeerLostError
from kvxfer.measure.endpoint import reachable

OURS = "unix:@kvxfer-0123456789abcdef"


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("10.0.0.2:7421", "10.0.0.2:7421"),
        ("[fd00::2]:7421", "[fd00::2]:7421"),
        ("forwarder.example:1", "forwarder.example:1"),
        ("0.0.0.0:7421", "peer:7421"),
        ("[::]:7421", "peer:7421"),
        ("", ""),
    ],
)
def test_of_a_backend_that_crosses_hosts(endpoint: str, reached: str) -> None:
    assert reachable(endpoint, "peer", one_host=False) == reached


def test_of_a_backend_of_one_host() -> None:
    assert reachable(OURS, "peer", one_host=True) == OURS


@pytest.mark.parametrize(
    ("endpoint", "one_host"),
    [
        ("unix:/run/docker.sock", True),
        ("unix:@", True),
        ("unix:@/tmp/.X11-unix/X0", True),
        ("unix:@kvxfer-", True),
        ("unix:@kvxfer-/../x", True),
        (OURS + "\n", True),
        ("unix:kvxfer-0123", True),
        ("/run/docker.sock", True),
        ("127.0.0.1:22", True),
        (OURS, False),
        ("unix:/run/docker.sock", False),
        ("unix:22", False),
        ("/run/docker.sock", False),
        ("host", False),
        (":22", False),
        ("host:", False),
        ("host:0", False),
        ("host:65536", False),
        ("host:1x", False),
        ("fd00::2:7421", False),
    ],
)
def test_anything_else_is_refused(endpoint: str, one_host: bool) -> None:
    with pytest.raises(PeerLostError, match="no endpoint of this backend"):
        reachable(endpoint, "peer", one_host)
