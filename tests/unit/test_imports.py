"""The floors: imports go down only, and what has to answer at once imports nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"
RESULT = ROOT / "bench" / "results" / "2026-11-30-epyc-2cpu-cost-model-tcp-push.json"

FLOORS = (
    (
        "bench",
        "serve",
        "plan",
        "explained",
        "decision",
        "load_options",
        "model_command",
        "keys",
        "doctor",
        "asked",
        "pipelining",
        "cli",
    ),
    ("measure", "topology"),
    ("cache", "cost"),
    ("model", "result", "control", "backend"),
    ("errors", "options", "wording", "fetching", "reading", "_native"),
)
"""From the top. A part may import from its own floor and those below it."""

FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}

ONLY = {
    "model": {"errors", "wording", "reading"},
    "errors": set(),
    "wording": set(),
    "reading": set(),
    "options": {"errors", "wording"},
    "fetching": {"errors", "wording"},
}
"""All that these parts may import of ours."""

NEVER = {"cost": {"measure"}, "topology": {"measure"}}

HEAVY = ("torch", "numpy", "scipy", "zmq", "msgspec", "rich")

Import = tuple[str, str, bool]  # importing module, what it imports, whether that happens inside a function


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> Iterator[Import]:
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            for target in _targets(node):
                yield name, target, id(node) in late or id(node) in typing_only


def _targets(node: ast.AST) -> list[str]:
    """Dotted names that an import statement brings in; `from kvxfer import cli` brings in kvxfer.cli."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"a relative import of {node.module}"
        assert node.module is not None
        if node.module == "kvxfer" or node.module.split(".")[0] != "kvxfer":
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def part(module: str) -> str | None:
    """The part of kvxfer that a module belongs to; None for the package itself and for what is not ours."""
    words = module.split(".")
    if words[0] != "kvxfer" or len(words) == 1 or words[1] == "__version__":
        return None
    return words[1]


def test_every_part_has_a_floor() -> None:
    assert {part(name) for name in modules()} - {None} <= FLOOR.keys()


def test_imports_go_down_only() -> None:
    up = [
        f"{importer} imports {target}"
        for importer, target, _ in imports()
        if (upper := part(importer)) and (lower := part(target)) and FLOOR[lower] < FLOOR[upper]
    ]
    assert not up


def test_parts_know_only_what_they_may() -> None:
    wrong = []
    for importer, target, _ in imports():
        source, other = part(importer), part(target)
        if source is None or other is None or source == other:
            continue
        if other not in ONLY.get(source, {other}) or other in NEVER.get(source, ()):
            wrong.append(f"{importer} imports {target}")
    assert not wrong


def test_no_circles() -> None:
    """Neither between modules nor between parts; imports inside functions count too."""
    for named in (lambda name: name, part):
        edges: dict[str, set[str]] = {}
        for importer, target, _ in imports():
            source, other = named(importer), named(target) if part(target) else None
            if source and other and source != other:
                edges.setdefault(source, set()).add(other)
        assert not _circle(edges)


def _circle(edges: dict[str, set[str]]) -> list[str]:
    """The names on a circle, in order; nothing when there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        done.add(name)
        return next((found for other in sorted(edges.get(name, ())) if (found := walk(other, [*path, name]))), [])

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def test_the_search_for_circles_finds_one() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not _circle({"a": {"b", "c"}, "b": {"c"}})


def test_torch_is_imported_where_a_tensor_is_asked_for() -> None:
    """The parts of a forward pass are of torch; who builds one imports them late."""
    forward = "kvxfer.measure.forward."
    of_torch = {importer for importer, target, _ in imports() if target.startswith("torch") and forward in importer}
    places = {
        (importer, late)
        for importer, target, late in imports()
        if (target.split(".")[0] == "torch" or target in of_torch) and forward not in importer
    }
    assert places == {("kvxfer.cache.pool", True), ("kvxfer.measure.layers", True)}
    assert forward + "recurrent" in of_torch
    assert forward + "room" not in of_torch


@pytest.mark.parametrize(
    "command",
    [
        ["kvxfer.cli", "--help"],
        ["kvxfer.cli", "--version"],
        ["kvxfer.bench", "--help"],
        ["kvxfer.bench", "--tokens", "0"],
        ["kvxfer.serve", "--help"],
        ["kvxfer.plan", "--json", "-", "--model", "70b"],
        ["kvxfer.plan", "--json", "-", "--rate", "1", "--decode-step-ms", "30", "--itl-target-ms", "50"],
        ["kvxfer.plan", "--json", "-", "--pipeline", "best", "--measured", str(RESULT)],
        ["kvxfer.plan", "--observed", "bytes=1e9,ms=100,descriptors=100"],
        ["kvxfer.plan", "--help"],
        ["kvxfer.model_command", "deepseek-v3", "--json", "-"],
        ["kvxfer.model_command", "--help"],
        ["kvxfer.keys", "--help"],
    ],
    ids=" ".join,
)
def test_what_answers_at_once_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import contextlib, os, sys; sys.stdout = sys.stderr = open(os.devnull, 'w')\n"
        f"from {command[0]} import main\n"
        f"with contextlib.suppress(SystemExit): main({command[1:]!r})\n"
        f"sys.__stdout__.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=30
    )
    allowed = {"rich"}  # typer's own
    assert set(done.stdout.split()) <= allowed


@pytest.mark.parametrize("command", [["kvxfer.plan"], ["kvxfer.model_command", "gpt-oss-120b"]], ids=" ".join)
def test_tables_import_neither_torch_nor_numpy(command: list[str]) -> None:
    code = (
        f"import sys; from {command[0]} import main; main({command[1:]!r}); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False, timeout=30)
    assert done.returncode == 0
