"""One of each command that a worker takes."""

from __future__ import annotations

from kvxfer.control import messages as m
from kvxfer.model.mlp import Mlp
from kvxfer.model.recurrence import MAMBA2, Recurrence
from kvxfer.model.widths import Attention, Widths

COMMANDS: tuple[m.WorkerCommand, ...] = (
    m.Open("tcp", bytes(range(32)), {"connections": 2}, "127.0.0.1", 0),
    m.Allocate([4096, 4096], [4096, 4096], [[(0, 0, 0, 0, 4096, 4096, 0, 0, 4096, 1, 0, 0, 1)]]),
    m.Register(),
    m.Connect("127.0.0.1:7421", 10**10),
    m.ExportKeys(),
    m.ImportKeys(b"KVXK" + bytes(16)),
    m.Prepare([4], [bytes(16)], [bytes(16)], 10**10),
    m.Fill(7, poison=True),
    m.Verify(7, 0, 3, 1),
    m.Run("push", 1, 8, 1, True, False, 10**10, 7),
    m.BuildLayers(
        [
            [
                Widths(64, Attention(4, 2, 16, 16), mlp=Mlp(128)),
                Widths(64, Attention(4, 4, 16, 16, rank=8, rope=4), mlp=Mlp(64, 8, 2, 32), own_experts=4),
                Widths(64, recurrence=Recurrence(MAMBA2, 2, 8, 4, 16, 4)),
            ]
        ],
        32,
    ),
    m.Pipeline(0, "push", 9, 2, 3, 1, "all", "timed", [1000], [64], [0, 1], True, 10**10, 7),
    m.Copy(1 << 30, 10**9),
    m.Describe(),
    m.Ping(),
)
