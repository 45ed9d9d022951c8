"""python tests/fuzz/run.py NAME [options of libFuzzer] [folders]: search for input that breaks a target.

With atheris (pip install atheris), guided by coverage; without it, changes to the corpus by seed. The first folder
takes what is found, the others are read as well. Both understand -runs, -seed, -max_total_time and -artifact_prefix.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # when it is run as a script

from fuzz import mutate


def main(arguments: list[str]) -> int:
    name, rest = arguments[0], arguments[1:]
    try:
        import atheris
    except ImportError:
        return _by_seed(name, rest)
    # The finder of an editable install comes before atheris' own, whose instrumentation then comes to nothing.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.append(str(Path(__file__).parents[2]))
    with atheris.instrument_imports(include=["kvxfer", "json.decoder"]):
        from fuzz.targets import TARGETS

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed: bytes = mutate.mutated(data, rng, most) if rng.random() < 0.5 else atheris.Mutate(data, most)
        return changed

    atheris.Setup([sys.argv[0], *rest], TARGETS[name], custom_mutator=mutator)
    atheris.Fuzz()
    return 0


def _by_seed(name: str, arguments: list[str]) -> int:
    from fuzz.targets import TARGETS

    options = dict(one[1:].split("=", 1) for one in arguments if one.startswith("-") and "=" in one)
    inputs = corpus(*(Path(one) for one in arguments if not one.startswith("-")))
    runs, seconds = int(options.get("runs", "-1")), float(options.get("max_total_time", "0"))
    done, began = 0, time.monotonic()
    for data in inputs:
        TARGETS[name](data)
    rng = random.Random(int(options.get("seed", "1")))
    while done != runs and (not seconds or time.monotonic() - began < seconds):
        data = mutate.mutated(rng.choice(inputs or [b""]), rng)
        try:
            TARGETS[name](data)
        except BaseException:
            kept = options.get("artifact_prefix", "") + "crash-" + hashlib.sha1(data).hexdigest()
            Path(kept).write_bytes(data)
            print(f"{name}: input written to {kept}", file=sys.stderr)
            raise
        done += 1
    print(f"{name}: {len(inputs)} inputs of the corpus and {done} changes of them, without coverage", file=sys.stderr)
    return 0


def corpus(*folders: Path) -> list[bytes]:
    """Every file below them, in order."""
    return [path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
