"""What happens outside the timed part, against the memory's bandwidth on all cores: filling to memset, verifying to
reading.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contenders.bare_sockets import SOURCE
from environment import MissingError
from goals import Goal, Unanswered
from pair import OursFailedError
from run import KIB, MIB, Run

from kvxfer import _native

ORDER = 10
NAME = "fill-verify"
SIZE = 512 * MIB
QUICK_SIZE = 64 * MIB
PIECE = 64 * KIB


def measure(run: Run) -> None:
    """Each round does all four, one after another."""
    try:
        library = ctypes.CDLL(str(run.environment.compiled(SOURCE)))
    except MissingError as error:
        run.goals.append(Unanswered("fill and verify ÷ memory bandwidth", str(error)))
        return
    run.say("fill and verify")
    size = QUICK_SIZE if run.quick else SIZE
    memory = _native.Mapping(size)
    regions = _native.Regions([(memory.address, size)])
    leg = _leg(size)
    actions: dict[str, Callable[[], object]] = {
        "memset": lambda: _native.poison(memory.address, size),
        "fill": lambda: _native.fill(regions, 1),
        "read": lambda: _read(library, memory.address, size),
        "verify": lambda: _verify(regions, leg),
    }
    taken: dict[str, list[int]] = {name: [] for name in actions}
    for turn in range(run.rounds + 1):
        for name, action in actions.items():
            began = time.monotonic_ns()
            action()
            if turn > 0:  # the first one is for warming up
                taken[name].append(time.monotonic_ns() - began)
    for ours, floor in (("fill", "memset"), ("verify", "read")):
        ratios = [f / o for o, f in zip(taken[ours], taken[floor], strict=True)]
        rate = size / float(np.median(taken[floor]))
        note = f"{floor} {rate:.1f} GB/s on {_native.usable_cores()} cores"
        run.goals.append(Goal(f"{ours} ÷ {floor} on all cores", 0.7, True, ratios, note=note))


def _read(library: ctypes.CDLL, address: int, size: int) -> None:
    total = ctypes.c_uint64()
    library.floor_read(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size // 8),
        ctypes.c_size_t(_native.usable_cores()),
        ctypes.byref(total),
    )


def _verify(regions: _native.Regions, leg: _native.Leg) -> None:
    if _native.verify(regions, leg, 1, 0, 1).wrong_words:
        raise OursFailedError("memory that was just filled does not hold the pattern")


def _leg(size: int) -> _native.Leg:
    """All of the memory in scattered pieces. A leg has a peer and a plan, whatever its pieces."""
    sys.path.append(str(Path(__file__).parents[2] / "suites"))
    from moving import connected

    count = size // PIECE
    offsets = np.random.default_rng(0).permutation(count).astype(np.uint64) * np.uint64(PIECE)
    zeros, lengths = np.zeros(count, np.uint32), np.full(count, PIECE, np.uint64)
    some = connected("null", 4 * KIB, 64 * KIB)
    return _native.Leg(some.peer, some.plans[0], zeros, offsets, zeros, offsets, lengths)
