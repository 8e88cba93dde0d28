"""Progress of a run: a bar on a terminal, nothing elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvloop.bench.records import Record


class Bar:
    """Counts requests. A context: the bar ends with it."""

    def __init__(self, total: int | None, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not (console or Console(stderr=True)).is_terminal,
        )
        self._task = self._progress.add_task("requests", total=total)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the display."""
        self._progress.stop()

    def tell(self, record: Record) -> None:
        """Take a request in."""
        size = f" {record.nominal_tokens:,}" if record.nominal_tokens else ""
        what = "failed" if record.error else record.verdict.lower()
        self.count(f"{record.leg}{size} {what}")

    def count(self, description: str) -> None:
        """Take a request in, as it is described."""
        self._progress.update(self._task, advance=1, description=description)
