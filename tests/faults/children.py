"""What the processes forked from the zygote do: a bench that acts at one of its steps, a serve, a relay."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from two_process.processes import children

from kvxfer import bench as bench_module
from kvxfer import serve as serve_module
from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.measure import pair
from kvxfer.measure.process import WorkerProcess
from kvxfer.measure.session import Session

from . import spoiling

SHORT_NS = 3_000_000_000
"""In place of the 10 s that connecting, preparing and a transfer that stands still may take."""


class Steps:
    """Counts the control messages of a bench and acts at one of them, before it is sent or when it was received.

    Messages that only repeat the two before (pings, samples) are not counted. Each step is noted in a file.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._note = Path(plan["note"])
        self._wanted: int | None = plan["step"]
        self._act: Callable[[], None] = lambda: self._strike(plan["victim"], plan["signal"], plan["pids"])
        self._last: list[str] = ["", ""]
        self._count = 0
        self._asked: dict[int, str] = {}
        self.prefill_pid = 0

    def at(self, label: str) -> None:
        repeats = label == self._last[0]
        self._last = [self._last[1], label]
        if repeats:
            return
        self._say(label)
        number, self._count = self._count, self._count + 1
        if number == self._wanted:
            self._act()

    def sending(self, message: m.Message) -> None:
        if isinstance(message, m.Command):
            self._asked[message.seq] = type(message.body).__name__
            self.at(f"to decode: {type(message.body).__name__}")
        elif not isinstance(message, m.Heartbeat):
            self.at(f"to serve: {type(message).__name__}")

    def received(self, message: m.Message | None) -> None:
        if isinstance(message, (m.Answer, m.Failed)):
            self.at(f"from decode: {self._asked.get(message.seq, type(message).__name__)}")
        elif message is not None and not isinstance(message, m.Heartbeat):
            self.at(f"from serve: {type(message).__name__}")

    def _strike(self, victim: str, number: int, pids: dict[str, int]) -> None:
        if victim == "bench":
            pid = os.getpid()
        elif victim == "prefill worker":
            pid = self.prefill_pid
        elif victim == "decode worker":
            pid = next(iter(children(pids["serve"])), 0)
        else:
            pid = pids[victim]
        self._say(f"struck {pid}" if pid else "nobody")
        if pid:
            os.kill(pid, number)

    def _say(self, line: str) -> None:
        with self._note.open("a") as file:
            file.write(line + "\n")


def bench(words: list[str], plan: dict[str, Any]) -> int:
    """A bench with its steps watched. Its own messages are what it is watched by; nothing else of it is touched."""
    steps = Steps(plan)
    pair.STALL_NS = pair.CONNECT_NS = SHORT_NS

    def before(kind: type, name: str, call: Callable[..., None]) -> None:
        original = getattr(kind, name)

        def watched(self: Any, *arguments: Any) -> Any:
            call(self, *arguments)
            return original(self, *arguments)

        setattr(kind, name, watched)

    def after(kind: type, name: str, call: Callable[..., None]) -> None:
        original = getattr(kind, name)

        def watched(self: Any, *arguments: Any) -> Any:
            result = original(self, *arguments)
            call(self, result, *arguments)
            return result

        setattr(kind, name, watched)

    def started(worker: WorkerProcess, *_: object) -> None:
        steps.prefill_pid = worker.pid

    def ended(worker: WorkerProcess, *_: object) -> None:
        steps.prefill_pid = 0

    before(Client, "send", lambda _, message: steps.sending(message))
    after(Client, "receive", lambda _, message, *__: steps.received(message))
    after(Client, "first_answer", lambda _, message, *__: steps.received(message))
    before(Session, "prefill", lambda _, __, command, ___: steps.at(f"to prefill: {type(command).__name__}"))
    after(Session, "prefill", lambda _, __, ___, command, ____: steps.at(f"from prefill: {type(command).__name__}"))
    after(WorkerProcess, "__init__", started)
    after(WorkerProcess, "end", ended)
    return bench_module.main(words)


def serve(words: list[str]) -> int:
    return serve_module.main(words)


def relay(port: int, target: int, ready: str) -> int:
    """Pass on what comes to the port until killed: then its connections break; or until stopped: then they stall.

    The file `ready` is there once it listens, and holds something once anyone has come.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", port))
    Path(ready).touch()
    while True:
        one, _ = listener.accept()
        Path(ready).write_text("used")
        try:
            other = socket.create_connection(("127.0.0.1", target))
        except OSError:
            one.close()
            continue
        for source, sink in ((one, other), (other, one)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
    finally:
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def spoiling_relay(port: int, target: int, ready: str, rule: dict[str, Any]) -> int:
    """Pass on what comes to the port, but for what the rule (a Spoil or Shuffle as a dict) says."""
    kind = spoiling.Shuffle if "seed" in rule else spoiling.Spoil
    spoiling.serve(port, target, Path(ready), kind(**rule))
    return 0
