"""What surrounds a run and is not its peer: the clock of the day, the terminal, who reads the output, the disk."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from two_process.processes import QUICK, Place, Running, command_line, free_port, prefill_worker, wait_until
from two_process.test_bad_input import tiny_disk

import kvxfer
from kvxfer import _native

pytestmark = pytest.mark.slow

# --- a clock that is set during a run


WALL_CLOCK = {"time.time", "time.time_ns", "time.ctime", "datetime.now", "datetime.utcnow", "datetime.today"}


def wall_clock_calls(tree: ast.Module) -> list[str]:
    """The statements that read the clock of the day."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func) in WALL_CLOCK]


def test_python_reads_the_clock_of_the_day_only_for_a_date() -> None:
    """What waits, waits by the monotonic clock, as the standard library and ZeroMQ do."""
    found = {}
    for path in sorted(Path(kvxfer.__file__).parent.rglob("*.py")):
        text = path.read_text()
        assert "CLOCK_REALTIME" not in text, path
        calls = wall_clock_calls(ast.parse(text))
        if calls:
            found[path.name] = calls
            assert text.count('"created_utc": datetime.now(') == len(calls), path
    assert set(found) == {"run.py", "plan.py", "model_command.py", "explained.py"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils)")
def test_native_code_cannot_wait_by_the_clock_of_the_day() -> None:
    """None of the functions is linked that would: a condition variable's timed wait has its clock in its name."""
    symbols = subprocess.run(["nm", "-D", "-u", _native.__file__], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1].split("@")[0] for line in symbols.splitlines()]
    assert "pthread_cond_clockwait" in names
    by_the_day = ("pthread_cond_timedwait", "gettimeofday", "time", "ftime", "timespec_get", "sem_timedwait")
    assert not [name for name in names if name in by_the_day or "system_clock" in name]


HOUR_S = 3600
LOOK = "import time; a, b = time.time(), time.time(); c = time.monotonic(); print(b - a, time.monotonic() - c)"


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload; see its source."""
    library = tmp_path_factory.mktemp("clock") / "jumping_clock.so"
    source = Path(__file__).with_name("jumping_clock.cpp")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++")
@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_clock_of_the_day_that_is_set_again_and_again(place: Place, jumping_clock: Path, jump_s: int) -> None:
    """In bench, in serve and in their workers: no wait and no duration is by that clock."""
    place.environment |= {"LD_PRELOAD": str(jumping_clock), "KVXFER_JUMP_S": str(jump_s)}
    place.environment["UCX_MEM_EVENTS"] = "n"  # by that clock UCX waits where it patches the C library
    looked = subprocess.run([sys.executable, "-c", LOOK], env=place.environment, capture_output=True, text=True)
    day, monotonic = map(float, looked.stdout.split())
    assert abs(day - jump_s) < 60 > monotonic >= 0

    server = place.serve()
    began = time.monotonic_ns()
    result = place.measure("--peer", server.address, "--backend", "all")
    took = time.monotonic_ns() - began
    assert result["exit_status"] == 0
    rows = [row for row in result["results"] if row["status"] == "ok"]
    assert len(rows) == len(result["results"]) > 1
    for row in rows:
        phases = {name: phase["samples"] for name, phase in row["setup"].items()}
        for times in (row["samples_ns"], row["post_ns"], *phases.values()):
            assert all(0 <= one < took for one in times), row["id"]
        assert min(row["samples_ns"]) > 0
        assert sum(row["samples_ns"]) < took
        assert phases["cold_ns"] == [sum(sum(each) for name, each in phases.items() if name != "cold_ns")]
    place.left_alone(server)


# --- a terminal that is resized


WIDTHS = (20, 3, 200, 1, 80)


def drawn(bench: Running) -> list[str]:
    """The lines of progress so far."""
    return re.findall(r"\x1b\[2m(.*?)\x1b\[0m", bench.err)


def fits(line: str, columns: int) -> bool:
    """Whether a line of progress was cut for that width, if it had to be."""
    return len(line) == columns and line.endswith("…") if columns <= 20 else line.endswith(" samples")


def test_a_terminal_resized_while_progress_is_shown(place: Place) -> None:
    for name in ("COLUMNS", "LINES"):  # which count for more than the terminal
        place.environment.pop(name, None)
    bench = place.start_bench("--max-seconds", "60", "--min-samples", "1000000", terminal=True)
    bench.says(" samples", times=2)
    for columns in WIDTHS:
        with open(f"/proc/{bench.pid}/fd/2", "wb", buffering=0) as terminal:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, columns, 0, 0))
        bench.signal(signal.SIGWINCH)
        wait_until(lambda width=columns: fits(drawn(bench)[-1], width), 20, f"progress in {columns} columns")
    bench.signal(signal.SIGINT)
    done = bench.wait(10)
    assert (done.status, done.err.strip()) == (130, "kvxfer bench: interrupted")
    place.left_alone()


# --- signals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_serve_ends_in_order_with_nobody_there(place: Place, number: int) -> None:
    server = place.serve()
    server.signal(number)
    done = server.wait(5)
    assert (done.status, done.err.splitlines()[-1]) == (130, "kvxfer serve: interrupted")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_bench_of_its_own_ends_in_order(place: Place, number: int) -> None:
    bench = place.start_bench("--max-seconds", "30", "--min-samples", "1000000", terminal=True)
    bench.says(" samples", times=2)
    bench.signal(number)
    done = bench.wait(10)
    assert (done.status, done.err.strip()) == (130, "kvxfer bench: interrupted")
    place.left_alone()


# --- who reads the output


def shell(place: Place, script: str) -> tuple[int, str]:
    """A bash script in which $KVXFER is the command and $BENCH a quick bench; its status and stderr."""
    python = f"{sys.executable} -m"
    environment = place.environment | {
        "KVXFER": f"{python} kvxfer.cli",
        "BENCH": f"{python} kvxfer.bench --model {place.model} --tokens 16 {' '.join(QUICK)}",
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("$BENCH | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}", {1}, ""),  # the rest of the tables had no reader
        ("$BENCH | true; exit ${PIPESTATUS[0]}", {1}, ""),
        ("$BENCH >&-", {0}, ""),
        ("$BENCH <&- >&- 2>&-", {0}, ""),
        ("$BENCH 2>&- >/dev/null", {0}, ""),
        ("$BENCH >/dev/full", {3}, "No space left"),
        ("$BENCH --op pusch 2>&-", {2}, ""),
        ("$BENCH --op pusch 2>/dev/full", {2}, ""),
        ("($BENCH --op pusch) 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", {2}, ""),
        ("$KVXFER --help | true; exit ${PIPESTATUS[0]}", {0, 1}, ""),
        ("$KVXFER --help >/dev/full", {3}, "No space left"),
        ("$KVXFER --version >&-", {0}, ""),
        ("$KVXFER plan --model 8b | true; exit ${PIPESTATUS[0]}", {0, 1}, ""),
    ],
)
def test_output_that_goes_nowhere(place: Place, script: str, status: Sequence[int], says: str) -> None:
    ended, err = shell(place, script)
    assert ended in status, err
    assert says in err
    assert len(err.splitlines()) == bool(says), err
    place.left_alone()


def test_an_error_that_nobody_reads_keeps_its_status(place: Place) -> None:
    """A lost peer is 5, whether or not anyone is told."""
    reader, writer = os.pipe()

    def broken_stderr() -> None:
        os.dup2(writer, 2)

    bench = place.start_bench("--max-seconds", "30", "--min-samples", "1000000", preexec_fn=broken_stderr)
    os.close(writer)
    os.close(reader)
    os.kill(prefill_worker(bench), signal.SIGKILL)
    assert bench.wait().status in (3, 5)  # 3: it had not even started


# --- a serve of which nobody reads anything, or whose disk is full


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | true"])
def test_serve_with_nowhere_to_write(place: Place, streams: str) -> None:
    """It serves, and ends as ever. Its log goes nowhere, and none of its files takes the log's number."""
    port = free_port()
    command = f"{sys.executable} -m kvxfer.serve --port {port} {streams}; exit ${{PIPESTATUS[0]}}"
    shell = place.start_command(["bash", "-c", command])
    wait_until(lambda: accepts(port), 20, "serve")
    assert place.measure("--peer", f"127.0.0.1:{port}")["exit_status"] == 0
    (serve,) = (pid for pid in place.alive() if "kvxfer.serve" in command_line(pid))
    standard = [os.readlink(f"/proc/{serve}/fd/{number}") for number in range(3)]
    assert not [link for link in standard if link.startswith(("socket:", "anon_inode:"))]
    os.kill(serve, signal.SIGINT)
    assert shell.wait(10).status == 130
    place.left_alone()


def test_a_full_disk_for_temporary_files(place: Place) -> None:
    """There is room for the name of a socket, and for not one byte: none is written, whatever the backend."""
    with tiny_disk(place) as disk:
        page = disk / "page"
        with pytest.raises(OSError, match="No space left"):
            page.write_bytes(bytes(8192))
        place.environment["TMPDIR"] = str(disk)
        server = place.serve(cwd=disk)
        for options in (["--peer", server.address, "--backend", "shm"], ["--backend", "all"]):
            result = place.measure(*options)
            assert {row["status"] for row in result["results"]} == {"ok"}
            wait_until(lambda: list(disk.iterdir()) == [page], 5, "the end of temporary files")
        server.stop()


# --- the file of the result


def test_a_result_that_cannot_be_written_is_told_before_the_run(place: Place) -> None:
    done = place.bench("--json", "/proc/result.json")
    done.failed(3, "/proc/result.json", "give another path")
    assert done.out == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(place: Place) -> None:
    directory = place.directory / "sealed"
    directory.mkdir(mode=0o500)
    place.bench("--json", str(directory / "result.json")).failed(3, "Permission denied")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_old_result_survives_a_run_that_is_ended(place: Place, number: int) -> None:
    path = place.directory / "result.json"
    path.write_text("old")
    bench = place.start_bench("--max-seconds", "30", "--min-samples", "1000000", "--json", str(path), terminal=True)
    bench.says(" samples", times=2)
    bench.signal(number)
    bench.wait(10)
    assert path.read_text() == "old"
    assert [one.name for one in place.directory.iterdir() if one.name.startswith(".kvxfer")] == []
    place.left_alone()
    place.bench("--json", str(path), "--quiet")
    assert json.loads(path.read_text())["exit_status"] == 0
