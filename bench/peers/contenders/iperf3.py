"""iperf3 over loopback: one hot buffer in 1, 2 or 4 streams. Its own figure counts, of what the receiver got."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from environment import Environment, MissingError
from job import Job
from offer import LINK, Offer

STREAMS = (1, 2, 4)
STARTING_S = 30
REFUSED = "unable to connect"


def offers(environment: Environment) -> list[Offer]:
    try:
        program = environment.tool("iperf3", "iperf3", "libiperf0", "libsctp1")
    except MissingError as error:
        environment.leave_out("iperf3", error)
        return []
    environ = environment.library_path
    version = subprocess.run([program, "--version"], capture_output=True, text=True, env=environ, check=False)
    return [
        Offer(
            f"iperf3-{streams}",
            "iperf3",
            LINK,
            "tcp",
            version.stdout.split()[1],
            environ=environ,
            options={"program": str(program), "streams": streams},
        )
        for streams in STREAMS
    ]


class Side:
    """The initiator is the client and sends, in a pull too; the other side serves one test at a time."""

    address = 0

    def __init__(self, options: dict[str, Any], job: Job, role: str) -> None:
        self._program = options["program"]
        self._streams = options["streams"]
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
            subprocess.run([self._program, "-s", "-1", "-p", str(self._port)], capture_output=True, check=True)
        return None

    def _send(self) -> tuple[int, int]:
        command = [self._program, "-c", "127.0.0.1", "-p", str(self._port), "-J", "-P", str(self._streams)]
        command += ["-n", str(self._job.bytes)]
        give_up_at = time.monotonic() + STARTING_S
        while True:
            said = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
            if "error" not in said:
                received = said["end"]["sum_received"]
                return 0, round(self._job.bytes * 8e9 / received["bits_per_second"])
            if REFUSED not in said["error"] or time.monotonic() > give_up_at:
                raise RuntimeError(said["error"])
            time.sleep(0.01)  # the server is about to listen
