"""`kvxfer doctor`: what this machine has for measuring, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer import __version__, cli

GIB = 1 << 30
PACKAGES = ("numpy", "pyzmq", "msgspec", "torch")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
INTERFACES = Path("/sys/class/net")


def command(
    json: Annotated[str | None, typer.Option(metavar="FILE", help="write the findings there (-: to stdout)")] = None,
) -> None:
    """Say which backends can be used here and why others cannot, and what else shapes a measurement."""
    found = findings()
    if json is not None:
        from kvxfer.result.file import write_result

        write_result(json, found)
    if json != "-":
        _print(found)


def findings() -> dict[str, Any]:
    """Everything, as it goes into --json."""
    from kvxfer.backend.probe import probe_all
    from kvxfer.measure.host import available_bytes, host_info

    info = host_info()
    return {
        "kvxfer_version": __version__,
        "python": {"version": info.python, "executable": sys.executable},
        "host": {
            "hostname": info.hostname,
            "kernel": info.kernel,
            "cpu_model": info.cpu_model,
            "cpus": info.cpus,
            "memory_bytes": info.memory_bytes,
            "available_bytes": available_bytes(),
            "llc_bytes": info.llc_bytes,
            "load_average": info.load_average,
            "huge_pages": huge_pages(),
            "interfaces": interfaces(),
            "rdma_devices": rdma_devices(),
        },
        "backends": [asdict(found) for found in probe_all()],
        "packages": {name: _version(name) for name in PACKAGES},
        "advice": advice(),
    }


def huge_pages() -> str:
    """The kernel's mode for transparent huge pages: always, madvise or never; unknown when it does not say."""
    try:
        words = HUGE_PAGES.read_text().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces that are up, with the line rate in Mb/s that their driver tells (None: it does not)."""
    found = []
    for path in sorted(INTERFACES.iterdir()) if INTERFACES.is_dir() else []:
        state = _read(path / "operstate")
        if state in ("up", "unknown"):
            speed = _read(path / "speed")
            line = int(speed) if speed.isdigit() else None
            found.append({"name": path.name, "mtu": int(_read(path / "mtu") or 0), "line_mbit": line})
    return found


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel knows."""
    from kvxfer.backend.probe import RDMA_DEVICES

    return sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def advice() -> list[str]:
    """What would make measurements here better, or possible."""
    from kvxfer.measure.host import host_info, last_level_cache_bytes

    info = host_info()
    said = []
    if huge_pages() == "never":
        said.append(f"huge pages are off, which costs bandwidth: echo madvise > {HUGE_PAGES}")
    if not last_level_cache_bytes():
        said.append("the kernel does not tell the cache sizes: rows cannot be marked as hot")
    if info.load_average > 0.25 * info.cpus:
        said.append(f"the load average is {info.load_average:.1f}: other work will disturb measurements")
    if _version("torch") is None:
        said.append("torch is missing; only seeing pools as tensors needs it: pip install torch")
    return said


def _print(found: dict[str, Any]) -> None:
    host = found["host"]
    print(f"kvxfer {found['kvxfer_version']}, Python {found['python']['version']} ({found['python']['executable']})")
    print(f"host      {host['hostname']}, Linux {host['kernel']}, {host['cpu_model']}, {host['cpus']} CPUs")
    print(
        f"memory    {host['memory_bytes'] / GIB:.1f} GiB, {host['available_bytes'] / GIB:.1f} available, "
        f"huge pages: {host['huge_pages']}, last-level cache {host['llc_bytes'] / (1 << 20):.0f} MiB"
    )
    for one in host["interfaces"]:
        line = f"{one['line_mbit']} Mb/s" if one["line_mbit"] else "line rate not told"
        print(f"network   {one['name']}, MTU {one['mtu']}, {line}")
    if host["rdma_devices"]:
        print(f"RDMA      {', '.join(host['rdma_devices'])}")
    for one in found["backends"]:
        library = f"{one['library_path']} {one['library_version']}".strip()
        state = f"available ({library})" if one["available"] else one["why_not"]
        print(f"backend   {one['name']:<6} {state}: {one['summary']}")
        if one["available"] and "," in one["transports"]:
            print(f"                 with {one['transports']}")
        if one["warning"]:
            print(f"WARNING   {one['name']}: {one['warning']}")
    for name, version in found["packages"].items():
        print(f"package   {name:<8} {version or 'not installed'}")
    for text in found["advice"]:
        print(f"advice    {text}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer doctor")


if __name__ == "__main__":
    sys.exit(main())
