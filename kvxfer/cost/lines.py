"""Files with a value or a record on each line, as a user gives them."""

from __future__ import annotations

import io
from collections.abc import Iterator

from kvxfer.errors import UsageError
from kvxfer.reading import open_to_read
from kvxfer.wording import quoted_path

LARGEST_FILE = 256 << 20
"""Bytes; a trace of a million requests in JSON Lines has less."""

LONGEST_LINE = 4 << 20
"""Characters; the longest prompt in a trace, with the hashes of its blocks, has less."""

MOST_LINES = 4_000_000
"""Each is kept as a few numbers, and looked at several times."""

BYTE_ORDER_MARK = "\ufeff"


def read_lines(path: str, option: str, remedy: str) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank, one after the other: none of them is kept.

    Raises UsageError when there is none, for what is no text in UTF-8, and for more than is allowed.
    """
    number = count = 0
    try:
        with open_to_read(path, LARGEST_FILE) as file:
            for number, line in enumerate(io.TextIOWrapper(file, "utf-8"), 1):
                if len(line) > LONGEST_LINE:
                    raise wrong_line(path, number, f"it has {len(line):,} characters", remedy)
                text = line.lstrip(BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
                if text:
                    count += 1
                    if count > MOST_LINES:
                        raise wrong_line(
                            path, number, f"more than {MOST_LINES:,} lines are not read", "give a part (head)"
                        )
                    yield number, text
    except OSError as error:
        raise UsageError(f"cannot read {option} {quoted_path(path)}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {quoted_path(path)} is not text in UTF-8; {remedy}") from error
    if not count:
        raise UsageError(f"{option} {quoted_path(path)} is empty; {remedy}")


def wrong_line(path: str, number: int, what: str, remedy: str) -> UsageError:
    return UsageError(f"{quoted_path(path)}, line {number}: {what}; {remedy}")
