"""The UCX that kvxfer uses, for those that are to use the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from environment import Environment, MissingError


@dataclass(frozen=True)
class UcxLibrary:
    path: Path
    version: str

    @classmethod
    def of_kvxfer(cls) -> UcxLibrary:
        """Raises MissingError."""
        from kvxfer import _native

        probe = _native.probe("ucx")
        if not probe.available:
            raise MissingError(probe.why_not)
        return cls(Path(probe.library_path), probe.library_version)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def compiled(self, environment: Environment, source: Path) -> Path:
        """A shared library made of one C++ file with UCX's headers, and linked to UCX. Raises MissingError."""
        headers = self.folder.parent / "include"
        flags = [f"-I{headers}"] if headers.is_dir() else []  # else they are the system's
        return environment.compiled(source, *flags, "-Wl,--no-as-needed", str(self.path), f"-Wl,-rpath,{self.folder}")


@dataclass(frozen=True)
class Way:
    """How UCX is to carry the bytes: by a transport, with or without an eye on the peer, from which kind of memory."""

    name: str
    transport: str
    environ: dict[str, str]
    watches_peer: bool
    own_allocation: bool
    ops: tuple[str, ...] = ("push", "pull")

    @property
    def kvxfer_options(self) -> dict[str, int]:
        return {"errors": int(not self.watches_peer), "pool": int(self.own_allocation)}


TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
CMA = {"UCX_TLS": "posix,cma,tcp"}
MAPPED = {"UCX_TLS": "posix,tcp"}
WAYS = (
    Way("tcp", "tcp", TCP, watches_peer=True, own_allocation=False),
    Way("cma", "memory", CMA, watches_peer=False, own_allocation=False),
    Way("mapped", "memory", MAPPED, watches_peer=False, own_allocation=True, ops=("push",)),
)
"""UCX gives shared memory up when it is to watch its peer. What it allocates itself the other side can map, for puts
alone, and with cma at hand it takes that for pieces of more than some KiB. By tcp two processes find each other.
"""
