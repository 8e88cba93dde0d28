"""Live status of a fleet that starts: a table on a terminal, lines elsewhere."""

import contextlib
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from kvloop.cli.errors import write_line

_WAITING = "starting"


class Board:
    """Shows what every part does. A context: the display ends with it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._states: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the display."""
        self.finish()

    def show(self, names: Iterable[str]) -> None:
        """Name the parts."""
        self._states = dict.fromkeys(names, "waiting")

    def tell(self, name: str, state: str) -> None:
        """Take a part's new state."""
        self._states[name] = state
        now = time.monotonic()
        if state == _WAITING:
            self._since[name] = now
        self._took[name] = now - self._since.get(name, now)
        if self._live is None:
            took = f" after {self._took[name]:.1f} s" if state == "ready" else ""
            self._line(f"{name} {state}{took}")

    def finish(self) -> None:
        """Take the table away; what is told from now on is printed as lines."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()

    def _line(self, text: str) -> None:
        write_line(self._console.file, text)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            if state == _WAITING:
                seconds = f"{time.monotonic() - self._since[name]:.0f} s"
                table.add_row(name, Spinner("dots", state), seconds)
            else:
                table.add_row(name, state, f"{self._took[name]:.1f} s" if state == "ready" else "")
        return table
