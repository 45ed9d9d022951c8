"""CURVE keys: who may talk to whom beyond this host.

Each side has a key pair. The client knows the server's public key (and so cannot be led to another one); the server
has a list of the public keys of clients it admits. A secret key file can be read by its owner only.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvxfer.errors import UnavailableError, UsageError
from kvxfer.wording import quoted

SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"
HEADER = "# kvxfer CURVE {kind} key\n"
Z85_LENGTH = 40
LONGEST_FILE = 4096
"""Bytes that are looked at; a key and its comments have fewer."""


@dataclass(frozen=True)
class KeyPair:
    """Z85-encoded, 40 characters each."""

    public: str
    secret: str


def generate() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair; returns the paths of the public and the secret file. Never overwrites one."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise UsageError(f"key name '{name}': use letters, digits, '-', '_' and '.'")
    public, secret = directory / (name + PUBLIC_SUFFIX), directory / (name + SECRET_SUFFIX)
    for path in (public, secret):
        if path.exists():
            raise UsageError(f"{path} exists already and keys are never overwritten; choose another name")
    pair = generate()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(secret, "secret", pair.secret, 0o600)
        _write(public, "public", pair.public, 0o644)
    except OSError as error:
        secret.unlink(missing_ok=True)
        raise UnavailableError(f"cannot write keys into {directory}: {error.strerror}") from error
    return public, secret


def _write(path: Path, kind: str, key: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(HEADER.format(kind=kind) + key + "\n")


def read_public(path: Path) -> str:
    return _read(path, "public")


def read_secret(path: Path) -> KeyPair:
    """The pair of a secret key file. Refuses one that others can read."""
    secret = _read(path, "secret")  # first: a public key in its place may be read by anyone
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"the secret key {path} can be read by others; make it yours alone: chmod 600 {path}")
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def read_allowed(directory: Path) -> frozenset[str]:
    """The public keys (*.key) in a directory."""
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is no directory; put the public keys (*{PUBLIC_SUFFIX}) of allowed clients into one"
        )
    keys = frozenset(read_public(path) for path in sorted(directory.glob("*" + PUBLIC_SUFFIX)))
    if not keys:
        raise UsageError(f"{directory} holds no public keys (*{PUBLIC_SUFFIX}), so no client could connect")
    return keys


def _read(path: Path, kind: str) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_FILE).decode("ascii")
    except OSError as error:
        raise UsageError(f"cannot read the {kind} key {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    declared = [line for line in text.splitlines() if line.startswith("# kvxfer CURVE")]
    if declared and f"CURVE {kind} key" not in declared[0]:
        raise UsageError(f"{path} holds {quoted(declared[0])}, and a {kind} key is wanted here; give the other file")
    if len(lines) != 1 or len(lines[0]) != Z85_LENGTH or not _is_z85(lines[0]):
        raise UsageError(f"{path} does not hold a {kind} key; `kvxfer keys` makes them")
    return lines[0]


def _is_z85(text: str) -> bool:
    from zmq.utils import z85

    try:
        return len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):  # the last: five characters that make more than 32 bits
        return False
