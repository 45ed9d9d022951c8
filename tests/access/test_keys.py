"""Who is let in at the control port, and that the others are told at once why not and what to do."""

from __future__ import annotations

import shutil

import pytest
from two_process.processes import Place

from kvxfer.control.channel import CONNECT_S

TOLD = "a run begins"


@pytest.mark.slow
def test_keys_admit_those_who_have_the_right_ones(place: Place) -> None:
    client_public, client_secret = place.keys("client")
    server_public, server_secret = place.keys("server")
    other_public, other_secret = place.keys("other")
    server = place.serve("--key", str(server_secret), "--allow", str(client_public.parent))
    peer = ("--peer", server.address)
    ours, pinned = ("--key", str(client_secret)), ("--server-key", str(server_public))

    for arguments, says in (
        ((*peer, "--key", str(other_secret), *pinned), ("refused our key", "--allow")),
        ((*peer, *ours, "--server-key", str(other_public)), ("another key than --server-key", ".key file")),
        (peer, ("wants keys (--key, --server-key)",)),
        ((*peer, *ours), ("--key and --server-key go together",)),
    ):
        done = place.bench(*arguments)
        done.failed(2, *says)
        assert done.seconds < CONNECT_S, "told when it is known, not when patience is over"
    assert TOLD not in server.err
    place.left_alone(server)
    place.serves(server, *ours, *pinned)


@pytest.mark.slow
def test_keys_where_the_server_has_none(place: Place) -> None:
    _, secret = place.keys("client")
    server_public, _ = place.keys("server")
    server = place.serve()
    done = place.bench("--peer", server.address, "--key", str(secret), "--server-key", str(server_public))
    done.failed(2)  # which of the two ends sees first that the other speaks another mechanism is chance
    assert "is a server without keys" in done.err or "another key than --server-key or none" in done.err
    assert done.seconds < CONNECT_S
    place.serves(server)


@pytest.mark.slow
def test_who_is_let_in_is_read_once(place: Place) -> None:
    """A key that is put into the directory later counts from the next start on."""
    client_public, client_secret = place.keys("client")
    server_public, server_secret = place.keys("server")
    late_public, late_secret = place.keys("late")
    server = place.serve("--key", str(server_secret), "--allow", str(client_public.parent))
    shutil.copy(late_public, client_public.parent)
    pinned = ("--server-key", str(server_public))
    place.bench("--peer", server.address, "--key", str(late_secret), *pinned).failed(2, "refused our key")
    place.serves(server, "--key", str(client_secret), *pinned)
