"""Real processes: `bench` and `serve` started as a user starts them, each with a deadline, and nothing left behind."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}

MARK = "KVXFER_TEST"
"""In the environment of every process of a test, and so of whatever these start: it finds what is left behind."""

QUICK = ("--setup-repeats", "1", "--max-seconds", "0.15")

DEADLINE_S = 60


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up before a fork


def die_with_parent(parent: int) -> None:
    """After a fork: be killed when the thread that forked us ends, as it does when the tests themselves are killed.

    `parent` is its process, which may have ended by now.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `true` returns once it is true. Fails the test when that takes longer."""
    give_up_at = time.monotonic() + seconds
    while not (result := true()):
        assert time.monotonic() < give_up_at, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str
    seconds: float

    def failed(self, status: int, *says: str) -> None:
        """Assert the exit status and that stderr is one clear error, or two lines of it, with these words in it."""
        assert self.status == status, self
        lines = self.err.strip().splitlines()
        assert 1 <= len(lines) <= 2, self
        assert lines[0].startswith(("kvxfer bench: error: ", "kvxfer serve: error: ")), self
        assert "Traceback" not in self.err, self
        assert "unexpected failure" not in self.err, self
        for words in says:
            assert words in self.err, self


class Running:
    """A command under way. Its stderr is collected as it comes; with `terminal` it believes to write it to one."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], terminal: bool, **options: Any) -> None:
        self._began = time.monotonic()
        self._chunks: list[bytes] = []
        self._out: list[bytes] = []
        reader, writer = pty.openpty() if terminal else os.pipe()
        options = {"stdout": subprocess.PIPE} | options
        self.process = subprocess.Popen(
            command, stderr=writer, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, **options
        )
        os.close(writer)
        self._threads = [threading.Thread(target=self._collect, args=(reader, self._chunks), daemon=True)]
        if self.process.stdout is not None:
            self._threads.append(threading.Thread(target=self._drain, args=(self.process.stdout,), daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def err(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    def says(self, words: str, seconds: float = 60, times: int = 1) -> None:
        """Wait until stderr holds the words, so many times."""

        def said() -> bool:
            assert self.process.poll() is None or self.err.count(words) >= times, f"ended before {words!r}: {self.err}"
            return self.err.count(words) >= times

        wait_until(said, seconds, f"{words!r} on stderr")

    def signal(self, number: int, group: bool = False) -> None:
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def wait(self, seconds: float = DEADLINE_S) -> Done:
        """Its end, which has to come within so many seconds from now."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s; stderr so far: {self.err!r}") from None
        took = time.monotonic() - self._began
        for thread in self._threads:
            thread.join(5)
        return Done(status, b"".join(self._out).decode(), _without_escapes(self.err), took)

    def _drain(self, stream: Any) -> None:
        self._out.append(stream.read())
        stream.close()

    def _collect(self, descriptor: int, into: list[bytes]) -> None:
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:  # how a terminal ends
                data = b""
            if not data:
                os.close(descriptor)
                return
            into.append(data)


def _without_escapes(text: str) -> str:
    """The text without what a progress line leaves of itself on a terminal."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


class Server(Running):
    """A waiting `kvxfer serve`."""

    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it in order, as Ctrl-C does."""
        self.signal(signal.SIGINT)
        done = self.wait(10)
        assert done.status == 130, done
        assert "Traceback" not in done.err, done

    def workers(self) -> list[int]:
        return children(self.pid)

    def worker(self, seconds: float = 20) -> int:
        """The worker of a run, once there is one."""
        pid: int = wait_until(self.workers, seconds, "a worker of serve")[0]
        return pid


def children(pid: int) -> list[int]:
    """Living child processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []


def prefill_worker(bench: Running, seconds: float = 20) -> int:
    """The prefill worker of a bench, once there is one."""

    def found() -> list[int]:
        return [pid for pid in children(bench.pid) if "kvxfer.measure.worker" in command_line(pid)]

    pid: int = wait_until(found, seconds, "a prefill worker")[0]
    return pid


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty when there is no such process."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


class Place:
    """Where a test's processes run: a private TMPDIR, a tiny model, and the knowledge of what was started."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))  # short: a socket's path must fit in there
        self.tmp = self.directory / "tmp"
        self.tmp.mkdir()
        self.mark = secrets.token_hex(8)
        self.environment = os.environ | {"TMPDIR": str(self.tmp), MARK: self.mark, "COLUMNS": "200", "TERM": "xterm"}
        self.environment.pop("KVXFER_DEBUG", None)
        self.model = self.write_model("tiny")
        self._running: list[Running] = []
        self._ports: list[int] = []

    def write_model(self, name: str, **changes: Any) -> str:
        """A config.json of three layers with two KV heads of 64, but for the changes. Returns its path."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": LAYERS,
            "vocab_size": 1000,
        } | changes
        path = self.directory / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        return str(path)

    def start(self, module: str, *arguments: str, terminal: bool = False, **options: Any) -> Running:
        return self._start(Running, module, arguments, terminal, options)

    def start_command(self, command: Sequence[str], **options: Any) -> Running:
        """Any command, watched as the others are."""
        environment = options.pop("env", self.environment)
        running = Running(command, environment, False, **({"cwd": self.directory} | options))
        self._running.append(running)
        return running

    def ended(self) -> list[Done]:
        """What was started and has ended by now."""
        return [one.wait(0) for one in self._running if one.process.poll() is not None]

    def start_bench(self, *arguments: str, terminal: bool = False, **options: Any) -> Running:
        """A bench of the tiny model, 70 tokens, quick; arguments that come later win."""
        usual = ("--model", self.model, "--tokens", "70", *QUICK)
        return self._start(Running, "kvxfer.bench", (*usual, *arguments), terminal, options)

    def bench(self, *arguments: str, seconds: float = DEADLINE_S, **options: Any) -> Done:
        return self.start_bench(*arguments, **options).wait(seconds)

    def measure(self, *arguments: str) -> dict[str, Any]:
        """The result of a bench that has to succeed."""
        path = self.directory / f"{secrets.token_hex(4)}.json"
        done = self.bench(*arguments, "--json", str(path))
        assert done.status == 0, done
        assert done.err == "", done
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def serve(self, *arguments: str, port: int | None = None, **options: Any) -> Server:
        """A server that is waiting by now. It ends with us, since it would wait for ever."""
        port = port or free_port()
        prepare = options.pop("preexec_fn", lambda: None)
        us = os.getpid()
        options["preexec_fn"] = lambda: (die_with_parent(us), prepare())
        server = self._start(Server, "kvxfer.serve", ("--port", str(port), *arguments), False, options)
        server.port = port
        self._ports.append(port)
        server.says("waiting on")
        return server

    def keys(self, name: str) -> tuple[Path, Path]:
        """A fresh pair in a folder of its own: the public and the secret file."""
        folder = self.directory / f"keys-{name}"
        done = self.start("kvxfer.keys", name, "--dir", str(folder)).wait()
        assert done.status == 0, done
        return folder / f"{name}.key", folder / f"{name}.key_secret"

    def serves(self, server: Server, *arguments: str) -> None:
        """Assert that the server serves a proper client now."""
        assert server.process.poll() is None, server.err
        result = self.measure("--peer", server.address, *arguments)
        assert [row["status"] for row in result["results"]] == ["ok"]

    def alive(self) -> list[int]:
        """Every living process that was started from this test, by whatever way."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(entry.name))
        return found

    def left_alone(self, server: Server | None = None) -> None:
        """Assert that nothing of a run is left, whether processes or files; but for a waiting server."""
        allowed = set() if server is None else {server.pid}
        wait_until(lambda: set(self.alive()) <= allowed, 5, f"the end of {[command_line(p) for p in self.alive()]}")
        assert list(self.tmp.iterdir()) == []

    def close(self) -> None:
        """Stop the servers in order, assert that nothing is left, and remove what is."""
        try:
            for one in self._running:
                if isinstance(one, Server) and one.process.poll() is None:
                    one.stop()
            self.left_alone()
            for port in self._ports:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        finally:
            for pid in self.alive():
                os.kill(pid, signal.SIGKILL)
            for one in self._running:
                one.process.wait(10)
            wait_until(lambda: not self.alive(), 5, "the end of what was killed")
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, kind: Any, module: str, arguments: Sequence[str], terminal: bool, options: dict[str, Any]) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        running = kind(command, self.environment, terminal, **({"cwd": self.directory} | options))
        self._running.append(running)
        return running
