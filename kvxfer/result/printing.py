"""How everything is printed: one style of table, sentences beside a word, figures; no line ends in blanks."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.wording import plain

WIDTH_OF_A_FILE = 120
"""Columns when standard output is no terminal and COLUMNS does not say otherwise."""

NONE = "–"


@dataclass(frozen=True)
class Column:
    """A column as it is printed. Figures are set right and never wrapped; words fold at 1/`share` of the width."""

    header: str
    cells: Sequence[str]
    words: bool = False
    share: int = 5


def make_console() -> Console:
    """The console of standard output: 120 columns when it is no terminal, a `?` for a character it cannot show."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDTH_OF_A_FILE if fixed else None)


def print_table(
    title: str, keys: Sequence[Column], columns: Sequence[Column], console: Console, notes: Sequence[str] = ()
) -> None:
    """Print `columns` beside `keys`, in several tables where one would be too wide; no column without any value.

    An empty line comes before; `notes` explain the table and stand below it.
    """
    remaining = [column for column in columns if any(cell != NONE for cell in column.cells)]
    while remaining:
        count = _how_many_fit(keys, remaining, console)
        console.print()
        print_trimmed(Text(title, style="bold"), console)
        print_trimmed(_table([*keys, *remaining[:count]], console.width), console)
        remaining = remaining[count:]
        title = title.removesuffix(", continued") + ", continued"
    for note in notes:
        print_trimmed(Text(note, style="dim"), console)


def print_pairs(pairs: Iterable[tuple[str, str]], console: Console, style: str = "") -> None:
    """Two columns, the second wrapped beside the first."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold", max_width=max(16, console.width // 3))
    grid.add_column()
    for left, right in pairs:
        grid.add_row(Text(left, style=style), Text(right, style=style))
    print_trimmed(grid, console)


def print_notices(notices: Sequence[str], console: Console) -> None:
    if notices:
        console.print()
        print_pairs([("Note", plain(notice)) for notice in notices], console)


def print_trimmed(what: RenderableType, console: Console) -> None:
    """Print without the blanks that a table pads its lines with."""
    for line in console.render_lines(what, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def figure(value: float | None) -> str:
    """At least three significant digits, an integer's all; `–` for None."""
    if value is None:
        return NONE
    decimals = next((count for count, least in enumerate((100, 10, 1, 0.1, 0.01)) if abs(value) >= least), 5)
    return f"{value:,.{decimals}f}" if value else "0"


def milliseconds(ns: int | None) -> str:
    return figure(None if ns is None else ns / 1e6)


def with_interval(middle_ns: int, interval_ns: Sequence[int] | None) -> str:
    """Milliseconds, and how far, in percent, the farther end of an interval around them is."""
    if interval_ns is None or not middle_ns:
        return f"{milliseconds(middle_ns)} ±   ? %"
    low, high = interval_ns
    return f"{milliseconds(middle_ns)} ± {100 * max(high - middle_ns, middle_ns - low) / middle_ns:3.1f} %"


def counted(count: int, what: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def _how_many_fit(keys: Sequence[Column], columns: Sequence[Column], console: Console) -> int:
    """How many of `columns`, at least one, fit beside `keys`."""
    unlimited = console.options.update(width=10_000)
    for count in range(len(columns), 1, -1):
        table = _table([*keys, *columns[:count]], console.width)
        if console.measure(table, options=unlimited).maximum <= console.width:
            return count
    return 1


def _table(columns: Sequence[Column], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        if column.words:
            most = max(16, width // column.share)
            table.add_column(Text(column.header), overflow="fold", max_width=most, vertical="top")
        else:
            table.add_column(Text(column.header), justify="right", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    return table
