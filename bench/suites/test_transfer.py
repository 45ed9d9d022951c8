"""256 MiB within this host: scattered pieces through each backend, beside a plain socket and plain copies.

make benchmarks runs it; compare the rates within one run only.
"""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from moving import MIB, Moving, blocks_of, rate

from kvxfer import _native
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.tables import scatter

SIZE = 256 * MIB


def test_push_scattered(benchmark, scattered: Moving) -> None:
    benchmark.pedantic(scattered.push, rounds=15, warmup_rounds=2)
    rate(benchmark, scattered.bytes)


def test_plain_socket_one_buffer(benchmark) -> None:
    """What iperf3 does: one stream, one contiguous buffer on each side, no confirmation but one byte."""
    source, target = (_native.Mapping(SIZE) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    view = memoryview(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * SIZE).from_address(target.address)))
    data = memoryview(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * SIZE).from_address(source.address)))

    def receive() -> None:
        got = 0
        while got < SIZE:
            got += receiver.recv_into(view[got:])
        receiver.sendall(b"x")

    def once() -> None:
        thread = threading.Thread(target=receive)
        thread.start()
        sender.sendall(data)
        assert sender.recv(1) == b"x"
        thread.join()

    with sender, receiver:
        benchmark.pedantic(once, rounds=15, warmup_rounds=2)
    rate(benchmark, SIZE)


@pytest.mark.parametrize("backing", _native.Backing, ids=lambda backing: backing.name)
def test_memcpy_of_the_same_pieces(benchmark, piece: int, backing: _native.Backing) -> None:
    """One thread; shm is to be held against shared memory, the others against anonymous memory."""
    source, target = (_native.Mapping(SIZE, backing) for _ in range(2))
    tables = scatter(SIZE // piece, 1, 1, 1.0, 0)
    plan = transfer_plan(blocks_of(piece, 1), [tables.prefill[0]], [tables.decode[0]])

    def once() -> None:
        _native.copy_pieces(target.address, plan.decode_offsets, source.address, plan.prefill_offsets, plan.lengths)

    benchmark.pedantic(once, rounds=15, warmup_rounds=2)
    rate(benchmark, SIZE)
