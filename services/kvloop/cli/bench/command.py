"""`kvloop bench`: its commands."""

import importlib
from typing import Any, ClassVar

import typer

from kvloop.cli.groups import LazyGroup

_PLACES = {
    "sweep": ("kvloop.cli.bench.sweep:make_command", "TTFT against prompt length, leg by leg."),
    "load": ("kvloop.cli.bench.load:make_command", "Play conversations against a router or server."),
    "leases": ("kvloop.cli.bench.leases:make_command", "What leases cost, and are worth under pressure."),
    "router": ("kvloop.cli.bench.router:make_command", "What a router costs in time, CPU and memory."),
    "scale": ("kvloop.cli.bench.scale:make_command", "What many workers, conversations, routers cost."),
    "peers": ("kvloop.cli.bench.peers:make_command", "vLLM's proxies and vllm-router beside kvloop."),
    "replicas": ("kvloop.cli.bench.replicas:make_command", "Routers behind HAProxy, killed and restarted."),
    "workload": ("kvloop.cli.bench.workload:make_command", "Write conversations as JSON."),
    "gateway": ("kvloop.cli.bench.gateway:make_command", "What the gateway adds to a turn."),
    "history": ("kvloop.cli.bench.history:make_command", "What re-tokenizing answers costs in reuse."),
    "compare": ("kvloop.cli.bench.compare:make_command", "Tell a change between two runs from noise."),
    "report": ("kvloop.cli.bench.report:make_command", "Summary and pictures of a sweep, anew."),
}


class _Commands(LazyGroup):
    lines: ClassVar[dict[str, str]] = {name: line for name, (_, line) in _PLACES.items()}

    def make(self, name: str) -> Any:
        module, attribute = _PLACES[name][0].split(":")
        return getattr(importlib.import_module(module), attribute)()


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    """Measure, and say what the measurements mean."""
