"""`make fuzz`: a bounded search, guided by coverage: libFuzzer (clang) for C++, atheris for Python.

FUZZ_SECONDS of each target, 3 by default. Without clang or atheris the same inputs are changed by a seed, unless
KVXFER_REQUIRE names fuzz. What breaks a target is left in build/fuzz/, to be put into its corpus as crash-WHAT.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from requirements import missing_atheris, missing_libfuzzer, need, required

from .targets import CORPUS, TARGETS

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
SECONDS = os.environ.get("FUZZ_SECONDS", "3")
LIMITS = ("-timeout=60", "-rss_limit_mb=2048", f"-max_total_time={SECONDS}")

OF_ITS_OWN = ("sh", "-c", '"$@"; exit $?', "sh")
"""What Python starts itself inherits the peak of Python's memory, and -rss_limit_mb is held against the peak."""

NATIVE = ("wire", "wire_shm", "wire_cma", "keys", "ucx")

pytestmark = pytest.mark.slow


def require_or_warn(missing: str) -> bool:
    """Whether the search can be guided; where it has to be and cannot, the test fails."""
    if missing and "fuzz" in required():
        need("fuzz")
    if missing:
        warnings.warn(f"a search without coverage: {missing}", stacklevel=2)
    return not missing


def search(name: str, command: list[str], **environment: str) -> str:
    """What the search of a target said. WHAT_BACKEND starts from the corpus of WHAT."""
    found = BUILD / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    artifacts = f"-artifact_prefix={BUILD}/{name}-"
    corpus = CORPUS / name.split("_", 1)[0]
    command = [*command, f"-seed={int(time.time())}", artifacts, *LIMITS, str(found), str(corpus)]
    done = subprocess.run(
        [*OF_ITS_OWN, *command],
        capture_output=True,
        text=True,
        errors="replace",
        env=os.environ | environment,
        timeout=10 * float(SECONDS) + 300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said[-6000:]}"
    return said


@pytest.fixture(scope="session")
def programs() -> Path:
    """The fuzz programs, under sanitizers; with libFuzzer where clang has it."""
    guided = require_or_warn(missing_libfuzzer())
    build = BUILD / ("libfuzzer" if guided else "driver")
    cmake = Path(sys.executable).with_name("cmake")
    options = ["-DKVXFER_PYTHON=OFF", "-DKVXFER_TESTS=ON", "-DKVXFER_SANITIZE=address,undefined", "-Wno-dev"]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")  # whose packages have UCX's headers
    if guided:
        options += ["-DKVXFER_LIBFUZZER=ON", f"-DCMAKE_CXX_COMPILER={shutil.which('clang++')}"]
    for step in (
        [cmake, "-S", ROOT, "-B", build, *options],
        [cmake, "--build", build, "--parallel", "2", "--target", *(f"kvxfer_fuzz_{name}" for name in NATIVE)],
    ):
        done = subprocess.run([str(word) for word in step], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return build / "csrc" / "tests"


@pytest.mark.parametrize("name", NATIVE)
def test_native(programs: Path, name: str) -> None:
    # Leaks are looked for by the native tests; here the attacked context is kept on purpose.
    search(name, [str(programs / f"kvxfer_fuzz_{name}"), "-max_len=16384"], ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.parametrize("name", TARGETS)
def test_python(name: str, tmp_path: Path) -> None:
    guided = require_or_warn(missing_atheris())
    said = search(name, [sys.executable, str(Path(__file__).with_name("run.py")), name], TMPDIR=str(tmp_path))
    assert not guided or " cov: " in said, "atheris sees no coverage: the search is blind"
