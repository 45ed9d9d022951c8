"""Two network namespaces joined by a veth pair: two hosts on a link whose rate is known, made by the test alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# From the ranges for tests between network devices (RFC 2544) and for private use. They exist in the two namespaces
# only, so that any number of test runs may use them side by side.
ADDRESSES = {"prefill": "198.18.0.1", "decode": "198.18.0.2"}
ADDRESSES_6 = {"prefill": "fd00:198:18::1", "decode": "fd00:198:18::2"}

ETHERNET_HEADER = 14
IP_AND_TCP = 20 + 20 + 12
"""Headers inside the MTU; 12 is TCP's timestamp option, which Linux sends unless told otherwise."""

BURST_S = 0.005
"""A token bucket that is full lets so many seconds of its rate pass at once: more than a tick of the kernel's clock (so
that the rate is kept), and little beside a transfer of half a second."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Shape:
    """The rate of a link. tbf counts a packet as the kernel sees it: MTU and Ethernet header, no preamble, no gap."""

    mbit: int
    mtu: int = 1500

    @property
    def bytes_s(self) -> float:
        return self.mbit * 1e6 / 8

    @property
    def burst_bytes(self) -> int:
        return round(self.bytes_s * BURST_S)

    @property
    def payload_share(self) -> float:
        """What a full TCP segment carries of what tbf counts for it: 1448 of 1514 bytes with an MTU of 1500."""
        return (self.mtu - IP_AND_TCP) / (self.mtu + ETHERNET_HEADER)

    @property
    def payload_bytes_s(self) -> float:
        return self.bytes_s * self.payload_share

    def seconds(self, payload_bytes: int) -> float:
        """What a transfer takes that keeps the link busy and finds the bucket empty."""
        return payload_bytes / self.payload_bytes_s

    def fewest_seconds(self, payload_bytes: int) -> float:
        """What it takes when it finds the bucket full. Nothing real is faster."""
        return (payload_bytes / self.payload_share - self.burst_bytes) / self.bytes_s


@dataclass
class Host:
    """One namespace and the end of the link in it."""

    side: str
    namespace: str
    interface: str
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return ADDRESSES[self.side]

    @property
    def address_6(self) -> str:
        return ADDRESSES_6[self.side]

    def inside(self, *command: str) -> list[str]:
        """The command, to be run on this host; the process has the pid that starting it returns."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host. It ends with the host at the latest."""
        self.started.append(subprocess.Popen(self.inside(*command), stdin=subprocess.DEVNULL, **options))
        return self.started[-1]

    def processes(self) -> set[int]:
        """The pids of all processes on this host."""
        return {int(pid) for pid in call(f"ip netns pids {self.namespace}").split()}

    def link(self, state: str) -> None:
        """Pull the cable out ("down") or put it in ("up")."""
        call(f"ip -n {self.namespace} link set {self.interface} {state}")

    def sent_bytes(self) -> int:
        """What has left through the shaped interface, as tbf counts it."""
        told = json.loads(call(f"tc -n {self.namespace} -s -j qdisc show dev {self.interface}"))
        return sum(int(qdisc["bytes"]) for qdisc in told if qdisc["kind"] == "tbf")

    def connections_begun(self) -> int:
        """How often a process on this host has asked for a TCP connection."""
        return self.tcp_counter("ActiveOpens")

    def tcp_counter(self, name: str) -> int:
        """One of the kernel's counters of this host's TCP, such as InCsumErrors."""
        names, values = (line.split() for line in self._read("/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
        return int(values[names.index(name)])

    def _read(self, path: str) -> str:
        return subprocess.run(self.inside("cat", path), capture_output=True, text=True, check=True).stdout

    def end(self) -> None:
        """Kill what runs here (all of it was started by this test) and remove the namespace."""
        for process in self.started:
            process.kill()
            process.wait()
        with contextlib.suppress(subprocess.CalledProcessError):  # there may be no namespace yet
            while left := self.processes():  # what those had started; a namespace goes with its last process
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            call(f"ip netns delete {self.namespace}")


@dataclass(frozen=True)
class Hosts:
    """Both hosts; prefill runs the bench, decode the server."""

    prefill: Host
    decode: Host
    shape: Shape

    def __iter__(self) -> Iterator[Host]:
        return iter((self.prefill, self.decode))


@contextlib.contextmanager
def unlinked_hosts(kind: str) -> Iterator[tuple[Host, Host]]:
    """Prefill and decode, whose interfaces of that kind are still to be made. Nothing of them is left."""
    name = f"kvxfer{os.getpid()}x{next(_numbers)}"
    prefill, decode = (Host(side, f"{name}{side}", f"{kind}-{side}") for side in ("prefill", "decode"))
    with contextlib.ExitStack() as stack:
        for host in (prefill, decode):
            stack.callback(host.end)
            call(f"ip netns add {host.namespace}")
            call(f"ip -n {host.namespace} link set lo up")
        yield prefill, decode


@contextlib.contextmanager
def two_hosts(shape: Shape) -> Iterator[Hosts]:
    """Two hosts on a link of this rate in both directions. Nothing of them is left, whatever happens."""
    with unlinked_hosts("veth") as (prefill, decode):
        call(
            f"ip link add {prefill.interface} netns {prefill.namespace} "
            f"type veth peer name {decode.interface} netns {decode.namespace}"
        )
        for host in (prefill, decode):
            _connect(host, shape)
        yield Hosts(prefill, decode, shape)


def _connect(host: Host, shape: Shape) -> None:
    on = f"-n {host.namespace}"
    call(f"ip {on} address add {host.address}/30 dev {host.interface}")
    call(f"ip {on} address add {host.address_6}/64 dev {host.interface} nodad")
    call(
        f"tc {on} qdisc add dev {host.interface} root tbf rate {shape.mbit}mbit burst {shape.burst_bytes} latency 50ms"
    )
    # BBR, which some systems choose, leaves a link idle now and then to probe it; reno fills it and is in every kernel.
    call(f"ip netns exec {host.namespace} sysctl -q -w net.ipv4.tcp_congestion_control=reno")
    call(f"ip {on} link set {host.interface} mtu {shape.mtu} up")


def call(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
