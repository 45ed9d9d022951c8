"""Two hosts whose link is this process: each packet that one of them sends is read here, and given to the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from .two_hosts import Host, call, unlinked_hosts

_NODE = Path("/dev/net/tun")
_NUMBER = os.makedev(10, 200)
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_IFREQ = struct.Struct("16sH22x")

MTU = 9000
"""A request of some KiB is a few packets, so that every one of a run can have its turn."""


def open_tun() -> tuple[int, str]:
    """A new device that lives as long as its descriptor (which does not block), and its name. Raises OSError."""
    if not _NODE.exists():
        _NODE.parent.mkdir(exist_ok=True)
        os.mknod(_NODE, stat.S_IFCHR | 0o600, _NUMBER)
    descriptor = os.open(_NODE, os.O_RDWR | os.O_NONBLOCK)
    try:
        request = fcntl.ioctl(descriptor, _TUNSETIFF, _IFREQ.pack(b"kvxfer%d", _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    name, _ = _IFREQ.unpack(request)
    return descriptor, name.rstrip(b"\0").decode()


@contextlib.contextmanager
def tun_hosts() -> Iterator[tuple[tuple[Host, int], tuple[Host, int]]]:
    """Prefill and decode, each with the descriptor of its end of the link: read is what it sends, written what it gets.

    Nothing of them is left, whatever happens.
    """
    with unlinked_hosts("tun") as (prefill, decode), contextlib.ExitStack() as stack:
        ends = []
        for host, peer in ((prefill, decode), (decode, prefill)):
            descriptor, name = open_tun()
            stack.callback(os.close, descriptor)
            call(f"ip link set {name} netns {host.namespace} name {host.interface}")
            call(f"ip netns exec {host.namespace} sysctl -q -w net.ipv6.conf.all.disable_ipv6=1")
            call(f"ip -n {host.namespace} address add {host.address} peer {peer.address} dev {host.interface}")
            call(f"ip -n {host.namespace} link set {host.interface} mtu {MTU} up")
            ends.append((host, descriptor))
        yield ends[0], ends[1]
