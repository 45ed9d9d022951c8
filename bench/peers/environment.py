"""What the contenders need, installed by package name into an environment of their own; nothing outside it changes.

Python packages go into a virtual environment, Debian's are downloaded and unpacked beside it (which needs no root).
What cannot be had is left out, by name and with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_S = 600
NUMPY = "numpy==2.4.6" if sys.version_info >= (3, 11) else "numpy==2.2.6"


class MissingError(Exception):
    """Something a contender needs cannot be had here; says why, and what to do."""


@dataclass(frozen=True)
class LeftOut:
    name: str
    why: str


class Environment:
    """`variants`: backends of kvxfer to be measured with other options too."""

    def __init__(self, folder: Path, variants: Sequence[tuple[str, dict[str, int]]] = ()) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.variants = variants
        self.left_out: list[LeftOut] = []
        self._unpacked = folder / "debian"

    def leave_out(self, name: str, why: object) -> None:
        self.left_out.append(LeftOut(name, str(why)))

    def pip(self, *requirements: str) -> None:
        """Install exactly these, without what they depend on (NIXL's would be 5.9 GB). Raises MissingError."""
        if not self.python.exists():
            self._once([sys.executable, "-m", "venv", str(self.folder)])
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        self._once([*pip, "--retries", "1", NUMPY, *requirements])

    def debian(self, *packages: str) -> None:
        """Unpack these packages. Raises MissingError."""
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise MissingError(f"no apt-get here: install what Debian calls {packages[0]}")
        here = self.folder / "packages"
        here.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0 and not any(Path("/var/lib/apt/lists").glob("*Packages*")):
            self._once(["apt-get", "update", "-qq"])
        self._once(["apt-get", "download", "-qq", *packages], here)
        for package in packages:
            for archive in here.glob(f"{package}_*.deb"):
                self._once(["dpkg", "-x", str(archive), str(self._unpacked)])

    def tool(self, name: str, *packages: str) -> Path:
        """A program: this system's, or out of these packages. Raises MissingError."""
        if system := shutil.which(name):
            return Path(system)
        self.debian(*packages)
        return self._unpacked / "usr" / "bin" / name

    def library(self, name: str, *packages: str) -> None:
        """A shared library: this system's, or out of these packages. Raises MissingError."""
        try:
            ctypes.CDLL(name)
        except OSError:
            self.debian(*packages)

    def compiled(self, source: Path, *flags: str) -> Path:
        """A shared library made of one C++ file; `flags` are the compiler's. Raises MissingError."""
        made_of = _digest(source.read_bytes() + "\0".join(flags).encode())
        target = self.folder / f"{source.stem}-{made_of}.so"
        self.folder.mkdir(exist_ok=True)
        if not target.exists():
            compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-O3", "-shared", "-fPIC", "-pthread"]
            _run([*compiler, "-o", str(target), str(source), *flags], None)
        return target

    @property
    def library_path(self) -> dict[str, str]:
        """For processes that use what was unpacked."""
        folders = [*self._unpacked.glob("usr/lib/*-linux-gnu"), *self._unpacked.glob("lib/*-linux-gnu")]
        given = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": ":".join([*map(str, folders), *([given] if given else [])])}

    def _once(self, command: list[str], folder: Path | None = None) -> None:
        """Run a command that need not run again once it has succeeded."""
        done = self.folder / "done" / _digest("\0".join(command).encode())
        if done.exists():
            return
        _run(command, folder)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def _run(command: list[str], folder: Path | None) -> None:
    shown = " ".join([Path(command[0]).name, *command[1:]])
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"`{shown}`: {error}") from None
    if run.returncode != 0:
        said = (run.stderr or run.stdout).strip().splitlines()
        raise MissingError(f"`{shown}` failed: {said[-1] if said else run.returncode}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
