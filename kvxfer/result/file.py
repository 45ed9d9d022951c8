"""The result file: written whole or not at all, read with its version checked.

`-` in place of a path is standard output.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from kvxfer.errors import UnavailableError, UsageError
from kvxfer.reading import open_to_read

Result = dict[str, Any]

SCHEMA_VERSION = 1
"""The version this kvxfer writes and reads; raised when a reader of the earlier one would misunderstand a file."""

ONE_HOST_SCOPES = ("loopback", "host")
"""What is measured in these scopes says nothing about a link between two hosts, and no verdict is drawn from it."""

STANDARD_OUTPUT = ("-", "/dev/stdout")

LARGEST_RESULT = 256 << 20
"""Bytes that are read of one: far more than those of long runs with all their samples have."""

ESCAPE = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(ud[89a-f]..)|.)")
"""One of JSON's: a pair of surrogates, a lone one, or another."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the result file, as it comes with the package."""
    text = resources.files("kvxfer.result").joinpath("schema.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def check_writable(path: str | Path) -> None:
    """Find out before a long run whether `write_result` could write there. Leaves nothing behind.

    Raises UsageError for a path that cannot name a file, UnavailableError for one that may not be written.
    """
    name = os.fspath(path)
    if name in STANDARD_OUTPUT:
        return
    target = Path(os.path.realpath(name))
    if not name or target.is_dir():
        raise UsageError(f"cannot write the result to '{name}': it is a directory; name a file in it")
    if not target.parent.is_dir() and not _is_special(name):
        raise UsageError(f"cannot write the result to '{name}': there is no directory {target.parent}; make it first")
    try:
        _try_to_write(name, target)
    except OSError as error:
        raise _not_written(name, error) from error


def write_result(path: str | Path, result: Result) -> None:
    """Write `result` as JSON, one line per field of the top level.

    A regular file appears complete or not at all: everything goes to a temporary file beside it, which takes its name
    only once it is on the disk; an earlier file of that name stays as it was until then. A symbolic link is followed.
    What is no regular file (a pipe, a device) is written in place. What in a file's name is no text in UTF-8, in Python
    a lone surrogate, is written as `?`: strict readers of JSON refuse it.

    Raises UnavailableError when it cannot be written, and ValueError when a number in it is not finite (a defect, JSON
    has no such numbers).
    """
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in result.items())
    text = ESCAPE.sub(lambda found: "?" if found[1] else found[0], "{\n" + ",\n".join(lines) + "\n}\n")
    name = os.fspath(path)
    try:
        if name in STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        elif _is_special(name):
            with open(name, "a", encoding="utf-8") as special:
                special.write(text)
        else:
            _replace(Path(os.path.realpath(name)), text)
    except OSError as error:
        raise _not_written(name, error) from error


def read_result(path: str | Path) -> Result:
    """The result in a file. Fields it does not know stay in it, and nobody has to look at them.

    Raises UsageError when it cannot be read, is not a result, lacks a field of the top level, or has another version.
    """
    name = os.fspath(path)
    result = _parse(name)
    if "schema_version" not in result:
        raise UsageError(f"'{name}' is not a result of kvxfer: it has no schema_version; give a file that --json wrote")
    if result["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"'{name}' has schema version {result['schema_version']!r}, this kvxfer reads version {SCHEMA_VERSION}; "
            "read it with the kvxfer that wrote it, or measure again"
        )
    _check_top_level(name, result)
    return result


def _try_to_write(name: str, target: Path) -> None:
    if os.path.exists(name) and not os.access(name, os.W_OK):
        raise PermissionError(None, "no permission to write it")  # a rename would replace even a write-protected file
    if not _is_special(name):
        temporary, descriptor = _open_temporary(target)
        os.close(descriptor)
        temporary.unlink()


def _replace(target: Path, text: str) -> None:
    temporary, descriptor = _open_temporary(target)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:  # Ctrl-C included: nothing may be left behind
        temporary.unlink(missing_ok=True)
        raise


def _open_temporary(target: Path) -> tuple[Path, int]:
    """A new file beside `target`, so that a rename stays within one file system; its mode follows the umask."""
    temporary = target.parent / f".kvxfer-{secrets.token_hex(8)}.tmp"
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _is_special(name: str) -> bool:
    """Whether there is something at `name` that is neither a regular file nor a directory."""
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _not_written(name: str, error: OSError) -> UnavailableError:
    reason = error.strerror or str(error)
    remedy = "free some space there or give another path" if error.errno in NO_ROOM else "give another path"
    return UnavailableError(f"cannot write the result to '{name}': {reason}; {remedy}")


def _parse(name: str) -> Result:
    try:
        with open_to_read(name, LARGEST_RESULT) as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read '{name}': {error.strerror}; give a file that --json wrote") from error
    except ValueError as error:
        raise UsageError(f"'{name}' is not JSON: it is not text in UTF-8; give a file that --json wrote") from error
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{name}' is not JSON: {error}; give a file that --json wrote") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"'{name}' is not a result of kvxfer: it holds no JSON object; give a file that --json wrote")
    return parsed


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _check_top_level(name: str, result: Result) -> None:
    rules = schema()
    missing = [field for field in rules["required"] if field not in result]
    if missing:
        raise UsageError(f"'{name}' is not a complete result of kvxfer: it lacks {', '.join(missing)}; measure again")
    kinds = {"array": list, "object": dict}
    for field, rule in rules["properties"].items():
        kind = kinds.get(str(rule.get("type")))
        if kind is not None and field in result and not isinstance(result[field], kind):
            raise UsageError(f"'{name}' is not a result of kvxfer: {field} should be an {rule['type']}; measure again")
