"""What the guest is made of, by package name. Packages are installed, which takes root; the kernel and a wheel are only
unpacked.

python packages.py    brings what is missing, or says what to do
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "rdma"

QEMU = Path("/usr/bin/qemu-system-x86_64")
BUSYBOX = Path("/bin/busybox")
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
SYSTEM_UCX = LIBRARIES / "libucp.so.0"

PACKAGES = {
    "qemu-system-x86": QEMU,
    "busybox-static": BUSYBOX,
    "iproute2": Path("/usr/bin/rdma"),
    "libucx0": SYSTEM_UCX,
    "ibverbs-providers": LIBRARIES / "libibverbs" / "librxe-rdmav34.so",
    "perftest": Path("/usr/bin/ib_write_bw"),
}
"""Each with a file that tells whether it is installed."""

KERNEL = "linux-image-amd64"

NIXL = "nixl-cu12==1.5.1"
NIXL_LIBRARIES = "nixl_cu12.libs"
NIXL_FOLDER = BUILD / "nixl"
"""For Python a folder of packages, in which there is nothing of NIXL but the libraries that its wheel bundles."""


class MissingError(Exception):
    """Something is not here. Says what, and what to do."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its modules, unpacked."""

    folder: Path = BUILD / "kernel"

    @property
    def image(self) -> Path:
        return next(self.folder.glob("boot/vmlinuz-*"))

    @property
    def modules(self) -> Path:
        return self.folder / "lib" / "modules"


def missing() -> str:
    """What is not here, and what to do; nothing when all of it is."""
    if platform.machine() != "x86_64":
        return f"the guest runs this machine's programs on an x86-64 kernel, and this is {platform.machine()}"
    if packages := missing_packages():
        return f"not installed: {', '.join(packages)}; `{' '.join(_install(packages))}` (root)"
    if not Kernel().folder.exists():
        return f"{KERNEL} is not unpacked in {Kernel().folder}; `make test-rdma` does that"
    if not NIXL_FOLDER.exists():
        return f"{NIXL} is not unpacked in {NIXL_FOLDER}; `make test-rdma` does that"
    return ""


def missing_packages() -> list[str]:
    return [name for name, file in PACKAGES.items() if not file.exists()]


def bring() -> None:
    """Install and unpack what is not here. Raises MissingError."""
    if not missing():
        return
    if os.geteuid() == 0:
        _run("apt-get", "update", "-qq")
        if packages := missing_packages():
            _run(*_install(packages))
    if not Kernel().folder.exists():
        _unpack_kernel(Kernel().folder)
    if not NIXL_FOLDER.exists():
        _unpack_nixl(NIXL_FOLDER)
    if still := missing():
        raise MissingError(still)


def _install(packages: list[str]) -> list[str]:
    return ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]


def _unpack_kernel(folder: Path) -> None:
    """The kernel that the package without a version names. The folder appears whole or not at all."""
    named = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", KERNEL))
    if named is None:
        raise MissingError(f"`apt-cache depends {KERNEL}` names no kernel; is this Debian, with its package lists?")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _run("apt-get", "download", "-qq", named[1], where=temporary)
        (package,) = Path(temporary).glob("*.deb")
        _run("dpkg-deb", "--extract", str(package), f"{temporary}/kernel")
        Path(temporary, "kernel").rename(folder)


def _unpack_nixl(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, NIXL)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            inside = [name for name in files.namelist() if name.startswith(f"{NIXL_LIBRARIES}/")]
            files.extractall(f"{temporary}/nixl", inside)
        Path(temporary, "nixl").rename(folder)


def _run(*command: str, where: str | None = None) -> str:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"`{' '.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise MissingError(f"`{' '.join(command)}`: {' '.join(done.stderr.split())}")
    return done.stdout


def main() -> int:
    try:
        bring()
    except (MissingError, OSError) as error:
        print(f"tests/rdma cannot run: {error}", file=sys.stderr)
    return 0  # whether that is a failure is for the tests to say (KVXFER_REQUIRE)


if __name__ == "__main__":
    sys.exit(main())
