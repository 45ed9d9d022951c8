"""The binding of the native core: what Python may do with it, and what becomes of mistakes (the core: csrc/tests)."""

from __future__ import annotations

import ast
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import kvxfer
from kvxfer import _native as native
from kvxfer.errors import KvxferError, PeerLostError, UnavailableError, UsageError

SECOND = 1_000_000_000
SOON = 20 * SECOND
TOKEN = b"k" * 32
BLOCK = 1000
BLOCKS = 16

A = TypeVar("A")
B = TypeVar("B")


def together(a: Callable[[], A], b: Callable[[], B]) -> tuple[A, B]:
    """Both at once, as two processes would."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(b)
        return a(), other.result()


@dataclass
class End:
    context: native.Context
    peer: native.Peer
    region: native.Region

    def prepare(self, local: list[int], remote: list[int]) -> native.Plan:
        """Blocks `local` here are blocks `remote` there; a segment of each."""
        n = len(local)
        return self.context.prepare(
            self.peer,
            np.zeros(n, np.uint32),
            offsets(local),
            np.zeros(n, np.uint32),
            offsets(remote),
            np.full(n, BLOCK, np.uint64),
            np.arange(n, dtype=np.uint32),
            SOON,
        )

    def wait(self, kind: native.EventKind, tag: int) -> native.Event:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for event in self.context.poll(1, SOON):
                if event.kind == kind and event.tag == tag:
                    return event
        raise AssertionError(f"{kind} of {tag} did not come")

    def regions(self) -> native.Regions:
        return native.Regions([(self.region.address, self.region.bytes)])

    def leg(self, plan: native.Plan, own: list[int], source: list[int]) -> native.Leg:
        """Blocks `own` here are blocks `source` of the prefill side."""
        zeros, lengths = np.zeros(len(own), np.uint32), np.full(len(own), BLOCK, np.uint64)
        return native.Leg(self.peer, plan, zeros, offsets(own), zeros, offsets(source), lengths)

    def wrong_words(self, plan: native.Plan, own: list[int], source: list[int]) -> int:
        return native.verify(self.regions(), self.leg(plan, own, source), 7, 0, 1).wrong_words

    def loop(
        self, requests: list[native.LoopRequest], side: native.Side, count: int, stall_ns: int = SOON
    ) -> native.LoopResult:
        op = native.Op.push
        return native.run_loop(self.context, requests, self.regions(), side, op, 1, count, 1, True, 7, stall_ns)


def offsets(blocks: list[int]) -> npt.NDArray[np.uint64]:
    return np.array(blocks, np.uint64) * np.uint64(BLOCK)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    a = native.open_context("tcp", TOKEN, {})
    b = native.open_context("tcp", TOKEN, {"connections": 2, "chunk_kib": 4})
    regions = [context.allocate(BLOCK * BLOCKS) for context in (a, b)]
    endpoint = b.listen("127.0.0.1", 0)
    peers = together(lambda: a.connect(endpoint, SOON), lambda: b.accept(SOON))
    peers[0].import_keys(b.export_keys([regions[1]]))
    peers[1].import_keys(a.export_keys([regions[0]]))
    yield End(a, peers[0], regions[0]), End(b, peers[1], regions[1])
    a.close()
    b.close()


FROM, TO = [3, 0, 9], [1, 15, 2]


@pytest.fixture
def plans(ends: tuple[End, End]) -> tuple[native.Plan, native.Plan]:
    return together(lambda: ends[0].prepare(FROM, TO), lambda: ends[1].prepare(TO, FROM))


def u32(*values: int) -> npt.NDArray[np.uint32]:
    return np.array(values, np.uint32)


# --- transfers


def test_push_and_pull(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, b = ends
    native.fill(a.regions(), 7)
    assert plans[0].bytes == 3 * BLOCK
    assert (plans[1].descriptors, plans[1].segments) == (3, 3)

    native.poison(b.region.address, b.region.bytes)
    b.context.arm(plans[1], native.Op.push, [], 1)
    armed = a.wait(native.EventKind.armed, 1)
    assert armed.peer == a.peer.id
    a.context.post(plans[0], native.Op.push, [], 1)
    assert 0 < a.wait(native.EventKind.confirmed, 1).time_ns <= time.monotonic_ns()
    b.wait(native.EventKind.delivered, 1)
    assert b.wrong_words(plans[1], TO, FROM) == 0
    b.context.release(b.peer, 1)
    a.wait(native.EventKind.released, 1)

    native.poison(b.region.address, b.region.bytes)
    b.context.post(plans[1], native.Op.pull, [2, 0], 1)
    b.wait(native.EventKind.confirmed, 1)
    assert b.wrong_words(plans[1], [TO[0], TO[2]], [FROM[0], FROM[2]]) == 0
    assert b.wrong_words(plans[1], [TO[1]], [FROM[1]]) == BLOCK // 8
    assert b.context.bytes_moved == 5 * BLOCK
    assert a.peer.describe() == ["tcp/lo", "tcp/lo"]


def test_a_ready_flag_holds_a_push_back_even_when_python_forgets_it(
    ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]
) -> None:
    a, _ = ends
    flag = native.ReadyFlag()
    a.context.post(plans[0], native.Op.push, [], 1, flag)
    assert a.context.poll(8, SECOND // 50) == []
    flag.set()
    a.wait(native.EventKind.confirmed, 1)

    a.context.post(plans[0], native.Op.push, [], 2, native.ReadyFlag())  # nobody can set it any more
    assert a.context.poll(8, SECOND // 50) == []
    assert a.context.cancel(a.peer, 2)
    a.wait(native.EventKind.cancelled, 2)


def test_cancel_of_what_is_not_open(ends: tuple[End, End]) -> None:
    assert not ends[0].context.cancel(ends[0].peer, 5)


def test_poll_waits_for_its_timeout_without_the_gil(ends: tuple[End, End]) -> None:
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    began = time.monotonic()
    assert ends[0].context.poll(4, SECOND // 5) == []
    done.set()
    counter.join()
    assert time.monotonic() - began >= 0.2
    assert turns > 10


def test_event_fd_is_readable_while_events_wait(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, b = ends
    fd = a.context.event_fd()
    assert select.select([fd], [], [], 0)[0] == []
    b.context.arm(plans[1], native.Op.push, [], 3)
    assert select.select([fd], [], [], 10)[0] == [fd]
    a.context.poll(8, 0)
    assert select.select([fd], [], [], 0)[0] == []


def test_loop(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, b = ends
    native.fill(a.regions(), 7)

    ours = native.LoopRequest([a.leg(plans[0], FROM, FROM)])
    theirs = native.LoopRequest([b.leg(plans[1], TO, FROM)])
    prefill, decode = together(
        lambda: a.loop([ours], native.Side.prefill, 20), lambda: b.loop([theirs], native.Side.decode, 20)
    )
    for samples in (prefill.transfer_ns, prefill.post_ns, prefill.handover_ns):
        assert (np.frombuffer(samples, np.int64) > 0).sum() == 20
    assert (decode.transfer_ns, decode.post_ns, decode.handover_ns) == (b"", b"", b"")
    assert decode.wrong_epochs == 0
    assert prefill.wall_ns > 0
    assert 0 < prefill.checking_cpu_ns < prefill.wall_ns
    assert a.wrong_words(plans[0], FROM, FROM) == 0  # no epoch is left
    assert native.verify(b.regions(), b.leg(plans[1], TO, FROM), 7, 20, 1).wrong_words == 0


# --- mistakes


def test_errors_have_the_class_of_their_status() -> None:
    for action, kind, message in (
        (lambda: native.open_context("ucz", TOKEN, {}), UsageError, "unknown backend 'ucz'"),
        (lambda: native.open_context("tcp", b"short", {}), UsageError, "a token has 32 bytes"),
        (lambda: native.open_context("tcp", TOKEN, {"lanes": 1}), UsageError, "unknown backend option 'lanes'"),
        (lambda: native.open_context("tcp", TOKEN, {"connections": 99}), UsageError, "outside"),
        (lambda: native.probe("nothing"), UsageError, "unknown backend"),
        (lambda: native.Mapping(1 << 60), UnavailableError, "no memory"),
        (lambda: native.open_context("tcp", TOKEN, {}).listen("192.0.2.1", 0), UnavailableError, "cannot listen"),
        (lambda: native.open_context("tcp", TOKEN, {}).connect("127.0.0.1:1", SECOND), PeerLostError, "cannot connect"),
        (lambda: native.open_context("tcp", TOKEN, {}).accept(SECOND), UsageError, "accept before listen"),
    ):
        with pytest.raises(KvxferError, match=message) as caught:
            action()
        assert type(caught.value) is kind
        assert caught.value.status == kind.status


def test_a_lost_peer(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, b = ends
    assert a.peer.lost == ""
    a.context.post(plans[0], native.Op.push, [], 4, native.ReadyFlag())
    b.context.close()
    a.wait(native.EventKind.error, 4)
    a.wait(native.EventKind.peer_lost, 0)
    assert "closed the connection" in a.peer.lost
    with pytest.raises(PeerLostError, match="the peer was lost"):
        a.context.post(plans[0], native.Op.push, [], 5)
    with pytest.raises(PeerLostError):
        a.loop([native.LoopRequest([a.leg(plans[0], FROM, FROM)])], native.Side.decode, 1)


def test_wrong_segments_and_tags(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, _ = ends
    with pytest.raises(UsageError, match="segment 3 of a plan with 3"):
        a.context.post(plans[0], native.Op.push, [3], 1)
    flag = native.ReadyFlag()
    a.context.post(plans[0], native.Op.push, [], 1, flag)
    with pytest.raises(UsageError, match="tag 1 is open already"):
        a.context.post(plans[0], native.Op.push, [], 1)
    with pytest.raises(UsageError, match="takes no ready flag"):
        a.context.post(plans[0], native.Op.pull, [], 2, flag)


def test_arrays_of_another_type_or_shape_are_refused(
    ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]
) -> None:
    a, _ = ends
    good = [np.zeros(2, t) for t in (np.uint32, np.uint64, np.uint32, np.uint64, np.uint64)] + [u32(0)]
    for position, right in enumerate(good):
        for bad in (
            right.astype(np.int64),
            right.astype(np.float64),
            right.astype(np.uint32 if right.dtype == np.uint64 else np.uint64),
            np.zeros((1, 2), right.dtype),
            np.zeros(4, right.dtype)[::2],
            [0, 0],
        ):
            arrays = [*good[:position], bad, *good[position + 1 :]]
            with pytest.raises(TypeError):
                a.context.prepare(a.peer, *arrays, SECOND)  # type: ignore[arg-type]
            if position < 5:
                with pytest.raises(TypeError):
                    native.Leg(a.peer, plans[0], *arrays[:5])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="differ in length"):
        a.context.prepare(a.peer, good[0], good[1], good[2], good[3], np.zeros(3, np.uint64), u32(0), SECOND)
    with pytest.raises(UsageError, match="outside its local region"):
        a.prepare([BLOCKS], [0])


def test_pieces_outside_their_region_are_refused(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, _ = ends
    size, top = BLOCK * BLOCKS, 2**64 - 1

    def leg(region: int, offset: int, length: int) -> native.Leg:
        zeros = np.zeros(2, np.uint64)
        own = np.array([0, offset], np.uint64)
        return native.Leg(a.peer, plans[0], u32(0, region), own, u32(0, 0), zeros, np.array([8, length], np.uint64))

    assert native.verify(a.regions(), leg(0, size, 0), 7, 0, 1).bytes_checked == 8
    for bad in (leg(0, size - 7, 8), leg(0, size, 1), leg(0, top, 8), leg(0, 8, top), leg(0, 0, top), leg(1, 0, 0)):
        with pytest.raises(UsageError, match="piece 1 lies outside its region"):
            native.verify(a.regions(), bad, 7, 0, 1)
        for side in (native.Side.prefill, native.Side.decode):
            with pytest.raises(UsageError, match="piece 1 lies outside its region"):
                a.loop([native.LoopRequest([bad])], side, 1)
    elsewhere = native.Regions([(0, 0), (a.region.address, a.region.bytes)])
    with pytest.raises(UsageError, match="piece 0 lies outside its region"):  # region 0 has no bytes on this side
        native.verify(elsewhere, leg(1, 0, 8), 7, 0, 1)


def test_legs_that_make_no_request_are_refused(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, _ = ends
    leg = a.leg(plans[0], FROM, FROM)
    none = np.zeros(0, np.uint64)
    arrays = [u32(0), offsets([0]), u32(0), offsets([0]), offsets([1])]
    for position, one in enumerate(arrays):
        with pytest.raises(UsageError, match="differ in length"):
            native.Leg(a.peer, plans[0], *arrays[:position], one[:0], *arrays[position + 1 :])  # type: ignore[arg-type]
    for peer, plan in ((None, plans[0]), (a.peer, None)):
        with pytest.raises(TypeError):
            native.Leg(peer, plan, u32(), none, u32(), none, none)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        native.LoopRequest([leg, None])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        a.loop([None], native.Side.prefill, 1)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        native.fill([(a.region.address, 8)], 7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every 0"):
        native.verify(a.regions(), leg, 7, 0, 0)
    with pytest.raises(UsageError, match="needs a leg"):
        a.loop([native.LoopRequest([])], native.Side.prefill, 1)
    with pytest.raises(UsageError, match="two legs of one peer"):
        a.loop([native.LoopRequest([leg, leg])], native.Side.prefill, 1)


def test_a_request_keeps_its_legs(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, _ = ends
    legs = [a.leg(plans[0], FROM, FROM)]
    request = native.LoopRequest(legs)
    legs.clear()
    with pytest.raises(PeerLostError, match="nothing moved"):
        a.loop([request], native.Side.prefill, 1, SECOND // 20)


def test_objects_of_another_context_are_refused(ends: tuple[End, End], plans: tuple[native.Plan, native.Plan]) -> None:
    a, b = ends
    with pytest.raises(UsageError, match="another context"):
        b.context.post(plans[0], native.Op.push, [], 1)
    with pytest.raises(UsageError, match="another context"):
        b.context.release(a.peer, 1)


def test_a_port_in_use(ends: tuple[End, End]) -> None:
    context = native.open_context("tcp", TOKEN, {})
    port = int(context.listen("127.0.0.1", 0).rsplit(":", 1)[1])
    with pytest.raises(UnavailableError, match=f"port {port}: Address already in use"):
        native.open_context("tcp", TOKEN, {}).listen("127.0.0.1", port)


def test_accept_ends_at_its_timeout_and_when_another_thread_closes() -> None:
    context = native.open_context("tcp", TOKEN, {})
    context.listen("127.0.0.1", 0)
    with pytest.raises(PeerLostError, match="in time"):
        context.accept(SECOND // 50)
    threading.Timer(0.05, context.close).start()
    with pytest.raises(PeerLostError, match="interrupted"):
        context.accept(SOON)
    context.close()
    with pytest.raises(UsageError, match="closed"):
        context.accept(SOON)


def test_close_twice(ends: tuple[End, End]) -> None:
    for end in (*ends, *ends):
        end.context.close()
    assert ends[0].context.poll(0, 0) == []


# --- lifetimes

DROP = """
import gc, itertools, random, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from kvxfer import _native as native

SOON = 20_000_000_000

def objects():
    a, b = (native.open_context("tcp", b"k" * 32, {}) for _ in range(2))
    ra, rb = a.allocate(1 << 16), b.allocate(1 << 16)
    memory = native.Mapping(1 << 16)
    rm = a.register_memory(memory.address, memory.bytes)
    endpoint = b.listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(b.accept, SOON)
        pa = a.connect(endpoint, SOON)
        pb = other.result()
        pa.import_keys(b.export_keys([rb]))
        pb.import_keys(a.export_keys([ra, rm]))
        zero, one = np.zeros(1, np.uint32), np.ones(1, np.uint32)
        z64, n = np.zeros(1, np.uint64), np.full(1, 1 << 16, np.uint64)
        other = pool.submit(b.prepare, pb, zero, z64, one, z64, n, zero, SOON)
        la = a.prepare(pa, one, z64, zero, z64, n, zero, SOON)
        lb = other.result()
    flag = native.ReadyFlag()
    a.post(la, native.Op.push, [], 1, flag)
    a.post(la, native.Op.push, [], 2)
    b.post(lb, native.Op.pull, [], 3)
    leg = native.Leg(pa, la, zero, z64, zero, z64, n)
    request = native.LoopRequest([leg])
    return dict(
        a=a, b=b, ra=ra, rb=rb, memory=memory, pa=pa, pb=pb, la=la, lb=lb, flag=flag, leg=leg, request=request
    )

order = random.Random(5)
for round in range(40):
    alive = objects()
    names = list(alive)
    order.shuffle(names)
    for name in names:
        del alive[name]
        gc.collect()
left = objects()
print("survived")
"""


def test_objects_dropped_in_any_order_do_not_crash() -> None:
    """With a transfer waiting, one running and one just asked for; and some still there when the interpreter ends."""
    done = subprocess.run([sys.executable, "-c", DROP], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "survived\n", done.stderr
    assert done.returncode == 0, done.stderr


# --- the stub


def stub_names() -> dict[str, set[str]]:
    """What the stub declares: names of the module under "", members under their class."""
    tree = ast.parse(Path(kvxfer.__file__).with_name("_native.pyi").read_text())
    names: dict[str, set[str]] = {"": set()}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {
                member.name if isinstance(member, ast.FunctionDef) else ast.unparse(member.targets[0])
                for member in node.body
                if isinstance(member, (ast.FunctionDef, ast.Assign))
            } - {"__init__"}
    return names


def public(of: object) -> set[str]:
    return {name for name in vars(of) if not name.startswith(("_", "@"))}


def test_the_stub_names_what_the_module_has() -> None:
    declared = stub_names()
    assert public(native) == declared.pop("")
    for name, members in declared.items():
        assert public(getattr(native, name)) == members, name


# --- memory


def test_memory_is_of_the_kind_and_on_the_node_that_is_asked_for() -> None:
    for backend, backing in (("tcp", native.Backing.anonymous), ("shm", native.Backing.shared)):
        context = native.open_context(backend, TOKEN, {})
        assert context.capabilities.backing == backing
        region = context.allocate(10_000, native.MemoryKind.host, numa=0)
        assert region.bytes == 10_000
        with pytest.raises(UnavailableError, match=r"NUMA node 900 .nodes here: "):
            context.allocate(10_000, numa=900)
        context.close()
    shared = native.Mapping(5000, native.Backing.shared)
    mappings = Path("/proc/self/maps").read_text()
    (line,) = [line for line in mappings.splitlines() if line.startswith(f"{shared.address:x}-")]
    assert "kvxfer-pool" in line


def test_memory_of_a_gpu_is_refused_by_who_does_not_move_it() -> None:
    context = native.open_context("tcp", TOKEN, {})
    assert context.capabilities.memory == [native.MemoryKind.host]
    host = context.allocate(5000)
    assert host.kind == native.MemoryKind.host
    with pytest.raises(UnavailableError, match="moves host memory only"):
        context.register_memory(host.address, 5000, native.MemoryKind.cuda)
    context.close()


def test_memory_of_others_is_none_of_shm() -> None:
    context = native.open_context("shm", TOKEN, {})
    assert context.capabilities.own_memory
    other = native.Mapping(5000)
    with pytest.raises(UsageError, match="only memory that its own context allocated"):
        context.register_memory(other.address, 5000)
    whole = context.allocate(5000)
    assert context.register_memory(whole.address + 8, 100).bytes == 100


def test_progress_returns_at_once_where_threads_do_the_work(ends: tuple[End, End]) -> None:
    began = time.monotonic()
    ends[0].context.progress(SOON)
    assert time.monotonic() - began < 10
