"""How workers end, and that the server and the coordinator outlive it and go on telling each other that they live."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvxfer.control import channel
from kvxfer.control import messages as m
from kvxfer.control.channel import Client, server_socket
from kvxfer.errors import PeerLostError, UnavailableError
from kvxfer.measure import process
from kvxfer.measure.process import WorkerProcess
from kvxfer.measure.server import Server, Settings
from kvxfer.measure.session import Session, open_session

from .processes import wait_until

SLOW_END_S = m.SILENCE_S + 1.0
"""What the kernel may take to free the memory of a worker that was killed."""

RUBBISH = b"\xc1 no message"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that runs in a thread of ours, so that what it does to its workers can be changed."""
    reader, writer = os.pipe()
    made: list[Server] = []
    there = threading.Event()

    def run() -> None:
        with server_socket(f"ipc://{tmp_path}/control", None, frozenset()) as socket:
            made.append(Server(socket, Settings("127.0.0.1", owner_fd=reader), lambda _: None))
            there.set()
            made[0].run()

    thread = threading.Thread(target=run)
    thread.start()
    assert there.wait(20)
    yield made[0]
    assert thread.is_alive(), "the server did not survive"
    os.close(writer)
    thread.join(20)
    os.close(reader)
    assert not thread.is_alive()


@pytest.fixture
def session(server: Server, tmp_path: Path) -> Iterator[Session]:
    with open_session(Client(f"ipc://{tmp_path}/control", None, None)) as opened:
        yield opened


def works(session: Session) -> None:
    """A fresh pair does what it is told."""
    session.launch(0)
    session.both(0, m.Ping(), m.Ping(), m.Done)


def end_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = SLOW_END_S) -> None:
    """From now on every worker takes so long to end."""
    gone_at: dict[int, float] = {}

    def is_there(worker: WorkerProcess) -> bool:
        time.sleep(0.1)
        worker._process.poll()
        return time.monotonic() < gone_at.setdefault(worker.pid, time.monotonic() + seconds)

    monkeypatch.setattr(WorkerProcess, "_is_there", is_there)


def test_both_sides_are_heard_while_workers_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    works(session)
    end_slowly(monkeypatch)
    session.dismiss(0)
    monkeypatch.undo()
    works(session)


def test_the_next_client_is_kept_waiting(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears that the server is there, so it waits for longer than for a server that says nothing."""
    monkeypatch.setattr(channel, "CONNECT_S", 3 * m.HEARTBEAT_S)
    works(session)
    end_slowly(monkeypatch, 6 * m.HEARTBEAT_S)
    session._client.send(m.Bye())
    began = time.monotonic()
    with open_session(Client(f"ipc://{tmp_path}/control", None, None)) as next_one:
        assert time.monotonic() - began > channel.CONNECT_S
        monkeypatch.undo()
        works(next_one)


def test_others_are_told_that_the_server_is_busy_while_workers_end(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the run goes on, with other workers."""
    works(session)
    freed = threading.Event()

    def is_there(worker: WorkerProcess) -> bool:
        worker._process.poll()
        return not freed.wait(0.1)

    monkeypatch.setattr(WorkerProcess, "_is_there", is_there)
    session._client.send(m.Dismiss(0))
    other = open_session(Client(f"ipc://{tmp_path}/control", None, None))
    with pytest.raises(UnavailableError, match="busy with another run"), other:
        raise AssertionError("let in")
    freed.set()
    session._await_server(m.Dismissed)


@pytest.mark.slow
def test_others_who_say_hello_do_not_keep_a_client_from_being_told(session: Session, tmp_path: Path) -> None:
    works(session)
    until = time.monotonic() + 1.5 * m.SILENCE_S
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        other.connect(f"ipc://{tmp_path}/control")
        while time.monotonic() < until:
            other.send(m.encode(m.Hello(m.PROTOCOL, "")))
            assert not [message for _, message in session._messages() if not isinstance(message, m.Heartbeat)]
        assert isinstance(m.decode_from_server(other.recv()), m.Failed)
    works(session)


def test_a_worker_that_dies_and_ends_slowly(server: Server, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client was not listened to meanwhile, which is not its silence."""
    works(session)
    end_slowly(monkeypatch)
    os.kill(server._workers[0].pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="decode worker was killed by SIGKILL"):
        session.decode(0, m.Ping(), m.Done)
    session._client.send(m.Launch(1))
    session._await_server(m.Launched)


def test_a_worker_that_is_ended_by_a_signal_without_a_name(server: Server, session: Session) -> None:
    works(session)
    os.kill(server._workers[0].pid, signal.SIGRTMIN + 6)
    with pytest.raises(PeerLostError, match=f"decode worker was killed by signal {signal.SIGRTMIN + 6}"):
        session.decode(0, m.Ping(), m.Done)
    works(session)


def test_a_worker_that_says_what_is_no_message(
    server: Server, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "worker"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"os.write(int(sys.argv[3]), {len(RUBBISH).to_bytes(4, 'little') + RUBBISH!r})\ntime.sleep(60)\n"
    )
    script.chmod(0o700)
    with monkeypatch.context() as changed:
        changed.setattr(process, "sys", SimpleNamespace(executable=str(script)))
        session._client.send(m.Launch(0))
        session._await_server(m.Launched)
    session._seq += 1
    with pytest.raises(PeerLostError, match="decode worker said what is no message"):
        session._answers({"decode"})
    wait_until(lambda: not server._workers, 20, "the end of that worker")
    works(session)
