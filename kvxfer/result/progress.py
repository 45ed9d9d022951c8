"""One line on the terminal's standard error that says what is being done now."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live


class Progress:
    """Shows the latest step while its `with` block runs, and takes the line away after it, however it ends.

    Silent unless `enabled` and standard error is a terminal. The line is drawn only when a step begins: a spinner would
    take CPU time from what is being measured.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
        return self

    def step(self, text: str) -> None:
        """Show `text` (plain, no markup) in place of the step before; what exceeds the line is cut."""
        if self._live is not None:
            from rich.text import Text

            line = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
            self._live.update(line, refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
