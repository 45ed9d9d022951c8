"""iperf3 over loopback: one hot buffer in 1, 2 or 4 streams, under the congestion control that kvxfer takes there. Its
own figure counts, of what the receiver got.
"""

from __future__ import annotations

import json
import subprocess

from environment import Environment, MissingError
from link_test import LinkTest
from offer import LINK, Offer

STREAMS = (1, 2, 4)


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


class Side(LinkTest):
    """The client sends, in a pull too."""

    def server(self, port: str) -> list[str]:
        return ["-s", "-1", "-p", port]

    def client(self, port: str) -> list[str]:
        streams = str(self.options["streams"])
        return ["-c", "127.0.0.1", "-p", port, "-J", "-P", streams, "-n", str(self.job.bytes), "-C", "reno"]

    def bytes_per_s(self, said: str) -> float:
        received = json.loads(said)["end"].get("sum_received", {})  # none when the server was not there yet
        return float(received.get("bits_per_second", 0)) / 8
