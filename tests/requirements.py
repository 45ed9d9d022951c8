"""What a test needs of the machine. `need("netns")` skips the test where that is missing, and says why; where
KVXFER_REQUIRE names it (a comma-separated list, as .ci/run sets it), the test fails instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

REQUIRE = "KVXFER_REQUIRE"


def need(name: str) -> None:
    """Return when the machine has what is named; skip or fail the test otherwise."""
    missing = PROBES[name]()
    if not missing:
        return
    if name in required():
        pytest.fail(f"{REQUIRE} names {name}, and it is missing here: {missing}", pytrace=False)
    pytest.skip(f"{name} is missing here: {missing}")


def required() -> set[str]:
    """What must not be left out."""
    return {name.strip() for name in os.environ.get(REQUIRE, "").split(",")}


@functools.cache
def missing_netns() -> str:
    """Why two shaped network namespaces cannot be made here; nothing when they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (Debian, Ubuntu: iproute2)"
    # Tools alone do not tell: a container may forbid namespaces, a kernel may lack veth or tbf.
    name = f"kvxfer{os.getpid()}probe"
    if failed := _failure(f"ip netns add {name}"):
        return failed
    try:
        return _failure(f"ip -n {name} link add probe0 type veth peer name probe1") or _failure(
            f"tc -n {name} qdisc add dev probe0 root tbf rate 1gbit burst 1mb latency 50ms"
        )
    finally:
        _failure(f"ip netns delete {name}")


@functools.cache
def missing_tun() -> str:
    """Why a link cannot be made of TUN devices here; nothing when it can."""
    from hosts.tun import open_tun

    try:
        descriptor, _ = open_tun()
    except OSError as error:
        return f"no device of /dev/net/tun: {error.strerror}"
    os.close(descriptor)
    return ""


@functools.cache
def missing_libfuzzer() -> str:
    """Why clang cannot build fuzz programs here; nothing when it can."""
    if shutil.which("clang++") is None:
        return "there is no `clang++` (Debian, Ubuntu: clang and libclang-rt-dev)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "target.cpp"
        source.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n')
        return _failure(f"clang++ -fsanitize=fuzzer,address,undefined -o {folder}/target {source}")


@functools.cache
def missing_atheris() -> str:
    """Why Python cannot be fuzzed with atheris here; nothing when it can."""
    if importlib.util.find_spec("atheris") is None:
        return (
            f"there is no atheris for Python {sys.version_info.major}.{sys.version_info.minor} (`pip install atheris`)"
        )
    return ""


def missing_fuzz() -> str:
    """Why a search cannot be guided by coverage; nothing when it can."""
    return missing_libfuzzer() or missing_atheris()


def missing_rdma() -> str:
    """Why the guest with an RDMA device cannot be made here; nothing when it can."""
    from rdma.packages import missing

    return missing()


def missing_gpu() -> str:
    """Why there is no GPU here whose memory could be moved; nothing when there is."""
    from gpu.driver import missing

    return missing()


def _failure(command: str) -> str:
    """What a command says when it fails; nothing when it does not."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else f"`{command}`: {' '.join(done.stderr.split())}"


PROBES: dict[str, Callable[[], str]] = {
    "netns": missing_netns,
    "tun": missing_tun,
    "fuzz": missing_fuzz,
    "rdma": missing_rdma,
    "gpu": missing_gpu,
}
"""By name: says why it is missing, or nothing."""
