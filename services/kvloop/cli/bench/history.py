"""`kvloop bench history`: what re-tokenizing answers costs in reuse, on the agentic trace."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvloop.cli.errors import CommandFailed, sentences, write_line

MODEL = "smollm2"
_LONGEST = 8_192


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("history")(history)
    return typer.main.get_command(single)


@sentences
def history(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/history.json"
    ),
    engine: Annotated[
        Literal["vllm", "simulated"],
        typer.Option(help="simulated: answers of random tokens, the worst case."),
    ] = "vllm",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of the trace.")] = 2,
    turns: Annotated[int, typer.Option(min=2, help="Turns played of each.")] = 20,
    scale: Annotated[float, typer.Option(min=1e-4, help="Factor of the trace's tokens.")] = 0.08,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sessions.")] = 0,
) -> None:
    """Play the agentic trace as chats, with generated ids put back and without."""
    import uvloop

    from kvloop.bench.sse import StreamFailed
    from kvloop.cli.bench.workload import sessions_of
    from kvloop.cli.places import smollm2_checkpoint
    from kvloop.cli.supervisor.part import PartFailed

    tokenizer = str(smollm2_checkpoint())
    played = [session.main for session in sessions_of("agentic", sessions, seed, scale=scale)]
    try:
        record = uvloop.run(_play(engine, tokenizer, played, turns=turns, temperature=temperature))
    except (StreamFailed, PartFailed) as failure:
        raise CommandFailed(str(failure)) from None
    record["settings"] |= {"sessions": sessions, "turns": turns, "scale": scale, "seed": seed}
    record["settings"]["temperature"] = temperature
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    for leg, told in record["legs"].items():
        write_line(sys.stdout, f"{leg:<12} {json.dumps(told)}")
    write_line(sys.stdout, f"written to {out}")


async def _play(engine: str, tokenizer: str, played: Any, **how: Any) -> dict[str, Any]:
    from kvloop.bench import history as measure
    from kvloop.cli.bench import environment
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

    workers: dict[str, Any] = {"engine": engine, "model": MODEL, "max_model_len": _LONGEST}
    if engine == "simulated":
        workers["extra_engine_args"] = {"tokenizer": tokenizer}
    shared = {"model": tokenizer, "served_model_name": MODEL, "max_model_len": _LONGEST}
    plan = FleetPlan(
        workers=workers,
        # What a decode worker gives back must not be hidden by what the prefill worker remembers.
        prefill=[{"enable_prefix_caching": False, "kv_recompute_threshold": 0}],
        routers=[
            {"kv_recompute_threshold": 0, "directory_timeout_ms": 2000.0, "direct": False, "by_cost": False}
        ],
        gateways=[shared, {**shared, "exact_history": False}],
    )
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-history-") as folder, Board() as board:
        fleet = Fleet(plan, Path(folder), board.tell)
        board.show(fleet.parts)
        async with fleet:
            board.finish()
            legs = dict(zip(("exact", "retokenized"), fleet.endpoints("gateway"), strict=True))
            turns = await measure.play_all(legs, MODEL, played, **how)
    return {
        "legs": measure.summary(turns),
        "when": environment.now(),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "settings": {"engine": engine},
        "turns": measure.rows(turns),
    }
