"""ucx_perftest: one hot buffer of the job's piece size, put or got as often as the job has pieces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from environment import Environment, MissingError
from link_test import LinkTest
from offer import LINK, Offer
from ucx_library import UcxLibrary

PACKAGES = ("ucx-utils", "libucx0", "libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
TRANSPORTS = {
    "tcp": ("tcp", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
    "shm": ("memory", {"UCX_TLS": "posix,cma"}),
}
MIB = 1 << 20
WARM_UP = 100  # requests; its default of 10,000 would take longer than the test
RATE_COLUMN = 5  # of the last line: iterations, three latencies, average and overall bandwidth in MiB/s (labelled MB/s)


def offers(environment: Environment) -> list[Offer]:
    try:
        program, environ = _program(environment)
    except MissingError as error:
        environment.leave_out("ucx_perftest", error)
        return []
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


def _program(environment: Environment) -> tuple[Path, dict[str, str]]:
    """That of the UCX that kvxfer uses, where it brings one; else Debian's. Raises MissingError."""
    with contextlib.suppress(MissingError):
        folder = UcxLibrary.of_kvxfer().folder
        if (beside := folder.parent / "bin" / "ucx_perftest").exists():
            return beside, {"LD_LIBRARY_PATH": str(folder)}
    return environment.tool("ucx_perftest", *PACKAGES), environment.library_path


class Side(LinkTest):
    def server(self, port: str) -> list[str]:
        return ["-p", port]

    def client(self, port: str) -> list[str]:
        test = "ucp_put_bw" if self.job.op == "push" else "ucp_get"
        sizes = ["-s", str(self.job.piece_bytes), "-n", str(self.job.descriptors), "-w", str(WARM_UP)]
        return ["127.0.0.1", "-p", port, "-t", test, "-f", "-v", *sizes]

    def bytes_per_s(self, said: str) -> float:
        return float(said.strip().splitlines()[-1].split(",")[RATE_COLUMN]) * MIB
