"""Files given by name: what does not end, or is too large, is refused; what ends is read, a pipe too."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvxfer import reading
from kvxfer.reading import open_to_read


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reading, "PIPE_S", 0.3)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo")
    with open_to_read(path, 7) as file:
        assert list(file) == [b"one\n", b"two"]
    with open_to_read(path, 7) as file:
        assert file.read() == b"one\ntwo"


def test_more_than_is_allowed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes((1 << 20) + 1))
    for name in (path, "/dev/zero"):
        with open_to_read(name, 1 << 20) as file, pytest.raises(OSError, match="it has more than 1 MiB"):
            file.read()


def test_a_fifo_that_nobody_writes_to_is_given_up(fifo: Path) -> None:
    start = time.monotonic()
    with open_to_read(fifo, 100) as file, pytest.raises(TimeoutError, match=r"has not ended within 0\.3 s"):
        file.read()
    assert time.monotonic() - start < 2


def test_a_writer_that_does_not_end_is_given_up(fifo: Path) -> None:
    over = threading.Event()

    def write() -> None:
        with fifo.open("wb", buffering=0) as file:
            while not over.wait(0.05):
                file.write(b"1\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with open_to_read(fifo, 1000) as file:
            with pytest.raises(TimeoutError, match="it is no regular file"):
                file.read()
            over.set()
    finally:
        over.set()
        writer.join(10)


def test_a_pipe_that_ends_is_read(fifo: Path) -> None:
    def write() -> None:
        with fifo.open("wb") as file:
            time.sleep(0.05)
            file.write(b"1" * 100_000)  # more than the pipe holds

    writer = threading.Thread(target=write)
    writer.start()
    with open_to_read(fifo, 100_000) as file:
        assert len(file.read()) == 100_000
    writer.join(10)
