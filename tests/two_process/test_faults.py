"""Killed, stopped and interrupted in every phase: the right status within seconds, and nothing left on either side."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from .processes import Done, Place, Running, Server, command_line, free_port, prefill_worker, wait_until
from .relay import Chunk, Relay

WITHIN_S = 10.0
"""After a fault, how long until both sides know."""

LONG = ("--max-seconds", "30", "--min-samples", "1000000")
LARGE = ("--tokens", "200000")
"""300 MB, so that filling and comparing take some time too."""

Fault = Callable[[Running, Server], None]


@contextmanager
def under_way(place: Place, phase: str) -> Iterator[tuple[Running, Server]]:
    """A run through serve that is in the phase named: connecting, transferring or verifying."""
    port = free_port()
    with Relay(port, mute=phase == "connecting") as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        if phase == "verifying":
            bench = place.start_bench("--peer", server.address, *LARGE, terminal=True)
            bench.says("verifying")
        elif phase == "transferring":
            bench = place.start_bench("--peer", server.address, "--tokens", "20000", *LONG, terminal=True)
            bench.says(" samples", times=3)
        else:
            bench = place.start_bench("--peer", server.address, terminal=True)
            assert relay.connected.wait(20)
        yield bench, server


def ends(place: Place, bench: Running, server: Server, fault: Fault) -> Done:
    """What becomes of the run after the fault; asserts that it takes no longer than it may and leaves nothing."""
    fault(bench, server)
    began = time.monotonic()
    done = bench.wait(WITHIN_S)
    place.left_alone(server if server.process.poll() is None else None)
    assert time.monotonic() - began < WITHIN_S
    return done


def kill_decode_worker(_: Running, server: Server) -> None:
    os.kill(server.worker(), signal.SIGKILL)


def stop_decode_worker(_: Running, server: Server) -> None:
    os.kill(server.worker(), signal.SIGSTOP)


def kill_prefill_worker(bench: Running, _: Server) -> None:
    os.kill(prefill_worker(bench), signal.SIGKILL)


def stop_prefill_worker(bench: Running, _: Server) -> None:
    os.kill(prefill_worker(bench), signal.SIGSTOP)


def kill_server(_: Running, server: Server) -> None:
    server.signal(signal.SIGKILL)
    server.wait(5)


PHASES = ("connecting", "transferring", pytest.param("verifying", marks=pytest.mark.slow))
SLOWLY = [pytest.mark.slow]
"""For faults that only silence tells."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (kill_decode_worker, "the decode worker was killed by SIGKILL"),
        (kill_prefill_worker, "the prefill worker was killed by SIGKILL"),
        pytest.param(stop_decode_worker, "the decode worker has not answered for 3 s", marks=SLOWLY),
        pytest.param(stop_prefill_worker, "the prefill worker has not answered for 3 s", marks=SLOWLY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_worker_killed_or_stopped(place: Place, phase: str, fault: Fault, says: str) -> None:
    with under_way(place, phase) as (bench, server):
        ends(place, bench, server, fault).failed(5, says)
    server.says("the run is over")


@pytest.mark.parametrize("backend", ["shm", "cma"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (kill_decode_worker, "the decode worker was killed by SIGKILL"),
        (kill_prefill_worker, "the prefill worker was killed by SIGKILL"),
        pytest.param(stop_decode_worker, "the decode worker has not answered for 3 s", marks=SLOWLY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("op", ["push", "pull"])
def test_a_worker_killed_or_stopped_while_its_memory_is_copied(
    place: Place, backend: str, fault: Fault, says: str, op: str
) -> None:
    server = place.serve()
    bench = place.start_bench(
        "--peer", server.address, "--backend", backend, "--op", op, "--tokens", "20000", *LONG, terminal=True
    )
    bench.says(" samples", times=3)
    ends(place, bench, server, fault).failed(5, says)
    server.says("the run is over")
    place.serves(server, "--backend", backend)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_the_server_killed(place: Place, phase: str) -> None:
    with under_way(place, phase) as (bench, server):
        ends(place, bench, server, kill_server).failed(5)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_the_server_stopped(place: Place, phase: str) -> None:
    """It may go on later, and finds its client gone then."""
    with under_way(place, phase) as (bench, server):
        server.signal(signal.SIGSTOP)
        try:
            bench.wait(WITHIN_S).failed(5)
        finally:
            server.signal(signal.SIGCONT)
        place.left_alone(server)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_server_interrupted(place: Place, phase: str, number: int) -> None:
    with under_way(place, phase) as (bench, server):

        def interrupt(_: Running, server: Server) -> None:
            server.signal(number)
            ended = server.wait(2)
            assert ended.status == 130
            assert ended.err.splitlines()[-1] == "kvxfer serve: interrupted"

        ends(place, bench, server, interrupt).failed(5, "the server was stopped")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_the_bench_killed(place: Place, phase: str) -> None:
    with under_way(place, phase) as (bench, server):
        done = ends(place, bench, server, lambda bench, _: bench.signal(signal.SIGKILL))
        assert done.status == -signal.SIGKILL
        server.says("the run is over: the client closed its connection", seconds=WITHIN_S)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)]
)
def test_the_bench_interrupted(place: Place, phase: str, number: int, group: bool) -> None:
    """A terminal's Ctrl-C reaches the workers too, a supervisor's SIGTERM the bench alone."""
    with under_way(place, phase) as (bench, server):
        done = ends(place, bench, server, lambda bench, _: bench.signal(number, group))
        assert (done.status, done.err.strip()) == (130, "kvxfer bench: interrupted")
        assert done.out == ""
        server.says("the run is over: the client is done")


@pytest.mark.slow
def test_serve_goes_on_after_all_that(place: Place) -> None:
    server = place.serve()
    for fault in (kill_decode_worker, kill_prefill_worker, lambda bench, _: bench.signal(signal.SIGINT)):
        bench = place.start_bench("--peer", server.address, *LONG, terminal=True)
        bench.says(" samples", times=2)
        ends(place, bench, server, fault)
        place.serves(server)
    bench = place.start_bench("--peer", server.address, *LONG)
    server.says("a run begins", times=7)
    bench.signal(signal.SIGKILL)
    server.says("closed its connection", seconds=WITHIN_S)
    place.serves(server)


# --- without serve: the second process belongs to the bench


@pytest.mark.parametrize("after", [0.15, 0.3, 0.5, 0.75, 1.0])
def test_interrupted_at_any_time(place: Place, after: float) -> None:
    bench = place.start_bench(*LONG, "--setup-repeats", "3")
    time.sleep(after)
    bench.signal(signal.SIGINT, group=True)
    # In the midst of an import Python may lose the exception, and says so; a user would press again.
    wait_until(lambda: bench.process.poll() is not None or "Exception ignored" in bench.err, 3, "an end")
    if "Exception ignored" in bench.err and bench.process.poll() is None:
        bench.signal(signal.SIGINT, group=True)
    done = bench.wait(3)
    place.left_alone()
    if done.status != -signal.SIGINT:  # which it is while Python itself starts: nothing of ours has run by then
        assert done.status == 130, done
        assert done.err.strip().splitlines()[-1] == "kvxfer bench: interrupted"


def test_the_terminal_closed(place: Place) -> None:
    """The whole foreground group hears of it, the workers and the second process too."""
    bench = place.start_bench(*LONG, terminal=True)
    bench.says(" samples", times=2)
    bench.signal(signal.SIGHUP, group=True)
    bench.wait(3)
    place.left_alone()


@pytest.mark.slow
def test_under_nohup(place: Place) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    bench = place.start_bench("--max-seconds", "0.5", terminal=True, preexec_fn=ignore)
    bench.says(" samples")
    bench.signal(signal.SIGHUP, group=True)
    assert bench.wait().status == 0


def test_interrupted_twice(place: Place) -> None:
    """Impatience makes no difference."""
    bench = place.start_bench(*LONG, terminal=True)
    bench.says(" samples", times=2)
    for _ in range(3):
        bench.signal(signal.SIGINT, group=True)
        time.sleep(0.01)
    done = bench.wait(3)
    place.left_alone()
    assert (done.status, "Traceback" in done.err) == (130, False), done


def test_rows_measured_before_an_interruption_are_kept(place: Place) -> None:
    path = place.directory / "result.json"
    arguments = ("--tokens", "16,32", "--max-seconds", "0.3", "--min-samples", "1000000", "--json", str(path))
    bench = place.start_bench(*arguments, terminal=True)
    bench.says("/push/32: setup")
    bench.signal(signal.SIGINT)
    done = bench.wait(5)
    assert done.status == 130
    told = ["kvxfer bench: error: only 1 of 2 rows were measured", "kvxfer bench: interrupted"]
    assert done.err.strip().splitlines() == told
    result = json.loads(path.read_text())
    assert (result["exit_status"], [row["tokens"] for row in result["results"]]) == (130, [16])


def test_killed_with_its_own_second_process(place: Place) -> None:
    """Nobody is left to clean up: the others notice by themselves."""
    bench = place.start_bench(*LONG, terminal=True)
    bench.says(" samples", times=2)
    assert len(place.alive()) == 4
    bench.signal(signal.SIGKILL)
    bench.wait(3)
    place.left_alone()


@pytest.mark.slow
def test_killed_while_starting(place: Place) -> None:
    for after in (0.3, 0.4, 0.5):
        bench = place.start_bench(*LONG)
        time.sleep(after)
        bench.signal(signal.SIGKILL)
        bench.wait(3)
        place.left_alone()


@pytest.mark.slow
def test_its_own_second_process_killed(place: Place) -> None:
    bench = place.start_bench(*LONG, terminal=True)
    bench.says(" samples", times=2)
    (server,) = (pid for pid in place.alive() if "kvxfer.measure.local" in command_line(pid))
    os.kill(server, signal.SIGKILL)
    bench.wait(WITHIN_S).failed(5)
    place.left_alone()


# --- the network between the data ports


def test_a_data_port_that_cannot_be_reached(place: Place) -> None:
    """The control channel works, a firewall is in the way of the data."""
    server = place.serve("--advertise", f"127.0.0.1:{free_port()}")
    done = place.bench("--peer", server.address)
    done.failed(5, "cannot connect to the peer's data port", "Connection refused")
    assert done.seconds < WITHIN_S
    place.left_alone(server)


@pytest.mark.parametrize("op", ["push", pytest.param("pull", marks=pytest.mark.slow)])
def test_data_connections_that_are_cut(place: Place, op: str) -> None:
    port = free_port()
    with Relay(port) as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        bench = place.start_bench("--peer", server.address, "--op", op, *LONG, terminal=True)
        bench.says(" samples", times=2)
    bench.wait(WITHIN_S).failed(5, "the peer was lost")
    place.left_alone(server)
    place.bench("--peer", server.address).failed(5, "cannot connect to the peer's data port")


@pytest.mark.slow
def test_a_data_connection_that_is_never_answered(place: Place) -> None:
    with Relay(free_port(), mute=True) as relay:
        server = place.serve("--advertise", relay.address)
        done = place.bench("--peer", server.address)
    done.failed(5, "data connection")
    assert "in time" in done.err or "timed out" in done.err
    assert 9 < done.seconds < 10 + WITHIN_S
    place.left_alone(server)


@pytest.mark.slow
def test_a_transfer_that_stands_still(place: Place) -> None:
    """Nothing is closed and nobody is dead, only no byte comes through any more."""
    held = threading.Event()

    def tamper(chunk: Chunk, payload: bytes) -> Iterator[bytes]:
        if chunk.tag == 4:
            yield payload[:100]
            held.wait(60)
        yield payload

    port = free_port()
    with Relay(port, tamper) as relay:
        server = place.serve("--data-port", str(port), "--advertise", relay.address)
        done = place.bench("--peer", server.address, *LONG)
        held.set()
    done.failed(5, "nothing moved for 10000 ms")
    assert 10 < done.seconds < 10 + WITHIN_S
    place.left_alone(server)
