"""`kvloop bench compare`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line

_FEW = (
    "Fewer than {} samples (of a load: conversations) have a range, not an interval: they tell a change only"
    " where the runs' samples are apart, not overlapping; a load's never do."
)


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("compare")(compare)
    return typer.main.get_command(single)


@sentences
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Folder or requests.jsonl of the first run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Folder or requests.jsonl of the second run.")],
    metric: Annotated[str, typer.Option(help="What is compared.")] = "ttft_ms",
    min_change: Annotated[
        float, typer.Option(min=0, help="Smaller changes are noise, whatever their p.")
    ] = 0.02,
    fail_on_slower: Annotated[bool, typer.Option(help="Exit with 1 when a leg became slower.")] = False,
) -> None:
    """Tell a change between two runs from noise, leg by leg.

    Ratios are B over A: below 1 is faster. Settings in which the runs differ are said first: what is compared
    should be the only one.
    """
    from rich.console import Console
    from rich.table import Table

    from kvloop.bench import compare as comparing
    from kvloop.bench import records, statistics
    from kvloop.bench.likeness import differences

    if metric not in comparing.METRICS:
        raise CommandFailed(f"--metric: {metric}: choose from {', '.join(comparing.METRICS)}")
    try:
        first, second = records.read(before), records.read(after)
    except records.BadRecords as error:
        raise CommandFailed(str(error)) from None
    found = comparing.compare(first, second, metric=metric, min_change=min_change)
    for line in comparing.dropped(first, second, metric=metric):
        say(f"not compared: {line}")
    for line in differences(_settings_of(before), _settings_of(after)):
        say(f"A and B differ in {line}")
    for name, line in comparing.loads(first, second, metric=metric):
        say(f"{name}: {line}")
    if not found:
        raise CommandFailed(f"the runs have no leg and prompt length in common that {metric} was measured of")
    table = Table(
        "leg",
        "tokens",
        "B / A",
        "95% interval or range",
        "p",
        "finding",
        title=f"{metric}: {before} -> {after}",
    )
    for leg in found:
        table.add_row(leg.leg, "all", f"{leg.ratio:.3f}", "", f"{leg.p:.4f}", f"[bold]{leg.finding}[/bold]")
        for cell in leg.cells:
            ratio = cell.ratio
            interval = "" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
            if ratio.is_range:
                interval += (
                    f" (range, {'apart' if cell.apart else 'overlapping'})"
                    if cell.nominal_tokens
                    else " (range)"
                )
            tokens = f"{cell.nominal_tokens:,}" if cell.nominal_tokens else "-"
            table.add_row("", tokens, f"{ratio.value:.3f}", interval, f"{cell.p:.4f}")
    Console().print(table)
    if any(cell.ratio.is_range for leg in found for cell in leg.cells):
        write_line(sys.stdout, _FEW.format(statistics.ENOUGH))
    if fail_on_slower and any(leg.finding is comparing.Finding.SLOWER for leg in found):
        raise typer.Exit(EXIT_FAILED)


def _settings_of(place: Path) -> Mapping[str, Any]:
    """Return the settings that the run's summary tells; none where there is no summary."""
    folder = place if place.is_dir() else place.parent
    try:
        told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}
