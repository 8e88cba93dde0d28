"""`kvloop serve router|prefill|decode|gateway`: one process of a deployment."""

import asyncio
import gc
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import typer

from kvloop.cli import options, ready
from kvloop.cli.errors import CommandFailed, sentences
from kvloop.cli.groups import LazyGroup

_LOG_LEVEL = "info"
_ELSEWHERE = frozenset({"TOKEN", "METRICS_ENDPOINTS", "STORE_PASSWORD", "ENGINE_PARENT_PID", "BENCH_STORE"})
"""KVLOOP_ variables that are no settings: of commands, and those that kvloop's processes give each other."""
_OF_HAPROXY = "LB_"
_GC_EVERY = 10_000
"""Objects made, less those gone, between two collections of the young."""


@dataclass(frozen=True, slots=True)
class Role:
    """Where the settings and the app of one kind of process are."""

    settings: str
    app: str
    help: str

    def load_settings(self) -> Any:
        """Import the settings model."""
        return _load(self.settings)

    def load_app(self) -> Any:
        """Import the app class."""
        return _load(self.app)


ROLES = {
    "router": Role(
        "kvloop.router.settings:RouterSettings",
        "kvloop.router.app:RouterApp",
        "Serve turns over prefill and decode workers.",
    ),
    "prefill": Role(
        "kvloop.prefill.settings:PrefillSettings",
        "kvloop.prefill.app:PrefillApp",
        "Serve the first leg: compute a prompt's KV, or read it back.",
    ),
    "decode": Role(
        "kvloop.decode.settings:DecodeSettings",
        "kvloop.decode.app:DecodeApp",
        "Serve the second leg: generate, and hold the KV for the next turn.",
    ),
    "gateway": Role(
        "kvloop.gateway.settings:GatewaySettings",
        "kvloop.gateway.app:GatewayApp",
        "Serve OpenAI's and Anthropic's HTTP APIs over a router.",
    ),
}

_EXTRA = {
    "config": Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML file of settings, below flags and environment."),
    ],
    "ready_file": Annotated[
        Path | None,
        typer.Option(
            "--ready-file", metavar="FILE", help="Written once the process serves: JSON with its endpoint."
        ),
    ],
    "log_level": Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ],
}


class _Roles(LazyGroup):
    lines: ClassVar[dict[str, str]] = {name: role.help for name, role in ROLES.items()}

    def make(self, name: str) -> Any:
        return _command(name, ROLES[name])


app = typer.Typer(cls=_Roles, no_args_is_help=True, add_completion=False)


@app.callback()
def _serve() -> None:
    """Run one router, prefill or decode process."""


def _command(name: str, role: Role) -> Any:
    model = role.load_settings()
    made = options.options_of(model)
    extra = {key: value for key, value in _EXTRA.items() if key not in {option.parameter for option in made}}

    def run(
        given: dict[str, Any], config: Path | None, ready_file: Path | None, log_level: str | None = None
    ) -> None:
        settings = model.load(config, options.nest(made, given))
        serve(name, settings, ready_file, log_level or str(getattr(settings, "log_level", _LOG_LEVEL)))

    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    text = f"{role.help}\n\nEvery option is also KVLOOP_<NAME> in the environment and a key of --config."
    single.command(name)(sentences(options.command_of(made, extra, run, text)))
    return typer.main.get_command(single)


def serve(name: str, settings: Any, ready_file: Path | None, log_level: str) -> None:
    """Run one process until SIGTERM or SIGINT. Raises CommandFailed when it can't start."""
    import uvloop

    from kvloop.runtime import logs, server
    from kvloop.runtime.config import ConfigError
    from kvloop.runtime.errors import Failure

    try:
        logs.configure(log_level)
    except KeyError:
        raise ConfigError(f"log_level: no level {log_level!r}; use debug, info, warning or error") from None

    for variable in strange_variables(name):
        # Its value may be a secret.
        logs.get("serve").warning("unknown_variable", name=variable)

    async def run() -> None:
        # Made inside the loop: a gRPC server belongs to the loop it was made in.
        try:
            app = ROLES[name].load_app()(settings)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        await server.run_until_signal(_Announced(app, name, ready_file))

    with ready.no_longer_than_served(ready_file):
        try:
            uvloop.run(run())
        except (server.ServerError, Failure) as error:
            raise CommandFailed(f"{name}: {error}") from None


def strange_variables(name: str) -> list[str]:
    """Return the KVLOOP_ variables of the environment that no process or command knows: misspelt, or gone."""
    from kvloop.runtime.config import ENV_PREFIX, variables

    strange = {found for found in variables() - _ELSEWHERE if not found.startswith(_OF_HAPROXY)}
    # One environment may serve processes of several kinds; mostly, a role's own settings explain all of it.
    for role in (name, *(other for other in ROLES if other != name)):
        if strange:
            strange -= {field.upper() for field in ROLES[role].load_settings().model_fields}
    return sorted(ENV_PREFIX + found for found in strange)


def _spare_collections() -> None:
    """Have the collector look at what turns make, not again and again at all that was loaded.

    Turns leave few cycles: with Python's own threshold, looking for them takes some percent of a router's
    time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_EVERY)


class _Announced:
    """An app that tells where it serves once it does."""

    def __init__(self, app: Any, role: str, ready_file: Path | None) -> None:
        self._app = app
        self._role = role
        self._ready_file = ready_file

    async def start(self) -> None:
        await self._app.start()
        _spare_collections()
        facts = {"event": "ready", "role": self._role, "endpoint": self._app.endpoint, "pid": os.getpid()}
        if metrics := getattr(self._app, "metrics_endpoint", ""):
            facts["metrics"] = metrics
        if chat := getattr(self._app, "chat_endpoint", ""):
            facts["chat"] = chat
        ready.say_line(facts)
        if self._ready_file is not None:
            await asyncio.to_thread(ready.announce, self._ready_file, facts)

    async def lost(self) -> None:
        lost = getattr(self._app, "lost", None)
        await (lost() if lost is not None else asyncio.Event().wait())

    async def drain(self) -> None:
        await self._app.drain()

    async def stop(self) -> None:
        await self._app.stop()


def _load(place: str) -> Any:
    module, name = place.split(":")
    return cast(Any, getattr(importlib.import_module(module), name))
