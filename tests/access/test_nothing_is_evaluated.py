"""What a peer says is data: the package holds nothing that would run it, and no message has room for a path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from kvxfer.control import messages

PACKAGE = Path(messages.__file__).parents[1]

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "code"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
IMPORTERS = {"importlib.import_module", "runpy.run_module", "runpy.run_path"}
OWN_COMMANDS = ("cli.py", "importlib.import_module")
"""The command line imports the module of the subcommand that its user typed, from a table of ours."""

STARTERS = {
    "kvxfer/measure/process.py": '[sys.executable, "-m", "kvxfer.measure.worker", str(theirs.fileno()), side]',
    "kvxfer/measure/local.py": '[sys.executable, "-m", "kvxfer.measure.local", endpoint, str(reader)]',
}
"""All that starts a process, and what: our own modules, with words of our own."""

TEXTS = {
    "Failed.message": "shown to the user",
    "HostInfo.boot_id": "compared",
    "HostInfo.cpu_model": "shown and written into the result",
    "HostInfo.hostname": "shown and written into the result",
    "HostInfo.kernel": "shown and written into the result",
    "HostInfo.kvxfer_version": "shown and written into the result",
    "HostInfo.netns": "compared",
    "HostInfo.python": "shown and written into the result",
    "Connect.endpoint": "where the data connections go, held against what endpoint.py allows; a server takes none",
    "Described.details": "written into the result",
    "Described.lanes": "shown and written into the result",
    "Hello.version": "shown",
    "LayersBuilt.how": "shown and written into the result",
    "Mlp.activation": "one of those that are known, or refused",
    "Open.address": "where the data port listens; a server puts its own in its place",
    "Open.backend": "looked up in the registry",
    "Open.options": "numbers by name; a backend refuses those it does not know",
    "Opened.endpoint": "host:port or an abstract socket of ours (tests/unit/test_endpoint.py); the rest is refused",
    "Opened.library_path": "written into the result",
    "Opened.library_version": "written into the result",
    "Opened.warning": "shown and written into the result",
    "Pipeline.compute": "timed, spin or layers",
    "Pipeline.op": "push or pull",
    "Pipeline.sends": "all, first or none",
    "Recurrence.rule": "one of those that are known, or refused",
    "Run.op": "push or pull",
    "Verified.where": "shown",
    "Welcome.backends": "compared",
    "Welcome.data_address": "host of the data connections",
    "Welcome.version": "shown",
}
"""Every text in a message, and all that is done with it."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not UNPICKLERS & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNPICKLERS
    for name, call in calls(path):
        if (path.name, name) != OWN_COMMANDS:
            assert name not in EVALUATORS | SHELLS | IMPORTERS, f"line {call.lineno}: {name}"
        assert not name.startswith(("os.exec", "os.spawn", "os.posix_spawn")), f"line {call.lineno}: {name}"
        words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert "shell" not in words, f"line {call.lineno}: {name}(shell=…)"
        assert words.get("allow_pickle", "False") == "False", f"line {call.lineno}: {name}"
        if name in ("np.load", "numpy.load"):
            assert "allow_pickle" in words, f"line {call.lineno}: {name}"


def test_only_our_own_modules_are_started() -> None:
    started = {
        (str(path.relative_to(PACKAGE.parent)), ast.unparse(call.args[0]).replace("'", '"'))
        for path in modules()
        for name, call in calls(path)
        if name.startswith("subprocess.") and name != "subprocess.TimeoutExpired"
    }
    assert started == set(STARTERS.items())


def texts(kind: Any, name: str) -> Iterator[str]:
    """Names of the fields below `kind` that hold text."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        for field, inner in get_type_hints(kind).items():
            yield from texts(inner, f"{kind.__name__}.{field}")
    elif kind is str or any(isinstance(one, str) for one in get_args(kind)):
        yield name
    elif get_origin(kind) is not None or get_args(kind):
        for inner in get_args(kind):
            yield from texts(inner, name)
    else:
        assert kind in (int, float, bool, bytes, type(None)), f"{name}: {kind} may hold anything"


def test_no_message_holds_a_path_or_a_command() -> None:
    """A new text field has to be entered above, with what is done with it."""
    unions = (messages.ToWorker, messages.FromWorker, messages.ToServer, messages.FromServer)
    assert {name for union in unions for name in texts(union, "")} == set(TEXTS)


def test_what_comes_as_text_opens_nothing() -> None:
    """No module that has to do with messages opens a file whose name is not its own."""
    for folder in ("control", "measure"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for name, call in calls(path):
                if name.split(".")[-1] in ("open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink"):
                    where = f"{folder}/{path.name}"
                    own = where in ("control/keys.py", "measure/host.py", "measure/process.py")
                    own |= bool(call.args) and ast.unparse(call.args[0]) == "os.devnull"
                    assert own, f"{where} line {call.lineno}: {ast.unparse(call)}"
