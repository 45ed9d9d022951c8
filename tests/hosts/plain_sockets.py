"""Move bytes through a plain TCP socket, the control beside kvxfer:

plain_sockets.py receive ADDRESS PORT     prints `ready`, then the seconds from accepting to the last byte
plain_sockets.py send ADDRESS PORT BYTES
"""

from __future__ import annotations

import socket
import sys
import time

PIECE = 1 << 20


def receive(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    began = time.monotonic()
    room = bytearray(PIECE)
    while connection.recv_into(room):
        pass
    print(time.monotonic() - began)


def send(address: str, port: int, left: int) -> None:
    piece = memoryview(bytes(PIECE))
    with socket.create_connection((address, port)) as connection:
        while left:
            left -= connection.send(piece[: min(left, PIECE)])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
