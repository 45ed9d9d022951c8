"""The result file is written whole or not at all, and a reader gets one clear error."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_result import example_result

from kvxfer.errors import UnavailableError, UsageError
from kvxfer.result.file import check_writable, read_result, schema, write_result


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, example_result())
    assert read_result(path) == example_result()
    assert os.listdir(tmp_path) == ["result.json"]


def test_one_line_per_field_of_the_top_level(tmp_path: Path) -> None:
    write_result(tmp_path / "a", example_result())
    assert len((tmp_path / "a").read_text().splitlines()) == len(example_result()) + 2


def test_what_of_a_name_is_no_unicode_is_no_lone_surrogate(tmp_path: Path) -> None:
    """Readers of other languages refuse such; what only looks like one stays."""
    command = ["kvxfer", os.fsdecode(b"model-\xff\xfe"), "\\udcff", "\U0001f600", "\ud83d", "\\"]
    write_result(tmp_path / "a", example_result() | {"command": command})
    assert read_result(tmp_path / "a")["command"] == ["kvxfer", "model-??", "\\udcff", "\U0001f600", "?", "\\"]


def test_the_mode_follows_the_umask_or_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    before = os.umask(0o027)
    try:
        write_result(path, example_result())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_result(path, example_result())
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "result.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):  # the target missing, then there
        check_writable(link)
        write_result(link, example_result())
        assert link.is_symlink()
        assert read_result(target) == example_result()
    assert os.listdir(target.parent) == ["result.json"]


def test_numbers_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            write_result(tmp_path / "a", {"x": [number]})
    assert os.listdir(tmp_path) == []


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    check_writable("-")
    write_result("-", example_result())
    assert json.loads(capsys.readouterr().out) == example_result()


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe)
    write_result(pipe, example_result())
    reader.join(10)
    assert json.loads(read[0]) == example_result()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_dev_stdout_leaves_what_stands_before_it(tmp_path: Path) -> None:
    program = "from kvxfer.result.file import write_result; print('[1]'); write_result('/dev/stdout', {}); print('[2]')"
    output = tmp_path / "output"
    with output.open("w") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert output.read_text().split() == ["[1]", "{", "}", "[2]"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if made.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def too_big() -> dict[str, Any]:
    return example_result() | {"notices": ["x" * 200_000]}


def test_a_full_disk_leaves_no_half_file(small_disk: Path) -> None:
    path = small_disk / "result.json"
    with pytest.raises(UnavailableError, match=r"No space left.*free some space"):
        write_result(path, too_big())
    assert os.listdir(small_disk) == []


def test_a_full_disk_leaves_the_earlier_file(small_disk: Path) -> None:
    path = small_disk / "result.json"
    write_result(path, example_result())
    with pytest.raises(UnavailableError):
        write_result(path, too_big())
    assert read_result(path) == example_result()
    assert os.listdir(small_disk) == ["result.json"]


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Sets the most bytes a file of this process may have; past it a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path, file_size_limit: Callable[[int], None]) -> None:
    path = tmp_path / "result.json"
    write_result(path, example_result())
    file_size_limit(64 * 1024)
    with pytest.raises(UnavailableError, match="File too large"):
        write_result(path, too_big())
    assert read_result(path) == example_result()
    assert os.listdir(tmp_path) == ["result.json"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_result(tmp_path / "result.json", example_result())
    assert os.listdir(tmp_path) == []


def test_a_full_device_is_an_error() -> None:
    check_writable("/dev/full")
    with pytest.raises(UnavailableError, match="No space left"):
        write_result("/dev/full", example_result())


def test_a_full_standard_output_is_one_error_and_no_noise_at_exit() -> None:
    program = (
        "import sys; from kvxfer.errors import UnavailableError; from kvxfer.result.file import write_result\n"
        "try: write_result('-', {'x': 1})\n"
        "except UnavailableError as error: sys.exit(error.status)"
    )
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE)
    assert (run.returncode, run.stderr) == (3, b"")


def test_a_long_run_is_not_begun_for_a_path_that_cannot_be(tmp_path: Path) -> None:
    for name in ("", str(tmp_path), str(tmp_path / "missing" / "result.json")):
        with pytest.raises(UsageError):
            check_writable(name)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no directory"):
        check_writable(tmp_path / "file" / "result.json")


def test_checking_leaves_no_file_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "result.json")
    assert os.listdir(tmp_path) == []
    write_result(tmp_path / "result.json", example_result())
    check_writable(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == example_result()
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "protected").touch(mode=0o400)
    with pytest.raises(UnavailableError, match="permission"):
        check_writable(tmp_path / "protected")
    tmp_path.chmod(0o500)
    with pytest.raises(UnavailableError, match="Permission denied"):
        check_writable(tmp_path / "new")
    tmp_path.chmod(0o700)


def test_a_directory_that_takes_no_files_is_an_error_before_the_run() -> None:
    with pytest.raises(UnavailableError, match="give another path"):
        check_writable("/proc/result.json")


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "not JSON"),
        ('{"schema_version": 1', "not JSON"),
        ('{"schema_version": NaN}', "not JSON"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("[" * 100_000, "not JSON"),
        ("9" * 10_000, "not"),
        ("[1, 2]", "no JSON object"),
        ("{}", "no schema_version"),
        ('{"schema_version": 2}', "schema version 2, this kvxfer reads version 1"),
        ('{"schema_version": "1"}', "schema version '1'"),
        ('{"schema_version": 1}', "lacks kvxfer_version"),
    ],
)
def test_what_is_no_result_is_one_clear_error(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        read_result(written(tmp_path / "result.json", content))
    assert "result.json" in str(caught.value)


@pytest.mark.parametrize("field", schema()["required"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    result = example_result()
    del result[field]
    with pytest.raises(UsageError, match=field):
        read_result(written(tmp_path / "a", json.dumps(result)))


@pytest.mark.parametrize("field", ["results", "host", "ratio", "assumptions"])
def test_a_field_of_another_kind_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        read_result(written(tmp_path / "a", json.dumps(example_result() | {field: 7})))


def test_unknown_fields_are_no_error(tmp_path: Path) -> None:
    assert read_result(written(tmp_path / "a", json.dumps(example_result() | {"later": [1]})))["later"] == [1]


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_result(tmp_path / name)
