"""`kvxfer keys`, `serve` and `bench`, each run on the host where it belongs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .two_hosts import Host, Hosts

KVXFER = (sys.executable, "-m", "kvxfer.cli")
PORT = 7420
DEADLINE_S = 100

LAYERS, KV_HEADS, HEAD_DIM, ELEMENT_BYTES, BLOCK_SIZE = 8, 8, 128, 2, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * ELEMENT_BYTES
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 32000,
}
"""Its blocks are those of Llama-3.1-70B, 64 KiB per layer; only the layers are fewer."""


def tokens_that_take(seconds: float, payload_bytes_s: float) -> int:
    """A prompt whose cache takes about so long, in whole blocks."""
    return max(1, round(seconds * payload_bytes_s / TOKEN_BYTES / BLOCK_SIZE)) * BLOCK_SIZE


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    give_up_at = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up_at, f"{what}: not within {seconds} s"
        time.sleep(0.02)


@dataclass(frozen=True)
class Files:
    """The keys of a bench, of the server that admits it, and of a stranger; and the model."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model" / "config.json"

    @property
    def allowed(self) -> Path:
        return self.directory / "allowed"

    def secret(self, name: str) -> Path:
        return self.directory / f"{name}.key_secret"

    def public(self, name: str) -> Path:
        return self.directory / f"{name}.key"


def make_files(directory: Path) -> Files:
    files = Files(directory)
    for name in ("prefill", "decode", "stranger"):
        subprocess.run([*KVXFER, "keys", name, "--dir", str(directory)], check=True, stdout=subprocess.DEVNULL)
    files.allowed.mkdir()
    shutil.copy(files.public("prefill"), files.allowed)
    files.model.parent.mkdir()
    files.model.write_text(json.dumps(MODEL))
    return files


class Server:
    """`kvxfer serve` on the decode host."""

    def __init__(self, host: Host, files: Files, bind: str, log: Path) -> None:
        self.host = host
        self._log = log
        with log.open("wb") as stderr:
            self.process = host.start(
                *(*KVXFER, "serve", "--bind", bind, "--port", str(PORT)),
                *("--key", str(files.secret("decode")), "--allow", str(files.allowed)),
                stderr=stderr,
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_for_words(self, words: str, seconds: float = 10) -> None:
        wait_until(lambda: words in self.said(), seconds, f"serve says '{words}', it said '{self.said()}'")

    def wait_until_alone(self, seconds: float) -> None:
        """Until nothing runs on its host but itself, which it must still do."""
        wait_until(
            lambda: self.host.processes() == {self.process.pid}, seconds, "serve runs on, and its worker is gone"
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=5)


@contextmanager
def serving(hosts: Hosts, files: Files, log: Path, bind: str | None = None) -> Iterator[Server]:
    """A server that waits for the bench. It has to survive what the test does."""
    server = Server(hosts.decode, files, bind or hosts.decode.address, log)
    server.wait_for_words("waiting on")
    yield server
    server.wait_until_alone(5)
    assert server.stop() == 130, server.said()
    assert "Traceback" not in server.said()


@dataclass(frozen=True)
class Done:
    """A bench that has ended."""

    status: int
    out: str
    err: str
    seconds: float
    document: dict[str, Any]

    def failed(self, status: int, *says: str) -> None:
        """Assert the exit status, and one clear error that says this."""
        assert self.status == status, self
        assert self.err.startswith("kvxfer bench: error: "), self
        assert len(self.err.strip().splitlines()) <= 2, self
        assert "Traceback" not in self.err, self
        for words in says:
            assert words in self.err, self


def peer(hosts: Hosts, address: str | None = None) -> tuple[str, ...]:
    return ("--peer", f"{address or hosts.decode.address}:{PORT}")


def keys(files: Files, ours: str = "prefill", theirs: str = "decode") -> tuple[str, ...]:
    return ("--key", str(files.secret(ours)), "--server-key", str(files.public(theirs)))


class Bench:
    """`kvxfer bench` under way on the prefill host. `result` must not exist."""

    def __init__(self, host: Host, files: Files, result: Path, *options: str) -> None:
        self._host = host
        self._result = result
        self._began = time.monotonic()
        self.process = host.start(
            *(*KVXFER, "bench", "--model", str(files.model), "--json", str(result), "--setup-repeats", "1", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, seconds: float = DEADLINE_S) -> Done:
        """What became of it. Fails the test when it takes longer, or leaves a process behind."""
        out, err = self.process.communicate(timeout=seconds)
        took = time.monotonic() - self._began
        wait_until(lambda: not self._host.processes(), 2, "nothing of the bench is left on its host")
        document = json.loads(self._result.read_text()) if self._result.exists() else {}
        return Done(self.process.returncode, out, err, took, document)
