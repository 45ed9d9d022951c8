"""A worker process obeys commands of whoever has a key: in any order, with any values, it answers each or ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from kvxfer.control import messages as m
from kvxfer.errors import ExitStatus
from kvxfer.measure.process import WorkerProcess

from .commands import COMMANDS

COMMANDS_PER_WORKER = 40
WORKERS = 30
PATIENCE_NS = 50_000_000
MEMORY_BYTES = 1 << 30

NUMBERS = (-(1 << 63), -1, 0, 1, 2, 3, 4, 16, 4096, 1 << 16, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def vary(value: object, rng: random.Random) -> object:
    """A field's value, or one of the same type that means something else."""
    if rng.random() < 0.7:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    if isinstance(value, bytes):
        return rng.choice((b"", value[:-1], value * 3, rng.randbytes(len(value)), bytes(1 << 16)))
    if isinstance(value, list | tuple):
        changed = [vary(one, rng) for one in value]
        if isinstance(value, list):
            changed = changed * rng.choice((0, 1, 1, 1, 2, 7))
        return type(value)(changed)
    if isinstance(value, dict):
        return rng.choice(({}, {"connections": rng.choice(NUMBERS)}, {"no such": 1}))
    return value


def commands(rng: random.Random) -> Iterator[m.WorkerCommand]:
    """Those of a run in their order, some of them left out, repeated or changed. None of them may wait for long."""
    for number in range(COMMANDS_PER_WORKER):
        body = COMMANDS[number % len(COMMANDS)] if rng.random() < 0.7 else rng.choice(COMMANDS)
        fields = {name: vary(getattr(body, name), rng) for name in type(body).__struct_fields__}
        fields |= {name: PATIENCE_NS for name in ("timeout_ns", "stall_ns", "max_ns") if name in fields}
        if isinstance(body, m.Run):
            fields["op"] = rng.choice(("push", "pull"))
        if isinstance(body, m.Open):
            fields["token"] = body.token
            fields["address"] = "127.0.0.1"
            fields["port"] = 0
        if isinstance(body, m.Connect):
            fields["endpoint"] = rng.choice(("", "127.0.0.1:1", "[::1]:1", ":", "127.0.0.1:99999"))
        yield type(body)(**fields)


def obey(worker: WorkerProcess, command: m.Command, seconds: float = 60) -> m.FromWorker:
    worker.send(command)
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        for message in worker.receive():
            if isinstance(message, m.Answer | m.Failed) and message.seq in (0, command.seq):
                return message
        time.sleep(0.001)
    raise AssertionError(f"no answer to {command}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(WORKERS))
def test_a_worker_survives_what_it_is_told(seed: int) -> None:
    rng = random.Random(seed)
    worker = WorkerProcess("decode")
    try:
        worker.limit_memory(MEMORY_BYTES)
        for seq, body in enumerate(commands(rng), 1):
            said = obey(worker, m.Command(seq, body))
            assert said.seq == seq, f"{body} ended the worker: {said}"
            assert not isinstance(said, m.Failed) or said.status in set(ExitStatus), said
    finally:
        worker.end(lambda: None)
