"""Real runs with the extension built under sanitizers: whatever they report in any of the processes fails the test.

The interpreter and its libraries are not instrumented. AddressSanitizer watches all heap memory anyway, UBSan the
extension alone. ThreadSanitizer sees the extension's threads, and of the interpreter only what it calls in there
(ignore_noninstrumented_modules); whether Python code itself races is not asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_process.processes import Place

from kvxfer import _native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"

LIBRARY = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Leaks: the interpreter's own would drown ours, and a worker leaves by _exit(); csrc/tests look for them.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Thread-local memory 16 bytes into a page: it takes what is before it for its length.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:intercept_tls_get_addr=0",
}

# What runs from build/ is this checkout with another extension: not what an editable install points to.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""


@pytest.fixture(params=LIBRARY)
def sanitizer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def package(sanitizer: str) -> Path:
    """A folder for PYTHONPATH with kvxfer in it, whose extension is built under the sanitizer.

    Beside the native tests of `make sanitize`, whose objects it takes.
    """
    build = ROOT / "build" / f"sanitize-{sanitizer.split(',')[0]}"
    cmake = Path(sys.executable).with_name("cmake")
    nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
    run(
        *(cmake, "-S", ROOT, "-B", build, "-Wno-dev", f"-DKVXFER_SANITIZE={sanitizer}", "-DKVXFER_PYTHON=ON"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"),
    )
    run(cmake, "--build", build, "--parallel", "2", "--target", "_native")
    folder = build / "package"
    (folder / "kvxfer").mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (extension,) = build.glob("csrc/_native*.so")
    for path in (*PACKAGE.iterdir(), extension):
        link = folder / "kvxfer" / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return folder


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def watched(package: Path, sanitizer: str, tmp_path: Path) -> Iterator[Place]:
    """A place all of whose processes run under the sanitizer; fails when one of them had something to report."""
    place = Place()
    reports = tmp_path / "reports"
    reports.mkdir()
    libraries = [run("g++", f"-print-file-name={name}").strip() for name in (LIBRARY[sanitizer], "libstdc++.so.6")]
    place.environment |= {"LD_PRELOAD": " ".join(libraries), "PYTHONPATH": str(package)}
    place.environment |= {name: f"{options}:log_path={reports}/report" for name, options in OPTIONS.items()}
    # Its memory hooks run in threads that are ending, for which ThreadSanitizer has no state any more.
    place.environment["UCX_MEM_EVENTS"] = "n"
    yield place
    place.close()
    told = [path.read_text(errors="replace") for path in sorted(reports.iterdir())]
    assert not told, "\n".join(told)[:8000]


def available_backends() -> list[str]:
    return [name for name, _ in _native.backends() if _native.probe(name).available]


def test_every_backend_pushes_and_pulls(watched: Place, package: Path) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "from kvxfer import _native; print(_native.__file__)"],
        capture_output=True,
        text=True,
        env=watched.environment,
        cwd=watched.directory,
        check=True,
    ).stdout
    assert where.startswith(str(package)), where
    for backend in available_backends():
        rows = watched.measure("--backend", backend, "--op", "both", "--inflight", "4", "--tokens", "70,200")["results"]
        assert [row["status"] for row in rows] == ["ok"] * 4, rows


def test_a_report_fails_the_test(sanitizer: str, tmp_path: Path) -> None:
    """The options that the workers get lead reports where they are looked for."""
    source = tmp_path / "broken.cpp"
    # Writes at the very same moment are a race that ThreadSanitizer may miss: a relaxed flag, which orders nothing,
    # has the second wait for the first.
    source.write_text(
        "#include <atomic>\n#include <thread>\nint shared;\nstd::atomic<bool> written;\n"
        "int main(int argc, char**) {\n"
        "  std::thread other([] { shared = 1; written.store(true, std::memory_order_relaxed); });\n"
        "  while (!written.load(std::memory_order_relaxed)) {}\n  shared = 2;\n  other.join();\n"
        "  int* gone = new int[argc];\n  delete[] gone;\n  return gone[0];\n}\n"
    )
    run("g++", "-std=c++20", "-g", f"-fsanitize={sanitizer}", "-o", tmp_path / "broken", source)
    environment = {name: f"{options}:log_path={tmp_path}/report" for name, options in OPTIONS.items()}
    done = subprocess.run([tmp_path / "broken"], env=os.environ | environment, timeout=60, check=False)
    assert done.returncode != 0
    assert list(tmp_path.glob("report*"))
