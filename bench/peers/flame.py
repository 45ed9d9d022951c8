"""Where both sides of a kvxfer backend spend their CPU time while requests move: python bench/peers/flame.py --help.

Prints the functions that it is spent in; writes whole stacks as a flame graph, or folded as other tools take them.
Wants `perf` (Debian: linux-perf), and the kernel's leave to use it. Frames of programs without frame pointers are cut
short; the kernel's are whole.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from contenders import kvxfer_backends
from environment import Environment
from jobs import scattered
from offer import Offer
from pair import Pair, started

PER_SECOND = 4000
REGIONS = 80
WIDTH, HEIGHT = 1200, 16
"""Of the picture, and of a frame in it; pixels."""

Stack = tuple[str, ...]
"""From the outermost: the side, then functions."""


def main() -> int:
    asked = _arguments()
    if shutil.which("perf") is None:
        return _refuse("there is no `perf` here: install linux-perf")
    environment = Environment(Path(), [(asked.backend, dict(asked.option))] if asked.option else [])
    offers = [one for one in kvxfer_backends.offers(environment) if one.is_backend(asked.backend)]
    if not offers:
        why = [one.why for one in environment.left_out if one.name == f"kvxfer-{asked.backend}"]
        return _refuse(f"no backend '{asked.backend}' that moves data" + "".join(f": {one}" for one in why))
    try:
        stacks = profile(offers[-1], asked.op, asked.tokens, asked.seconds)
    except subprocess.CalledProcessError as error:
        return _refuse(f"perf failed: {error.stderr.strip().splitlines()[-1] if error.stderr else error}")
    print(f"{offers[-1].name}, {asked.op}, {asked.tokens} tokens of 70B: {sum(stacks.values())} samples of both sides")
    print(top(stacks, asked.top))
    if asked.folded:
        asked.folded.write_text("".join(f"{';'.join(stack)} {n}\n" for stack, n in sorted(stacks.items())))
    if asked.svg:
        asked.svg.write_text(svg(stacks))
    return 0


def profile(offer: Offer, op: str, tokens: int, seconds: float) -> Counter[Stack]:
    """Samples of both sides by stack, while requests of Llama-3.1-70B in bf16 move. Raises CalledProcessError."""
    with started(offer, scattered(op, 64 << 10, REGIONS, max(1, tokens // 16))) as pair, _folder() as folder:
        pair.move(1)
        _record(pair, folder / "perf.data", seconds)
        command = ["perf", "script", "--input", str(folder / "perf.data"), "--fields", "pid,ip,sym"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return folded(said, dict(zip(pair.pids, ("prefill", "decode"), strict=True)))


def _record(pair: Pair, into: Path, seconds: float) -> None:
    pids = ",".join(map(str, pair.pids))
    command = ["perf", "record", "--quiet", "--event", "cpu-clock", "--freq", str(PER_SECOND), "-g", "--pid", pids]
    perf = subprocess.Popen([*command, "--output", str(into)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end and perf.poll() is None:
        pair.move(1)
    perf.send_signal(signal.SIGTERM)
    said = perf.communicate()[1]
    if not into.exists():
        raise subprocess.CalledProcessError(perf.returncode, command, stderr=said)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def folded(script: str, sides: dict[int, str]) -> Counter[Stack]:
    """What `perf script` says: a line with the process for each sample, then a line per frame, the innermost first."""
    stacks: Counter[Stack] = Counter()
    for sample in script.split("\n\n"):
        head, *frames = sample.strip("\n").splitlines() or [""]
        if head.strip():
            names = [line.split(maxsplit=1)[1] for line in frames if len(line.split(maxsplit=1)) == 2]
            stack = (sides.get(int(head), head.strip()), *reversed(names))
            stacks[stack] += 1
    return stacks


def top(stacks: Counter[Stack], count: int) -> str:
    """The functions that most samples were taken in, with their share of all."""
    inside: Counter[str] = Counter()
    for stack, n in stacks.items():
        inside[stack[-1]] += n
    total = max(1, sum(stacks.values()))
    return "\n".join(f"{n / total:7.1%}  {name}" for name, n in inside.most_common(count))


@dataclass
class Frame:
    samples: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)

    def depth(self) -> int:
        return 1 + max((one.depth() for one in self.inner.values()), default=0)


def svg(stacks: Counter[Stack]) -> str:
    """A flame graph: a frame is as wide as its share of all samples, and lies upon the one that called it."""
    root = Frame()
    for stack, n in stacks.items():
        at = root
        at.samples += n
        for name in stack:
            at = at.inner.setdefault(name, Frame())
            at.samples += n
    rows = root.depth()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{rows * HEIGHT}" font-size="11">'
    return "\n".join([head, *_boxes("all", root, 0.0, rows - 1, WIDTH / max(1, root.samples)), "</svg>\n"])


def _boxes(name: str, frame: Frame, left: float, row: int, per_sample: float) -> Iterator[str]:
    width = frame.samples * per_sample
    if width < 1:
        return
    title = escape(f"{name}: {frame.samples} samples")
    shown = escape(name[: int(width / 7)])
    shade = 40 + sum(map(ord, name)) % 20
    yield (
        f'<g><title>{title}</title><rect x="{left:.1f}" y="{row * HEIGHT}" width="{width:.1f}" height="{HEIGHT - 1}" '
        f'fill="hsl({shade},90%,65%)"/><text x="{left + 2:.1f}" y="{row * HEIGHT + 12}">{shown}</text></g>'
    )
    for inner, one in sorted(frame.inner.items()):
        yield from _boxes(inner, one, left, row - 1, per_sample)
        left += one.samples * per_sample


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/peers/flame.py", description=__doc__)
    parser.add_argument("backend", help="tcp, shm, …")
    parser.add_argument("--option", type=_option, action="append", default=[], metavar="NAME=N", help="of the backend")
    parser.add_argument("--op", choices=["push", "pull"], default="push")
    parser.add_argument("--tokens", type=int, default=2048, help="of Llama-3.1-70B, in one request (2048)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long requests are watched (5)")
    parser.add_argument("--top", type=int, default=15, help="how many functions to print (15)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a flame graph")
    parser.add_argument("--folded", type=Path, metavar="FILE", help="write a line for each stack: a;b;c N")
    return parser.parse_args()


def _option(text: str) -> tuple[str, int]:
    name, value = text.split("=")
    return name, int(value)


if __name__ == "__main__":
    sys.exit(main())
