"""A virtual machine for one command: it boots, runs that with this machine's files, and is gone."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .initramfs import initramfs
from .packages import QEMU, Kernel

ROOT = Path(__file__).parents[2]
MEMORY_MIB = 3072


class MachineError(Exception):
    """The machine did not do what was asked; says what it said last."""


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what was on the console."""

    status: int
    console: str


def run_inside(command: Sequence[str], exchange: Path, deadline_s: float, kernel: Kernel | None = None) -> Ended:
    """Boot, run the command in the checkout and wait for the machine to be off.

    Inside are the files of this machine, read-only but for `exchange`, a folder of the checkout; /tmp, /run and
    /dev/shm are empty. Raises MachineError when the machine fails, or is not off within `deadline_s`.
    """
    kernel = kernel or Kernel()
    exchange.mkdir(parents=True, exist_ok=True)
    for left in ("status", "failed", "console"):
        (exchange / left).unlink(missing_ok=True)
    asked = {"repository": str(ROOT), "exchange": str(exchange), "command": shlex.join(command)}
    (exchange / "asked").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in asked.items()))
    _boot(kernel, exchange, deadline_s)
    console = _console(exchange)
    if (exchange / "failed").exists():
        raise MachineError(f"the guest gave up: {(exchange / 'failed').read_text().strip()}\n{console}")
    if not (exchange / "status").exists():
        raise MachineError(f"the guest was off before the command had ended\n{console}")
    return Ended(int((exchange / "status").read_text()), console)


def _boot(kernel: Kernel, exchange: Path, deadline_s: float) -> None:
    machine = subprocess.Popen(_qemu(kernel, exchange), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = machine.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise MachineError(f"the guest was not off within {deadline_s:.0f} s\n{_console(exchange)}") from None
    finally:
        machine.kill()
        machine.wait()
    if machine.returncode != 0:
        raise MachineError(f"QEMU ended with status {machine.returncode}: {said.strip()}\n{_console(exchange)}")


def _console(exchange: Path) -> str:
    try:
        return (exchange / "console").read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _qemu(kernel: Kernel, exchange: Path) -> list[str]:
    """Emulated (no KVM), without a network. It ends with the process that starts it, whatever ends that.

    The clock of the guest counts its instructions, 2 ns each, as long as it computes: however little of this machine's
    CPUs it gets, nothing in it comes too late. A CPU without fast string instructions, which cost most in an emulator.
    """
    shared = "security_model=none,multidevs=remap"
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *(str(QEMU), "-accel", "tcg", "-icount", "shift=1", "-smp", "1", "-cpu", "Nehalem", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-display", "none", "-nic", "none", "-no-reboot"),
        *("-serial", f"file:{exchange / 'console'}"),
        *("-virtfs", f"local,path=/,mount_tag=host,readonly=on,{shared}"),
        *("-virtfs", f"local,path={exchange},mount_tag=exchange,{shared}"),
        *("-kernel", str(kernel.image), "-initrd", str(initramfs(kernel))),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off init_on_alloc=0 apparmor=0"),
    ]
