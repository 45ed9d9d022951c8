"""ucx_perftest: one hot buffer of the job's piece size, put or got as often as the job has pieces."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from environment import Environment, MissingError
from job import Job
from offer import LINK, Offer

PACKAGES = ("ucx-utils", "libucx0", "libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
TRANSPORTS = {
    "tcp": ("tcp", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
    "shm": ("memory", {"UCX_TLS": "posix,cma"}),
}
MIB = 1 << 20
WARM_UP = 100  # requests; its default of 10,000 would take longer than the test
STARTING_S = 30
RATE_COLUMN = 5  # of the last line: iterations, three latencies, average and overall bandwidth in MiB/s (labelled MB/s)


def offers(environment: Environment) -> list[Offer]:
    try:
        program = environment.tool("ucx_perftest", *PACKAGES)
    except MissingError as error:
        environment.leave_out("ucx_perftest", error)
        return []
    environ = environment.library_path
    said = subprocess.run(
        [program.parent / "ucx_info", "-v"], capture_output=True, text=True, env=os.environ | environ, check=False
    )
    version = said.stdout.split("\n", 1)[0].rsplit(" ", 1)[-1]
    return [
        Offer(
            f"ucx_perftest-{name}",
            "ucx_perftest",
            LINK,
            transport,
            version,
            environ=environ | transports | {"UCX_LOG_LEVEL": "error"},
            options={"program": str(program)},
        )
        for name, (transport, transports) in TRANSPORTS.items()
    ]


class Side:
    address = 0

    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self._program = options["program"]
        self._job = job
        self._serves = role != job.initiator

    def open(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def allocate(self) -> None:
        pass

    def connect(self, swap: Callable[[Any], Any]) -> None:
        theirs = swap(self._port)
        self._port = self._port if self._serves else theirs

    def move(self, _: int, count: int) -> list[tuple[int, int]] | None:
        if not self._serves:
            return [self._send() for _ in range(count)]
        for _ in range(count):
            subprocess.run([self._program, "-p", str(self._port)], capture_output=True, check=True)
        return None

    def _send(self) -> tuple[int, int]:
        test = "ucp_put_bw" if self._job.op == "push" else "ucp_get"
        command = [self._program, "127.0.0.1", "-p", str(self._port), "-t", test, "-f", "-v", "-w", str(WARM_UP)]
        command += ["-s", str(self._job.piece_bytes), "-n", str(self._job.descriptors)]
        give_up_at = time.monotonic() + STARTING_S
        while True:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                rate = float(run.stdout.strip().splitlines()[-1].split(",")[RATE_COLUMN])
                return 0, round(self._job.bytes / (rate * MIB) * 1e9)
            if time.monotonic() > give_up_at:
                raise RuntimeError((run.stderr or run.stdout).strip().splitlines()[-1])
            time.sleep(0.01)  # the server is about to listen
