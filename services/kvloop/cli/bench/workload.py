"""`kvloop bench workload`, and where other commands get their sessions from."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.errors import CommandFailed, sentences, write_line

if TYPE_CHECKING:
    from kvloop.bench.workload.model import Session

KINDS = ("multi-turn", "agentic")
STOP_HELP = "What some sessions' answers end at (agentic). [default: Observation:]"


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("workload")(workload)
    return typer.main.get_command(single)


@sentences
def workload(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file to write.")],
    kind: Annotated[str, typer.Option(help=f"One of: {', '.join(KINDS)}.")] = "multi-turn",
    sessions: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sessions.")] = 0,
    scale: Annotated[float, typer.Option(min=1e-4, help="Factor of tokens (agentic).")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Factor of pauses (agentic).")] = 1.0,
    stop: Annotated[str | None, typer.Option(help=STOP_HELP)] = None,
) -> None:
    """Write conversations in the format of vLLM's multi-turn benchmark."""
    from kvloop.bench.workload import sharegpt

    made = sessions_of(kind, sessions, seed, scale=scale, time_scale=time_scale, stop=stop)
    sharegpt.save(file, made)
    requests = sum(session.requests for session in made)
    write_line(sys.stdout, f"{len(made)} sessions, {requests:,} requests: {file}")


def sessions_of(
    kind: str,
    count: int,
    seed: int,
    *,
    scale: float = 1.0,
    time_scale: float = 1.0,
    stop: str | None = None,
) -> "list[Session]":
    """Return sessions of a kind, or of a file. Raises CommandFailed."""
    from kvloop.bench.workload import sharegpt
    from kvloop.bench.workload.agentic import REACT_STOP, Agentic
    from kvloop.bench.workload.multiturn import MultiTurn

    if kind == "multi-turn":
        return MultiTurn().sessions(seed, count)
    if kind == "agentic":
        made = Agentic(scale=scale, time_scale=time_scale, stop=stop or REACT_STOP)
        return made.sessions(seed, count)
    if not Path(kind).is_file():
        raise CommandFailed(f"{kind} is no file and no kind of workload ({', '.join(KINDS)})")
    try:
        return sharegpt.load(Path(kind))[:count]
    except sharegpt.BadWorkload as error:
        raise CommandFailed(str(error)) from None
