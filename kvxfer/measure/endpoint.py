"""Where the data connections go: what the decode side says of it, and how this host gets there."""

from __future__ import annotations

import re

from kvxfer.control.channel import split_host_port
from kvxfer.control.messages import LOCAL_ENDPOINT
from kvxfer.errors import PeerLostError, UsageError

LOCAL = re.compile(re.escape(LOCAL_ENDPOINT) + "@kvxfer-[0-9a-f]+")
"""A Unix socket in the kernel's abstract namespace, with a name that our backends give; never a file."""

EVERYWHERE = ("0.0.0.0", "[::]")


def reachable(endpoint: str, peer_host: str, one_host: bool) -> str:
    """The endpoint as this host reaches it: a server that listens everywhere does not know its name.

    Data of a backend of one host goes to an abstract Unix socket of ours only, that of others to host:port only; ""
    for a backend that does not connect. Raises PeerLostError on anything else.
    """
    if not endpoint or (one_host and LOCAL.fullmatch(endpoint)):
        return endpoint
    try:
        host, port = split_host_port(endpoint, "data endpoint")
    except UsageError:
        host, port = "", 0
    if one_host or not host or endpoint.startswith(LOCAL_ENDPOINT):
        raise PeerLostError(f"the decode side wants data at '{endpoint}', which is no endpoint of this backend")
    return f"{peer_host}:{port}" if host in EVERYWHERE else endpoint
