"""Errors a user can meet, and the exit status of each.

Every error that is not a defect of kvxfer is a KvxferError: one message that says what happened, why, and what to do.
The command line prints it without a traceback and leaves with the class's status.
"""

from __future__ import annotations

import errno
import resource
from enum import IntEnum

NO_ROOM_TO_LOAD = ("failed to map segment", "cannot allocate memory")
"""What the dynamic linker says when memory is too short for a library."""


class ExitStatus(IntEnum):
    """Exit status of every command; where several apply the highest is used (130 only when interrupted)."""

    DONE = 0
    UNEXPECTED = 1  # a failure kvxfer did not foresee
    USAGE = 2  # wrong usage or unreadable input
    UNAVAILABLE = 3  # not available here: backend, memory, port, disk
    WRONG_BYTES = 4  # bytes arrived wrong
    PEER_LOST = 5  # the peer was lost or time ran out
    FAIL_ON = 6  # a comparison or an audit found what --fail-on names
    INTERRUPTED = 130


class KvxferError(Exception):
    """An error to show to the user as it is."""

    status = ExitStatus.UNEXPECTED


class UsageError(KvxferError):
    """A wrong option or an input that cannot be read."""

    status = ExitStatus.USAGE


class UnavailableError(KvxferError):
    """Something this machine or the peer does not have: a backend, memory, a port, disk space."""

    status = ExitStatus.UNAVAILABLE


class WrongBytesError(KvxferError):
    """Verification found bytes that are not the ones sent, or not where they belong."""

    status = ExitStatus.WRONG_BYTES


class PeerLostError(KvxferError):
    """The other side died, stopped answering, or a deadline passed."""

    status = ExitStatus.PEER_LOST


BY_STATUS: dict[int, type[KvxferError]] = {
    cls.status: cls for cls in (KvxferError, UsageError, UnavailableError, WrongBytesError, PeerLostError)
}


def from_status(status: int, message: str) -> KvxferError:
    """The error of a status that another process reported (an unknown status is an unexpected failure)."""
    return BY_STATUS.get(status, KvxferError)(message)


def is_short_of_memory(error: BaseException) -> bool:
    """Whether this is what too little memory looks like, in whatever form it comes."""
    if isinstance(error, ImportError):
        return any(words in str(error).lower() for words in NO_ROOM_TO_LOAD)
    if isinstance(error, SystemError):  # an extension that was refused memory and failed without saying so
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        return limited and "without exception set" in str(error)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
