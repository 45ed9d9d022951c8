"""What there is to say about this host, read from /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from kvxfer import __version__
from kvxfer.control.messages import HostInfo

USABLE = 0.95
"""Share of the available memory."""

NOISY_SHARE = 0.05
"""Of the CPUs; when others take more than this, the figures are worth little."""

TICKS_NS = 20_000_000
"""The kernel counts others' CPU time in ticks of 10 ms; so much of it means nothing in a short measurement."""

CGROUPS = Path("/sys/fs/cgroup")


def host_info() -> HostInfo:
    return HostInfo(
        hostname=platform.node(),
        kernel=platform.release(),
        cpu_model=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_meminfo("MemTotal"),
        llc_bytes=last_level_cache_bytes(),
        boot_id=_read("/proc/sys/kernel/random/boot_id").strip(),
        netns=_link("/proc/self/ns/net"),
        python=platform.python_version(),
        load_average=os.getloadavg()[0],
        kvxfer_version=__version__,
        uid=os.getuid(),
    )


def available_bytes() -> int:
    """Memory that new pages may take: the kernel's estimate, bounded by cgroups' and the process's own limit."""
    limits = [_meminfo("MemAvailable"), *left_in_cgroups(_read("/proc/self/cgroup"), CGROUPS)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return max(0, min(limits))


def left_in_cgroups(own: str, root: Path) -> Iterator[int]:
    """What each limited cgroup leaves to a process: its own and all above, of both versions.

    `own` is its /proc/self/cgroup, `root` where the hierarchies are mounted. File pages that nobody uses at the moment
    count as left: the kernel drops them first.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, most, used, inactive = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, most, used, inactive = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = mount / path.lstrip("/")
        # A container may see its own group as the root of the hierarchy, and not by its path.
        for one in (group, *group.parents[: len(group.parts) - len(mount.parts)]):
            limit, usage = _read(one / most).strip(), _read(one / used).strip()
            if limit.isdigit() and usage.isdigit():
                statistics = dict(row.split() for row in _read(one / "memory.stat").splitlines())
                yield int(limit) - int(usage) + int(statistics.get(inactive, 0))


def usable_bytes() -> int:
    """Memory that pools may take, with some left for everyone else."""
    return int(USABLE * available_bytes())


def last_level_cache_bytes() -> int:
    """All last-level caches of this host together; 0 when the kernel does not say."""
    caches: dict[tuple[int, str], int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            size = (index / "size").read_text().strip()
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            scale = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            caches[level, shared] = int(size.rstrip("KM")) * scale
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


class CpuMeter:
    """CPU time from now on: this process's, everyone else's on this host, and what the hypervisor took."""

    def __init__(self) -> None:
        self._busy, self._steal = _host_cpu_ns()
        self._own = own_cpu_ns()

    def read(self) -> tuple[int, int, int]:
        """(own, others', steal) in ns since the meter was made. The host's clock ticks in 10 ms."""
        busy, steal = _host_cpu_ns()
        own = own_cpu_ns() - self._own
        return own, max(0, busy - self._busy - own), steal - self._steal


def own_cpu_ns() -> int:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def _host_cpu_ns() -> tuple[int, int]:
    """(user + nice + system, steal) of all CPUs. Interrupts are left out: the run's own packets cause most of them."""
    fields = _read("/proc/stat").split("\n", 1)[0].split()
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    user, nice, system = (int(value) * tick for value in fields[1:4])
    return user + nice + system, int(fields[8]) * tick


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "cpu\t")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _meminfo(name: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
