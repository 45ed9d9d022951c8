"""A link between two hosts that does one thing to one segment of what crosses it.

It knows TCP and nothing of what TCP carries, so that it does for every backend whose bytes cross a network. A segment
counts that is new on its connection (has a SYN, a FIN or bytes that were not sent before); acknowledgements alone and
what is sent again do not.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hosts.tun import tun_hosts
from hosts.two_hosts import Host

from .segments import ACK, FIN, RST, SYN, End, Segment, is_later, parsed

HOLD_S = 1.5
LATE_S = 0.5
"""Longer than TCP waits at first before it sends again."""

REPAIRED = ("lose", "twice", "late", "swap", "corrupt", "hold")
DESTROYING = ("reset", "end", "truncate", "cut", "unplug")

MOST_BYTES = 1 << 16  # of a packet


@dataclass(frozen=True)
class Rule:
    """What is done to the `nth` segment (from 0) of a direction, and to what follows it there.

    TCP makes good for: lose (it does not arrive), twice, late (after it was sent again), swap (it arrives after the
    next one of its connection), corrupt (a bit is another one, the checksum the old one), hold (it and all that follow
    arrive late, in order). Nothing makes good for: reset (an RST takes its place, and one goes to its sender), end (a
    FIN comes with it, and nothing of its connection comes after it that way), truncate (the same, with half of its
    bytes), cut (nothing of its connection passes from then on, either way), unplug (nothing at all does, for the rest
    of the run).
    """

    action: str
    nth: int
    up: bool = True  # from prefill to decode

    def __str__(self) -> str:
        return f"{self.action} segment {self.nth} {'up' if self.up else 'down'}"


class Way:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.next: int | None = None  # the number after all that has been sent
        self.closed = False  # nothing passes any more
        self.held: list[bytes] | None = None  # what waits, while this direction stands still
        self.follower: bytes | None = None  # what is to pass after the next one
        self.most_ack: int | None = None  # what the receiver got beyond it did not come from the sender

    def is_news(self, segment: Segment) -> bool:
        """Whether something of it has not been sent before; it has been from now on."""
        news = segment.length > 0 and (self.next is None or is_later(segment.end, self.next))
        if news:
            self.next = segment.end
        return news


class Connection:
    def __init__(self, run: int, first: int) -> None:
        self.run = run
        self.first = first  # the number of its SYN
        self.up, self.down = Way(), Way()

    def way(self, up: bool) -> Way:
        return self.up if up else self.down


class Link:
    """Carries packets from when it is entered on, and counts the segments of all connections but those of one port."""

    def __init__(self, prefill: tuple[Host, int], decode: tuple[Host, int]) -> None:
        """Hosts, and the descriptors of packets; these do not block, and stay their owner's."""
        self.prefill, self.decode = prefill[0], decode[0]
        self._descriptors = {True: prefill[1], False: decode[1]}  # by the direction of what comes out of them
        self.lock = threading.Lock()
        self._runs = 0
        self._connections: dict[tuple[End, End], Connection] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.begin(None, 0)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        self._thread.join()
        os.close(self._ended)

    def begin(self, rule: Rule | None, control_port: int) -> None:
        """What follows is another run: its own connections count, from 0 on, and the rule holds for them."""
        with self.lock:
            self._rule = rule
            self._control_port = control_port
            self._runs += 1
            self._unplugged = False
            self.sizes: dict[bool, list[int]] = {True: [], False: []}
            """Payload bytes of each segment that counted, by its direction."""
            self.struck = False
            """Whether there was the segment of the rule."""

    def mend(self) -> None:
        """An unplugged cable is put in again; connections that were cut stay so."""
        with self.lock:
            self._unplugged = False

    # --- the thread

    def _carry(self) -> None:
        while True:
            wait = max(0.0, self._later[0][0] - time.monotonic()) if self._later else None
            ready, _, _ = select.select([*self._descriptors.values(), self._ended], [], [], wait)
            if self._ended in ready:
                return
            with self.lock:
                for up, descriptor in self._descriptors.items():
                    if descriptor in ready:
                        with contextlib.suppress(BlockingIOError):
                            while True:
                                self._take(os.read(descriptor, MOST_BYTES), up)
                while self._later and self._later[0][0] <= time.monotonic():
                    heapq.heappop(self._later)[2]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    def _give(self, packet: bytes, up: bool) -> None:
        with contextlib.suppress(BlockingIOError):  # a full queue loses a packet, as links do
            os.write(self._descriptors[not up], packet)

    def _take(self, packet: bytes, up: bool) -> None:
        if self._unplugged:
            return
        segment = parsed(packet)
        connection = None if segment is None else self._connection_of(segment, up)
        if segment is None or connection is None:
            self._give(packet, up)
        elif not connection.way(up).closed:
            if action := self._counted(connection, segment, up):
                self.struck = True
                self._strike(action, connection, segment, packet, up)
            else:
                self._pass(connection, segment, packet, up)

    def _counted(self, connection: Connection, segment: Segment, up: bool) -> str | None:
        """What the rule has for it."""
        if not connection.way(up).is_news(segment) or connection.run != self._runs:
            return None
        number = len(self.sizes[up])
        self.sizes[up].append(len(segment.payload))
        rule = self._rule
        return rule.action if rule is not None and (rule.nth, rule.up) == (number, up) else None

    def _connection_of(self, segment: Segment, up: bool) -> Connection | None:
        """Nothing for the control connection, and for what belongs to none that we saw begin."""
        if self._control_port in (segment.source[1], segment.target[1]):
            return None
        ends = (segment.source, segment.target) if up else (segment.target, segment.source)
        known = self._connections.get(ends)
        begins = segment.flags & (SYN | ACK) == SYN
        if begins and (known is None or known.first != segment.seq):
            known = self._connections[ends] = Connection(self._runs, segment.seq)
        return known

    def _pass(self, connection: Connection, segment: Segment, packet: bytes, up: bool) -> None:
        """On, in the state in which this direction of the connection is."""
        way = connection.way(up)
        if way.most_ack is not None and is_later(segment.ack, way.most_ack):
            packet = segment.changed(ack=way.most_ack).bytes()
        if way.held is not None:
            way.held.append(packet)
            return
        self._give(packet, up)
        if way.follower is not None:
            self._give(way.follower, up)
            way.follower = None

    # --- what may happen

    def _strike(self, action: str, connection: Connection, segment: Segment, packet: bytes, up: bool) -> None:
        way, back = connection.way(up), connection.way(not up)
        if action == "twice":
            self._pass(connection, segment, packet, up)
            self._pass(connection, segment, packet, up)
        elif action == "late":
            self._after(LATE_S, lambda: self._pass(connection, segment, packet, up))
        elif action == "swap":
            way.follower = packet
        elif action == "corrupt":
            self._give(_corrupted(packet, segment), up)
        elif action == "hold":
            way.held = [packet]
            self._after(HOLD_S, lambda: self._release(way, up))
        elif action == "reset":
            way.closed = back.closed = True
            self._reset(segment, back.next or 0, up)
        elif action in ("end", "truncate"):
            whole = segment.payload
            sent = segment.changed(payload=whole if action == "end" else whole[: len(whole) // 2])
            way.closed = True
            back.most_ack = sent.end
            self._pass(connection, sent, sent.changed(flags=sent.flags | FIN).bytes(), up)
        elif action == "cut":
            way.closed = back.closed = True
        elif action == "unplug":
            self._unplugged = True
        else:
            assert action == "lose", action

    def _release(self, way: Way, up: bool) -> None:
        held, way.held = way.held or [], None
        for packet in held:
            self._give(packet, up)

    def _reset(self, segment: Segment, expected: int, up: bool) -> None:
        """Both ends are told; of what comes from the receiver the sender expects that number next."""
        bare = segment.changed(flags=RST | ACK, options=b"", payload=b"", window=0)
        if segment.flags & ACK:
            self._give(bare.bytes(), up)
        answer = bare.changed(source=segment.target, target=segment.source, seq=expected, ack=segment.end)
        self._give(answer.bytes(), not up)


def _corrupted(packet: bytes, segment: Segment) -> bytes:
    """With one bit of the payload, or where there is none of its number, changed, and nothing else."""
    at = len(packet) - 1 if segment.payload else (packet[0] & 15) * 4 + 7
    return packet[:at] + bytes([packet[at] ^ 1]) + packet[at + 1 :]


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Two hosts and what joins them. Nothing of them is left."""
    with tun_hosts() as ends, Link(*ends) as made:
        yield made
