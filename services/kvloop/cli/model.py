"""`kvloop model`: checkpoints on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from kvloop.cli.errors import CommandFailed, sentences

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _model() -> None:
    """Get models."""


@app.command("fetch")
@sentences
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2, or a Hugging Face name.")] = "smollm2",
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="[default: a folder in the user's cache]")
    ] = None,
) -> None:
    """Fetch a model into the user's cache; what is there already is checked and kept."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloop.cli import checkpoint

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def tell(step: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {step}", completed=done, total=total or None)

        try:
            place = checkpoint.fetch(name, to, tell)
        except checkpoint.CheckpointError as error:
            raise CommandFailed(str(error)) from None
    typer.echo(str(place))
