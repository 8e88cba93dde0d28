"""What a demo run shows: progress, then a table."""

from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kvloop.cli.chat.lines import size
from kvloop.cli.demo.record import DemoRecord, TurnRecord

_LEGS = {"on": "with reuse", "off": "without reuse", "warm-up": "warm-up, on other text"}


class Display:
    """Progress of the turns: a bar on a terminal, a line per turn elsewhere."""

    def __init__(self, console: Console, turns: int) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("warm-up", total=2 * turns)

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the display."""
        self._bar.stop()

    def told(self, leg: str, turn: int, record: TurnRecord | None) -> None:
        """Take news of a turn."""
        name = _LEGS[leg] if turn == 0 else f"turn {turn} {_LEGS[leg]}"
        self._bar.update(self._task, description=name)
        if record is not None:
            if turn:
                self._bar.advance(self._task)
            self._console.print(
                f"{name}: {record.verdict} ({reason_text(record)}), {record.prompt_tokens} prompt tokens, "
                f"first token {record.ttft_ms:.0f} ms",
                highlight=False,
            )


def reason_text(record: TurnRecord) -> str:
    """Return a reason as people read it."""
    return record.reason.lower().replace("_", " ")


def table_of(record: DemoRecord) -> Table:
    """Return the comparison, turn by turn."""
    table = Table(
        title="Time to first token, off: without reuse, on: with reuse", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("turn", "prompt\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    for heading in ("re-\nused", "com-\nputed", "off\nms", "on\nms", "off\n/ on", "D->P"):
        table.add_column(heading, justify="right", no_wrap=True)
    for on, off in zip(record.on, record.off, strict=True):
        tokens = on.tokens
        table.add_row(
            str(on.turn),
            str(on.prompt_tokens),
            on.verdict,
            reason_text(on),
            str(tokens["readback"] + tokens["d_local"]),
            str(tokens["computed"]),
            f"{off.ttft_ms:.0f}",
            f"{on.ttft_ms:.0f}",
            f"{off.ttft_ms / on.ttft_ms:.1f}",
            size(on.transfer_bytes),
        )
    return table
