"""Faults on the way of the notices of backends of one host, with both sides and the relay in one process.

So the kernel names the right process to cma, which a relay in a process of its own keeps from working at all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from two_process.processes import wait_until

from kvxfer import _native
from kvxfer.backend.probe import probe_all
from kvxfer.errors import KvxferError, PeerLostError

from .matrix import held_by
from .spoiling import Relay, Spoil, data_parts
from .test_data_connections import GREETINGS, NOTICES, PLACES, PLANS, POOLS, STATUSES

pytestmark = pytest.mark.slow

BACKENDS = [found.name for found in probe_all() if found.available and _native.one_host(found.name)]
AT_ONCE = 16  # most of them wait most of the time

PATIENCE_NS = 20_000_000_000
SHORT_NS = 500_000_000
"""For what never comes: who accepts waits on where a connection has ended before it was known whose it is."""

BYTES = 3 << 20  # several chunks of a copy, so that both threads copy
ROUNDS = 2  # what the first leaves on the way is seen in the second


class Passage:
    """A listening Unix socket in this process, from which a relay leads to an endpoint."""

    def __init__(self, endpoint: str, rule: Spoil) -> None:
        target = "\0" + endpoint.removeprefix("unix:@")
        name = f"kvxfer-{secrets.token_hex(8)}"
        self.endpoint = f"unix:@{name}"
        self.parts: set[tuple[str, bool]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + name)
        self._listener.listen()

        def onward() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(target)
            return connection

        self._relay = Relay(self._listener, onward, rule, data_parts, lambda part, up: self.parts.add((part, up)))
        self._thread = threading.Thread(target=self._relay.run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._relay.end()


class Side:
    """A context with one pool, and what its application does."""

    def __init__(self, backend: str, token: bytes, patience_ns: int) -> None:
        self.context = _native.open_context(backend, token, {})
        self.region = self.context.allocate(BYTES)
        self.keys = self.context.export_keys([self.region])
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * BYTES).from_address(self.region.address))
        self._patience_ns = patience_ns
        self._seen: set[tuple[_native.EventKind, int]] = set()
        self._lost = False

    def join(self, endpoint: str, keys: bytes) -> None:
        connected = self.context.connect if endpoint else self.context.accept
        self.peer = connected(*([endpoint] if endpoint else []), self._patience_ns)
        self.peer.import_keys(keys)
        one, nothing = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        lengths = np.array([BYTES], np.uint64)
        self.plan = self.context.prepare(self.peer, one, nothing, one, nothing, lengths, one, self._patience_ns)

    def wait(self, kind: _native.EventKind, tag: int) -> None:
        """Until then, or the end of the peer, which may follow at once on what is waited for."""
        give_up_at = time.monotonic_ns() + self._patience_ns
        while (kind, tag) not in self._seen:
            if self._lost or time.monotonic_ns() > give_up_at:
                raise PeerLostError(self.peer.lost or f"{kind} did not come")
            for event in self.context.poll(16, SHORT_NS // 10):
                self._seen.add((event.kind, event.tag))
                self._lost |= event.kind == _native.EventKind.peer_lost


def prefill(side: Side, op: str, endpoint: str, keys: bytes) -> None:
    kinds = _native.EventKind
    side.join(endpoint, keys)
    for tag in range(1, ROUNDS + 1):
        side.memory[:] = tag
        if op == "push":
            side.wait(kinds.armed, tag)
            side.context.post(side.plan, _native.Op.push, [], tag)
            side.wait(kinds.confirmed, tag)
        else:
            side.context.arm(side.plan, _native.Op.pull, [], tag)
            side.wait(kinds.delivered, tag)
        side.wait(kinds.released, tag)


def decode(side: Side, op: str, keys: bytes) -> None:
    kinds = _native.EventKind
    side.join("", keys)
    for tag in range(1, ROUNDS + 1):
        side.memory[:] = 0
        if op == "push":
            side.context.arm(side.plan, _native.Op.push, [], tag)
            side.wait(kinds.delivered, tag)
        else:
            side.wait(kinds.armed, tag)
            side.context.post(side.plan, _native.Op.pull, [], tag)
            side.wait(kinds.confirmed, tag)
        assert (side.memory == tag).all(), "said to be there, and was not"
        side.context.release(side.peer, tag)


def ended(side: Side, work: Any, *arguments: Any) -> str:
    """How a side ended: nothing, or the error. It has closed then."""
    try:
        work(side, *arguments)
    except KvxferError as error:
        return str(error) or "an error"
    finally:
        side.context.close()
    return ""


def spoiled(backend: str, op: str, rule: Spoil) -> tuple[list[str], set[tuple[str, bool]]]:
    """How both sides ended, and the parts that passed."""
    never = rule.action == "drop" or (rule.action != "delay" and rule.part in ("token", "hello"))
    patience_ns = SHORT_NS if never else PATIENCE_NS
    token = secrets.token_bytes(32)
    one, other = Side(backend, token, patience_ns), Side(backend, token, patience_ns)
    passage = Passage(other.context.listen("", 0), rule)
    try:
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(ended, one, prefill, op, passage.endpoint, other.keys),
                pool.submit(ended, other, decode, op, one.keys),
            ]
            return [each.result() for each in both], passage.parts
    finally:
        passage.close()


def wrong(backend: str, op: str, rule: Spoil) -> str:
    """What should not be, of a run with one fault."""
    began = time.monotonic()
    ends, parts = spoiled(backend, op, rule)
    harmless = rule.action == "delay" or (rule.action == "duplicate" and rule.part == "answer")
    if any(ends) and rule.action == "delay":
        return f"{rule}: {ends}"
    if not any(ends) and not harmless:
        return f"{rule}: nobody noticed; {parts}"
    if time.monotonic() - began > PATIENCE_NS / 2e9:
        return f"{rule}: noticed too late: {ends}"
    return ""


@pytest.mark.parametrize("op", ["push", "pull"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_fault_anywhere(backend: str, op: str) -> None:
    asks = POOLS if _native.open_context(backend, bytes(32), {}).capabilities.own_memory else []
    parts = GREETINGS + PLANS + NOTICES["shm", op] + asks
    whole, passed = spoiled(backend, op, Spoil("delay", "token"))
    assert whole == ["", ""]
    assert {part for part in passed if part[0] not in ("bye", "progress")} == set(
        parts
    )  # a slow machine tells progress
    rules = [Spoil(action, *part, place) for part in parts for action in STATUSES for place in PLACES]
    rules += [Spoil("strip", *part) for part in parts if part[0] == "pool"]
    before = held_by(os.getpid())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [line for line in pool.map(lambda rule: wrong(backend, op, rule), rules) if line]
    print(f"{backend}, {op}: {len(rules)} faults")
    assert not found, "\n".join(found)
    gc.collect()
    wait_until(lambda: held_by(os.getpid()) <= before, 5, "the end of every thread and file")
