"""Files with a value or a record on each line, as a user gives them."""

from __future__ import annotations

from pathlib import Path

from kvxfer.errors import UsageError
from kvxfer.wording import quoted_path

LARGEST_FILE = 256 << 20
"""Bytes; a trace of a million requests in CSV has less."""


def read_lines(path: str, option: str, remedy: str) -> list[tuple[int, str]]:
    """Number and text of every line that is not blank.

    Raises UsageError when there is none, no text in UTF-8, or more than LARGEST_FILE bytes.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            most = f"{LARGEST_FILE >> 20} MiB"
            raise UsageError(
                f"{option} {quoted_path(path)} has more than {most}; {remedy}, and no more than that (head)"
            )
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {option} {quoted_path(path)}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise UsageError(f"{option} {quoted_path(path)} is not text in UTF-8; {remedy}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{option} {quoted_path(path)} is empty; {remedy}")
    return lines


def wrong_line(path: str, number: int, what: str, remedy: str) -> UsageError:
    return UsageError(f"{quoted_path(path)}, line {number}: {what}; {remedy}")
