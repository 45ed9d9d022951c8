"""The guest's first files: busybox, the kernel's modules in the order in which they are inserted, and guest/init."""

from __future__ import annotations

import io
import re
import stat
from pathlib import Path

from .packages import BUSYBOX, Kernel

INIT = Path(__file__).with_name("guest") / "init"

MODULES = ("crc32_generic", "9p", "9pnet_virtio", "virtio_pci", "dummy", "rdma_rxe", "rdma_ucm")
"""What the guest asks for; what those depend on comes before each. Without crc32_generic, which none of them names, an
rxe device cannot be made."""


def initramfs(kernel: Kernel) -> Path:
    """The file, written when it is older than what is in it."""
    made = kernel.folder / "initramfs.cpio"
    inputs = (kernel.image, BUSYBOX, INIT, Path(__file__))
    if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in inputs):
        made.write_bytes(_archive(kernel))
    return made


def _archive(kernel: Kernel) -> bytes:
    out = io.BytesIO()
    _add(out, "init", stat.S_IFREG | 0o755, INIT.read_bytes())
    for folder in ("bin", "modules"):
        _add(out, folder, stat.S_IFDIR | 0o755, b"")
    _add(out, "bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    modules = in_order(kernel.modules)
    for module in modules:
        _add(out, f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
    order = "".join(f"{module.name}\n" for module in modules)
    _add(out, "modules/order", stat.S_IFREG | 0o644, order.encode())
    _add(out, "TRAILER!!!", 0, b"")
    return out.getvalue()


def in_order(folder: Path) -> list[Path]:
    """The files of MODULES and of all that these depend on, each after its own."""
    files = {_name(path): path for path in folder.rglob("*.ko")}
    order: dict[str, Path] = {}

    def insert(name: str) -> None:
        if name in order or name not in files:  # what is no file is in the kernel itself
            return
        for needed in _depends(files[name]):
            insert(needed)
        order[name] = files[name]

    for name in MODULES:
        if name not in files:
            raise FileNotFoundError(f"the kernel has no module {name} in {folder}")
        insert(name)
    return list(order.values())


def _name(path: Path) -> str:
    return path.stem.replace("-", "_")


def _depends(module: Path) -> list[str]:
    """As the module itself says, in its .modinfo."""
    found = re.search(rb"\0depends=([^\0]*)\0", module.read_bytes())
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def _add(out: io.BytesIO, name: str, mode: int, content: bytes) -> None:
    """A member in cpio's format "newc": 13 fields of 8 hex digits, the name, the content, each filled up to 4 bytes."""
    inode = out.tell()  # any number of its own
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0")
    out.write(bytes(-out.tell() % 4) + content)
    out.write(bytes(-out.tell() % 4))
