"""CUDA memory over ucx: with a GPU where there is one (`need("gpu")`), and else through doubles of CUDA's driver and of
UCX's CUDA, whose memory ends any process that reads or writes it. What the doubles cannot tell is whether UCX and the
hardware do as they do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from requirements import need

from gpu import driver, moves
from kvxfer import _native as native

pytestmark = pytest.mark.skipif(not native.present("ucx"), reason="no UCX here")

TESTS = Path(__file__).parents[1]
DOUBLES = Path(__file__).with_name("doubles")
WITHIN_S = 300

REFUSALS = """
import numpy as np
from gpu.driver import Driver
from kvxfer import _native as native
from kvxfer.errors import KvxferError

driver = Driver()
driver.enter()
gpu, host = driver.allocate(1 << 21), np.zeros(8192, np.uint8).ctypes.data
context = native.open_context("ucx", b"k" * 32, {})
print(context.capabilities.memory == [native.MemoryKind.host, native.MemoryKind.cuda])
for refused in (
    lambda: context.allocate(4096, native.MemoryKind.cuda),
    lambda: context.register_memory(host, 4096, native.MemoryKind.cuda),
    lambda: context.register_memory(gpu, (1 << 21) + 1, native.MemoryKind.cuda),
    lambda: context.register_memory(gpu, 4096, native.MemoryKind.cuda),
    lambda: context.register_memory(gpu + 8, 8, native.MemoryKind.host),
):
    try:
        region = refused()
        print(region.id, region.kind.name, region.bytes)
    except KvxferError as error:
        print(type(error).__name__, error)
print(context.details()["memory"])
"""


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which there is a GPU that is none, and a UCX that takes it for one."""
    if shutil.which("g++") is None:
        pytest.skip("there is no `g++`")
    if not driver.missing():
        pytest.skip("there is a GPU: the real ones are tested")
    real = Path(native.probe("ucx").library_path)
    headers = real.parents[1] / "include"
    if not (headers / "ucp").is_dir() or "cuda" not in native.probe("ucx").transports.split(","):
        pytest.skip(f"{real} has no headers, or no CUDA")
    folder = tmp_path_factory.mktemp("gpu")
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-rpath,{folder}:{real.parent}"]
    cuda, ucp = folder / "libcuda.so.1", folder / "libucp_with_cuda.so"
    for target, linked in ((cuda, ["-Wl,-soname,libcuda.so.1"]), (ucp, ["-Wl,--no-as-needed", str(cuda), str(real)])):
        source = DOUBLES / f"{target.name.split('.')[0]}.cpp"
        subprocess.run([*compiler, "-o", str(target), str(source), *linked], check=True)
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {"LD_LIBRARY_PATH": path, "KVXFER_UCX_LIBRARY": str(ucp)}


def python(environment: dict[str, str], *arguments: str) -> str:
    """What an interpreter that can import what is here prints, which has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(TESTS)} | environment,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def moved(environment: dict[str, str], errors: int) -> list[dict[str, Any]]:
    """Every move, once it was found to be whole."""
    found: list[dict[str, Any]] = json.loads(python(environment, "-m", "gpu.moves", json.dumps({"errors": errors})))
    assert [(*move["kinds"], move["op"]) for move in found] == [
        (*kinds, op) for kinds in moves.WAYS for op in ("push", "pull")
    ]
    for move in found:
        assert [side["wrong"] for side in move["sides"]] == [0, 0], move
        assert [side["details"]["memory"] for side in move["sides"]] == move["kinds"]
    return found


@pytest.mark.parametrize("errors", [0, 1], ids=["peer", "none"])
def test_a_gpus_memory_moves(errors: int) -> None:
    """Over whatever UCX takes for it on this host; what that was is printed (pytest -rP)."""
    need("gpu")
    for move in moved({}, errors):
        told = [(side["transport"], side["details"].get("protocol")) for side in move["sides"]]
        print(*move["kinds"], move["op"], told)
        assert all(lane not in ("", "unknown") for side in move["sides"] for lane in side["transport"])


def test_it_is_named_and_reached_through_its_registration_alone(doubles: dict[str, str]) -> None:
    """Registered as CUDA memory, with its handle at every piece, in threads that CUDA knows; no CPU touches it."""
    moved(doubles, 0)


@pytest.mark.slow
def test_memory_that_is_not_what_it_is_said_to_be(doubles: dict[str, str]) -> None:
    said = python(doubles, "-c", REFUSALS).splitlines()
    not_a_gpus = "UsageError the memory to be registered as cuda memory is not a GPU's, or not all of it"
    instead = "register what the engine has allocated (cuMemAlloc, torch)"
    assert said == [
        "True",
        f"UnavailableError backend ucx allocates no cuda memory: {instead}",
        not_a_gpus,
        not_a_gpus,
        "0 cuda 4096",
        "UsageError this memory is registered as cuda memory already",
        "cuda",
    ]
