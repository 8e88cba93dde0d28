"""The `kvloop` command."""

import importlib
from typing import Any, ClassVar, NamedTuple

import typer

from kvloop.cli.groups import LazyGroup


class _Lazy(NamedTuple):
    place: str
    kind: str
    """"app" (a Typer), "function", or "factory" (returns a command)."""
    line: str


_COMMANDS = {
    "up": _Lazy("kvloop.cli.up:make_command", "factory", "Start store, prefill, decode and router here."),
    "serve": _Lazy("kvloop.cli.serve:app", "app", "Run one router, prefill or decode process."),
    "chat": _Lazy("kvloop.cli.chat.command:chat", "function", "Talk to a model; see what was reused."),
    "leases": _Lazy("kvloop.cli.leases:leases", "function", "List the leases that decode workers hold."),
    "reload": _Lazy("kvloop.cli.reload:reload", "function", "Have workers load their weights anew."),
    "doctor": _Lazy("kvloop.cli.doctor.command:doctor", "function", "Check a deployment; say what to do."),
    "explain": _Lazy("kvloop.cli.explain:explain", "function", "Show the numbers behind a recent turn."),
    "demo": _Lazy("kvloop.cli.demo.command:demo", "function", "One conversation with and without reuse."),
    "bench": _Lazy("kvloop.cli.bench.command:app", "app", "Measure: sweeps, load, comparisons."),
    "certs": _Lazy("kvloop.cli.certs:certs", "function", "Make certificates for development."),
    "model": _Lazy("kvloop.cli.model:app", "app", "Get models."),
}


class _Commands(LazyGroup):
    lines: ClassVar[dict[str, str]] = {name: lazy.line for name, lazy in _COMMANDS.items()}

    def make(self, name: str) -> Any:
        lazy = _COMMANDS[name]
        module, attribute = lazy.place.split(":")
        found = getattr(importlib.import_module(module), attribute)
        if lazy.kind == "factory":
            return found()
        if lazy.kind == "function":
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(name)(found)
            found = single
        return typer.main.get_command(found)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def _kvloop() -> None:
    """KV cache that travels both ways, for multi-turn agents on prefill/decode disaggregated vLLM."""


if __name__ == "__main__":
    app()
