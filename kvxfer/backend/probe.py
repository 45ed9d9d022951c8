"""Which backends there are, which of them can be used here, and which one `auto` means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer import _native
from kvxfer.errors import UnavailableError
from kvxfer.options import parse_choice_list, split_list

MEASURES_NOTHING = ("null",)  # never chosen by auto
ONE_USER = ("cma",)  # the kernel decides who may read another process's memory; one user always may read his own
ALL = "all"
"""In place of names: every backend that can be used."""

RDMA_DEVICES = Path("/sys/class/infiniband")

OPTION_WORDS = {
    ("ucx", "errors"): ("peer", "none"),
    ("ucx", "pull"): ("auto", "get", "put"),
    ("ucx", "pool"): ("mapped", "ucx"),
}
"""Backend options whose values have names; the backend knows each by its place."""

LATER = ("nccl", "cuda_copy", "nixl", "mooncake")
"""Transports that users ask for by these names and that are still to come."""


@dataclass(frozen=True)
class Found:
    """What a probe says of a backend."""

    name: str
    summary: str
    available: bool
    why_not: str
    library_path: str
    library_version: str
    transports: str
    warning: str


def probe_all() -> list[Found]:
    """Every backend of this build, in the order of preference."""
    return [_probe(name, summary) for name, summary in _native.backends()]


def is_one_host(name: str) -> bool:
    """Whether both sides of the backend have to run on one host, in one network namespace."""
    return _native.one_host(name)


def backend_names() -> list[str]:
    """Every backend of this build, in the order of preference, usable here or not."""
    return [name for name, _ in _native.backends()]


def choose_backends(text: str) -> list[str]:
    """The backends of a --backend value; `all` are those that can be used here and move something.

    `auto` is the first of them, or ucx where it reaches RDMA devices. Probes no more than it has to: loading a library
    takes long. Raises UsageError for unknown ones, UnavailableError for unusable ones.
    """
    word = text.strip().lower()
    if word in ("auto", ALL):
        return _usable(first_only=word == "auto")
    names = backend_names()
    for name in split_list(text, "--backend"):
        if name.lower() in LATER:
            raise UnavailableError(f"backend {name.lower()} is not in this version, which has {', '.join(names)}")
    chosen = parse_choice_list(text, "--backend", names)
    for name in chosen:
        if not (found := _native.probe(name)).available:
            raise UnavailableError(f"backend {name} cannot be used here: {found.why_not}")
    return chosen


def _usable(first_only: bool) -> list[str]:
    candidates = [name for name in backend_names() if name not in MEASURES_NOTHING]
    if first_only and has_rdma_devices() and (ucx := _native.probe("ucx")).available and not ucx.warning:
        return ["ucx"]
    usable = []
    for name in candidates:
        if _native.probe(name).available:
            usable.append(name)
            if first_only:
                break
    if not usable:
        raise UnavailableError("no backend can be used here; `kvxfer doctor` says why")
    return usable


def has_rdma_devices() -> bool:
    """Whether the kernel knows RDMA devices."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def _probe(name: str, summary: str) -> Found:
    probe = _native.probe(name)
    return Found(
        name,
        summary,
        probe.available,
        probe.why_not,
        probe.library_path,
        probe.library_version,
        probe.transports,
        probe.warning,
    )
