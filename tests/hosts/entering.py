"""Enter a host from within a process, in place of `ip netns exec`, which starts a command."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


def enter(namespace: str) -> None:
    """Be on that host from now on, as what we start then, with a /sys that shows its interfaces. Raises OSError.

    For a process of one thread.
    """
    with open(f"/run/netns/{namespace}") as file:
        _check(_libc.setns(file.fileno(), _CLONE_NEWNET))
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_SLAVE | _MS_REC), None))
    _check(_libc.umount2(b"/sys", _MNT_DETACH))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
