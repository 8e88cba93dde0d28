"""`kvloop up`: a whole deployment on this machine."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli import options
from kvloop.cli.errors import EXIT_FAILED, say, sentences, write_line
from kvloop.cli.places import ROUTER

_HELP = """Start store, prefill, decode and router here, and stop them together.

Ctrl-C ends it. The engine's options go to every prefill and decode worker.
"""

_EXTRA: dict[str, Any] = {
    "prefill": Annotated[int | None, typer.Option(min=1, help="Prefill workers. [default: 1]")],
    "decode": Annotated[int | None, typer.Option(min=1, help="Decode workers. [default: 1]")],
    "routers": Annotated[int | None, typer.Option(min=1, help="Routers. [default: 1]")],
    "listen": Annotated[
        str | None,
        typer.Option(help=f"host:port of the first router; port 0 takes any. [default: {ROUTER}]"),
    ],
    "store": Annotated[
        str | None, typer.Option(metavar="URL", help="redis:// URL of a store. [default: one of our own]")
    ],
    "prefix_caching_on_prefill": Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching-on-prefill/--no-prefix-caching-on-prefill",
            help="Whether prefill workers have a prefix cache. [default: as enable-prefix-caching]",
        ),
    ],
    "prefill_config": Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of settings for every prefill worker.")
    ],
    "decode_config": Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of settings for every decode worker.")
    ],
    "router_config": Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of settings for every router.")
    ],
    "logs": Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs go. [default: a temporary folder]")
    ],
}


def make_command() -> Any:
    """Return the command; its engine options come from the engine's settings."""
    from kvloop.engine.settings import EngineSettings

    made = options.options_of(EngineSettings)

    def run(given: dict[str, Any], **own: Any) -> None:
        from kvloop.cli import signals

        engine = {option.parameter: option.parse(given.get(option.parameter)) for option in made}
        engine = {name: value for name, value in engine.items() if value not in (None, [], ())}
        signals.run(_up(plan_of(engine, own), own["logs"]), ending_is_success=True)

    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("up")(sentences(options.command_of(made, _EXTRA, run, _HELP)))
    return typer.main.get_command(single)


def plan_of(engine: dict[str, Any], own: dict[str, Any]) -> Any:
    """Return the plan that the options ask for. Raises ConfigError, CommandFailed."""
    from kvloop.cli.places import check_model
    from kvloop.cli.supervisor.plan import FleetPlan, read_values

    check_model(engine)
    prefill = read_values(own["prefill_config"])
    if own["prefix_caching_on_prefill"] is not None:
        prefill["enable_prefix_caching"] = own["prefix_caching_on_prefill"]
    decode, router = read_values(own["decode_config"]), read_values(own["router_config"])
    first = {"listen": own["listen"] or router.get("listen", ROUTER)}
    others = {name: value for name, value in router.items() if name != "listen"}
    return FleetPlan(
        prefill=[prefill] * (own["prefill"] or 1),
        decode=[decode] * (own["decode"] or 1),
        routers=[{**router, **first}, *[others] * ((own["routers"] or 1) - 1)],
        workers=engine,
        store_url=own["store"],
    )


async def _up(plan: Any, logs: Path | None) -> int:
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet
    from kvloop.cli.supervisor.part import PartFailed

    folder = logs or Path(tempfile.mkdtemp(prefix="kvloop-up-"))
    keep = logs is not None
    try:
        with Board() as board:
            fleet = Fleet(plan, folder, board.tell)
            board.show(fleet.parts)
            async with fleet:
                board.finish()
                write_line(sys.stdout, _endpoints(fleet))
                await fleet.watch()
    except PartFailed as failure:
        keep = True
        say(f"{failure}\nEverything was stopped; all logs are in {folder}")
        return EXIT_FAILED
    finally:
        if not keep:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return 0


def _endpoints(fleet: Any) -> str:
    lines = [f"{name:<12} {part.endpoint:<22} pid {part.pid}" for name, part in fleet.parts.items()]
    lines.append(f"logs         {fleet.folder}")
    settings = fleet.plan.settings()["prefill-0"]
    if settings.get("engine") != "simulated":
        named = f" --model {settings['model']}" if settings.get("model") else ""
        lines += ["", f"Talk to it:     kvloop chat --router {fleet.endpoint('router-0')}{named}"]
    decoders = " ".join(f"--decode {endpoint}" for endpoint in fleet.endpoints("decode"))
    settings_file = fleet.folder / "router-0.yaml"
    lines.append(
        f"Is it well:     kvloop doctor --config {settings_file} --router {fleet.endpoint('router-0')}"
    )
    lines += [f"What it holds:  kvloop leases {decoders}", "Ctrl-C stops it."]
    return "\n".join(lines)
