"""`kvloop up`: a whole deployment on this machine."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli import options
from kvloop.cli.errors import sentences, write_line
from kvloop.cli.places import CHAT, GATEWAY, ROUTER

_HELP = """Start store, prefill, decode, router and gateway here, and stop them together.

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
    "gateways": Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Gateways: OpenAI's and Anthropic's APIs. "
            "[default: 1; none over simulated engines without a tokenizer]",
        ),
    ],
    "gateway_listen": Annotated[
        str | None,
        typer.Option(help=f"host:port of the first gateway; port 0 takes any. [default: {GATEWAY}]"),
    ],
    "chat_listen": Annotated[
        str | None,
        typer.Option(help=f"host:port of the first gateway's ChatService. [default: {CHAT}]"),
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
    "gateway_config": Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of settings for every gateway.")
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
    gateway = {**_of_engine(engine), **read_values(own["gateway_config"])}
    count = own["gateways"]
    if count is None:
        count = 0 if _speechless(engine) else 1
    return FleetPlan(
        prefill=[prefill] * (own["prefill"] or 1),
        decode=[decode] * (own["decode"] or 1),
        routers=_replicas(router, own["routers"] or 1, listen=(own["listen"], ROUTER)),
        gateways=_replicas(
            gateway,
            count,
            listen=(own["gateway_listen"], GATEWAY),
            chat_listen=(own["chat_listen"], CHAT),
        ),
        workers=engine,
        store_url=own["store"],
    )


def _replicas(values: dict[str, Any], count: int, **places: tuple[str | None, str]) -> list[dict[str, Any]]:
    """Return the settings of so many processes; the first is where it is looked for, others anywhere.

    places: settings that say where, each with what was asked for and what is usual.
    """
    others = {name: value for name, value in values.items() if name not in places}
    first = {name: given or values.get(name, usual) for name, (given, usual) in places.items()}
    return [{**values, **first}, *[others] * (count - 1)] if count else []


def _speechless(engine: dict[str, Any]) -> bool:
    """Tell whether the engines' tokens are those of no real tokenizer."""
    simulated = engine.get("engine") == "simulated"
    return simulated and not (engine.get("extra_engine_args") or {}).get("tokenizer")


def _of_engine(engine: dict[str, Any]) -> dict[str, Any]:
    """Return what gateways must know of the engines."""
    from kvloop.engine.settings import EngineSettings, resolve

    try:
        settings = EngineSettings(**engine)
        longest = settings.max_model_len
        if settings.engine == "vllm":
            longest = resolve(settings).max_model_len
    except ValueError:
        # The workers' own check says what is wrong, and of which part.
        return {}
    values: dict[str, Any] = {
        "model": (settings.extra_engine_args.get("tokenizer") or settings.model),
        "served_model_name": settings.model_name,
        "adapters": list(settings.adapters),
    }
    if longest is not None:
        values["max_model_len"] = longest
    if settings.revision is not None and not Path(settings.model_path).exists():
        values["revision"] = settings.revision
    return values


async def _up(plan: Any, logs: Path | None) -> int:
    from kvloop.cli.logfolder import log_folder
    from kvloop.cli.supervisor.board import Board
    from kvloop.cli.supervisor.fleet import Fleet

    async with log_folder(logs, "up") as folder:
        with Board() as board:
            fleet = Fleet(plan, folder, board.tell)
            board.show(fleet.parts)
            async with fleet:
                board.finish()
                write_line(sys.stdout, _endpoints(fleet))
                await fleet.watch()
    return 0


def _endpoints(fleet: Any) -> str:
    lines = [f"{name:<12} {part.endpoint:<22} pid {part.pid}" for name, part in fleet.parts.items()]
    lines.append(f"logs         {fleet.folder}")
    settings = fleet.plan.settings()["prefill-0"]
    if settings.get("engine") != "simulated":
        named = f" --model {settings['model']}" if settings.get("model") else ""
        lines += ["", f"Talk to it:     kvloop chat --router {fleet.endpoint('router-0')}{named}"]
    for name in fleet.names("gateway"):
        lines.append(f"OpenAI's API:   http://{fleet.endpoint(name)}/v1")
        lines.append(f"ChatService:    {fleet.parts[name].facts.get('chat', '')}")
    decoders = " ".join(f"--decode {endpoint}" for endpoint in fleet.endpoints("decode"))
    settings_file = fleet.folder / "router-0.yaml"
    lines.append(
        f"Is it well:     kvloop doctor --config {settings_file} --router {fleet.endpoint('router-0')}"
    )
    lines += [f"What it holds:  kvloop leases {decoders}", "Ctrl-C stops it."]
    return "\n".join(lines)
