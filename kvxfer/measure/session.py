"""Session: the coordinator's hold on both sides of a run.

The prefill worker is a process of ours, the decode worker one of a `serve` process, here or on another host. Commands
go to both at once; whichever side fails first, the session says why within a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import zmq

from kvxfer import __version__
from kvxfer.control import messages as m
from kvxfer.control.channel import Client
from kvxfer.errors import ExitStatus, PeerLostError, UsageError, from_status
from kvxfer.measure.process import WorkerProcess

GRACE_S = 1.0
"""After one side lost its peer, how long to wait for the other side to say what happened to it."""

A = TypeVar("A", bound=m.Message)
T = TypeVar("T")


class Session:
    """One coordinator, one server; pairs of workers come and go."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefill: dict[int, WorkerProcess] = {}
        self._seq = 0
        self._heard_at = time.monotonic()
        self._told_at = 0.0
        answer = client.first_answer(m.Hello(m.PROTOCOL, __version__))
        if isinstance(answer, m.Failed):
            raise from_status(answer.status, answer.message)
        if not isinstance(answer, m.Welcome):
            raise UsageError(f"{client.name} answered out of turn; it is no kvxfer serve of this version")
        if answer.protocol != m.PROTOCOL:
            raise UsageError(
                f"{client.name} runs kvxfer {answer.version} (control protocol {answer.protocol}), this is "
                f"{__version__} (protocol {m.PROTOCOL}); install the same version on both hosts"
            )
        self.welcome = answer

    def launch(self, pair: int) -> None:
        """A fresh worker on each side; earlier ones of this number are ended."""
        self.dismiss(pair)
        self._prefill[pair] = WorkerProcess("prefill")
        self._client.send(m.Launch(pair))
        self._await_server(m.Launched)

    def dismiss(self, pair: int) -> None:
        """End both workers of a pair."""
        worker = self._prefill.pop(pair, None)
        if worker is not None:
            worker.end(self.keep_alive)
            self._client.send(m.Dismiss(pair))
            self._await_server(m.Dismissed)

    def close(self) -> None:
        """End all workers without waiting for the server, which hears at first that it may end its own."""
        self._client.send(m.Bye())
        for worker in self._prefill.values():
            worker.kill()
        for worker in self._prefill.values():
            worker.end(lambda: None)
        self._prefill.clear()
        self._client.close()

    def both(self, pair: int, prefill: m.WorkerCommand, decode: m.WorkerCommand, answer: type[A]) -> tuple[A, A]:
        """Give both workers of a pair a command; returns both answers, prefill's first.

        Raises the KvxferError of the side that failed.
        """
        self._seq += 1
        self._send_prefill(pair, prefill)
        self._send_decode(pair, decode)
        answers = self._answers({"prefill", "decode"})
        return _expect(answers["prefill"], answer), _expect(answers["decode"], answer)

    def prefill(self, pair: int, command: m.WorkerCommand, answer: type[A]) -> A:
        """The same for the prefill worker alone."""
        self._seq += 1
        self._send_prefill(pair, command)
        return _expect(self._answers({"prefill"})["prefill"], answer)

    def decode(self, pair: int, command: m.WorkerCommand, answer: type[A]) -> A:
        """The same for the decode worker alone."""
        self._seq += 1
        self._send_decode(pair, command)
        return _expect(self._answers({"decode"})["decode"], answer)

    def minding(self, work: Callable[[], T]) -> T:
        """What `work` returns, which takes long: another thread does it, and both sides are minded meanwhile.

        Raises what it raises, and the KvxferError of a side that is lost.
        """
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            while not done.done():
                for side, message in self._messages():
                    _require_whole(side, message)
        return done.result()

    # --- waiting

    def _send_prefill(self, pair: int, command: m.WorkerCommand) -> None:
        self._prefill[pair].send(m.Command(self._seq, command, pair))

    def _send_decode(self, pair: int, command: m.WorkerCommand) -> None:
        self._client.send(m.Command(self._seq, command, pair))

    def _answers(self, wanted: set[str]) -> dict[str, m.WorkerAnswer]:
        answers: dict[str, m.WorkerAnswer] = {}
        failures: dict[str, m.Failed] = {}
        give_up_at = float("inf")
        while wanted - answers.keys():
            for side, message in self._messages():
                if isinstance(message, m.Failed) and message.seq in (0, self._seq):
                    if side not in failures or _is_symptom(failures[side]):
                        failures[side] = message
                elif isinstance(message, m.Answer) and message.seq == self._seq:
                    answers[side] = message.body
            if failures:
                # A lost peer is a symptom: the other side may be about to say why it went, or that it was killed.
                give_up_at = min(give_up_at, time.monotonic() + GRACE_S)
                cause = min(failures.values(), key=lambda f: (f.seq != 0, _is_symptom(f)))
                if not _is_symptom(cause):
                    raise from_status(cause.status, cause.message)
                if time.monotonic() >= give_up_at:
                    raise PeerLostError(_why_lost({side: failure.message for side, failure in failures.items()}))
        return answers

    def _await_server(self, wanted: type[m.Message]) -> None:
        while True:
            for side, message in self._messages():
                _require_whole(side, message)
                if isinstance(message, wanted):
                    return

    def _messages(self) -> Iterator[tuple[str, m.Message]]:
        """What came from either side within a short wait. Keeps the heartbeat going and minds the server's."""
        poller = zmq.Poller()
        poller.register(self._client.socket, zmq.POLLIN)
        for worker in self._prefill.values():
            poller.register(worker.fileno(), zmq.POLLIN)
        poller.poll(round(m.HEARTBEAT_S * 500))
        self.keep_alive()
        for worker in list(self._prefill.values()):
            for said in worker.receive():
                yield "prefill", said
        lost = self._client.lost()  # before its last messages are taken
        while (message := self._client.receive(0)) is not None:
            self._heard_at = time.monotonic()
            lost = False  # the next look finds it lost again, unless our caller finds in these messages why it is
            yield "decode", message
        if lost:
            raise PeerLostError(f"the connection to the decode side at {self._client.name} was closed")
        if time.monotonic() - self._heard_at > m.SILENCE_S:
            raise PeerLostError(f"the decode side at {self._client.name} has not answered for {m.SILENCE_S:.0f} s")

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due; to be called at least every second while computing."""
        now = time.monotonic()
        if now - self._told_at > m.HEARTBEAT_S:
            self._told_at = now
            self._client.send(m.Heartbeat())


def _require_whole(side: str, message: m.Message) -> None:
    """Raises the KvxferError of a side that fails while it has no command."""
    if isinstance(message, m.Failed) and (side == "prefill" or message.seq == 0):
        raise from_status(message.status, message.message)


def _is_symptom(failure: m.Failed) -> bool:
    """Of a command that failed because the other side is gone, and not of a worker that ended."""
    return failure.seq != 0 and failure.status == ExitStatus.PEER_LOST


def _why_lost(said: dict[str, str]) -> str:
    """Which of two reasons is what came of the other one, only the reader can tell."""
    if len(set(said.values())) < 2:
        return next(iter(said.values()))
    return f"{said['prefill']} (the decode side: {said['decode']})"


def _expect(answer: m.WorkerAnswer, wanted: type[A]) -> A:
    if not isinstance(answer, wanted):
        raise PeerLostError(f"a worker answered with {type(answer).__name__} where {wanted.__name__} belongs")
    return answer


@contextmanager
def open_session(client: Client) -> Iterator[Session]:
    """A session that is closed whatever happens; nothing of it is left behind."""
    try:
        session = Session(client)
    except BaseException:
        client.close()
        raise
    try:
        yield session
    finally:
        session.close()
