"""A config.json as a JSON object, with every way it can be unreadable as one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.reading import open_to_read
from kvxfer.wording import quoted, quoted_path

LARGEST_CONFIG = 16 << 20
"""Real ones have some kilobytes. More is another kind of file, perhaps the weights."""


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in the file; NaN and Infinity, which some writers leave in, are read as floats.

    Raises UsageError when the file cannot be read, is too large, not UTF-8, not JSON, nested too deeply or no object.
    """
    name = quoted_path(path)
    try:
        value = json.loads(_read(path, name).decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _unreadable(name, "is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _unreadable(name, f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _unreadable(name, "is nested too deeply") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise _unreadable(name, "holds a number of too many digits") from None
    if not isinstance(value, dict):
        raise _unreadable(name, f"holds {quoted(value)} where a JSON object is expected")
    return value


def _read(path: Path, name: str) -> bytes:
    try:
        with open_to_read(path, LARGEST_CONFIG) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(name, f"cannot be read: {error.strerror or error}") from None


def _unreadable(name: str, why: str) -> UsageError:
    return UsageError(f"{name} {why}; give the config.json of a model")
