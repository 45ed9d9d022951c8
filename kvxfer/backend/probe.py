"""Which backends there are, which of them can be used here, and which one `auto` means."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer import _native
from kvxfer.errors import UnavailableError
from kvxfer.options import parse_choice_list, split_list

MEASURES_NOTHING = ("null",)  # never chosen by auto
ONE_USER = ("cma",)  # the kernel decides who may read another process's memory; one user always may read his own
ALL = "all"
"""In place of names: every backend that can be used."""

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


def probe_all() -> list[Found]:
    """Every backend of this build, in the order of preference."""
    return [_probe(name, summary) for name, summary in _native.backends()]


def is_one_host(name: str) -> bool:
    """Whether both sides of the backend have to run on one host, in one network namespace."""
    return _native.one_host(name)


def choose_backends(text: str) -> list[str]:
    """The backends of a --backend value; `all` are those that can be used here and move something.

    Raises UsageError for unknown ones, UnavailableError for unusable ones.
    """
    found = {one.name: one for one in probe_all()}
    usable = [name for name, one in found.items() if one.available and name not in MEASURES_NOTHING]
    if text.strip().lower() in ("auto", ALL):
        if not usable:
            raise UnavailableError("no backend can be used here; `kvxfer doctor` says why")
        return usable if text.strip().lower() == ALL else usable[:1]
    for name in split_list(text, "--backend"):
        if name.lower() in LATER:
            raise UnavailableError(f"backend {name.lower()} is not in this version, which has {', '.join(found)}")
    chosen = parse_choice_list(text, "--backend", list(found))
    for name in chosen:
        if not found[name].available:
            raise UnavailableError(f"backend {name} cannot be used here: {found[name].why_not}")
    return chosen


def _probe(name: str, summary: str) -> Found:
    probe = _native.probe(name)
    return Found(
        name, summary, probe.available, probe.why_not, probe.library_path, probe.library_version, probe.transports
    )
