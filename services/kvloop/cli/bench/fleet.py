"""The fleet that a sweep runs on: one D, a P per kind of prefix cache, a router per way.

| route | prefill worker | router |
|---|---|---|
| cold | without prefix cache | reads back, does not go direct |
| hot | with prefix cache | the same |
| other | another one with prefix cache | the same |
| direct | without prefix cache | goes direct |

Only what the legs need is started. A router of a fleet knows all workers at first; it is started again with
those of its route.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloop.bench.sweep import DIRECT, LEGS, Leg
from kvloop.cli.demo.play import PrefillInfo
from kvloop.cli.supervisor.board import Board
from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.router.settings import RouterSettings
from kvloop.v1alpha1 import worker_pb2

DIRECT_SETTING = "direct"
"""The router's setting that lets turns go to D directly."""
_CHOICES = (DIRECT_SETTING, "by_cost")
"""Settings by which a router chooses a way itself; a leg is one way, good or bad."""
_PATIENT = {
    "directory_timeout_ms": 2000.0,
    "prefill_timeout_s": 600.0,
    "first_chunk_timeout_s": 600.0,
    "chunk_timeout_s": 600.0,
}
"""A busy machine must not decide what is measured."""


def offers_direct() -> bool:
    """Tell whether routers can let turns go to D directly."""
    return DIRECT_SETTING in RouterSettings.model_fields


def legs_offered() -> list[Leg]:
    """Return the legs that a fleet of ours can play."""
    return [leg for leg in LEGS.values() if leg is not DIRECT or offers_direct()]


def routes_of(legs: Sequence[Leg]) -> list[str]:
    """Return the routes that legs need."""
    return list(dict.fromkeys(route for leg in legs for route in leg.routes))


@dataclass(frozen=True, slots=True)
class Routes:
    """Where legs are served, and what serves them."""

    endpoints: Mapping[str, str]
    """Router by route."""
    info: worker_pb2.WorkerInfo
    """A prefill worker's facts."""
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Waits until a part ends by itself and raises its PartFailed; None where nothing of ours runs."""


@asynccontextmanager
async def open_routes(legs: Sequence[Leg], workers: Mapping[str, Any], folder: Path) -> AsyncIterator[Routes]:
    """Start what the legs need. Raises PartFailed, ConfigError."""
    routes = routes_of(legs)
    # DIRECT needs no prefill worker of its own.
    kinds = list(dict.fromkeys("cold" if route == "direct" else route for route in routes))
    chosen = {name: False for name in _CHOICES if name in RouterSettings.model_fields}
    plan = FleetPlan(
        workers=workers,
        prefill=[{"enable_prefix_caching": kind != "cold"} for kind in kinds],
        decode=[{"enable_prefix_caching": True}],
        routers=[{**_PATIENT, **chosen, **({DIRECT_SETTING: True} if r == "direct" else {})} for r in routes],
    )
    with Board() as board:
        fleet = Fleet(plan, folder, board.tell)
        board.show(fleet.parts)
        async with fleet:
            if len(kinds) > 1:
                for number, route in enumerate(routes):
                    worker = fleet.endpoint(f"prefill-{kinds.index('cold' if route == 'direct' else route)}")
                    await fleet.restart(f"router-{number}", prefill_endpoints=[worker])
            board.finish()
            reader = PrefillInfo(fleet.endpoint("prefill-0"))
            try:
                info = await reader.read()
            finally:
                await reader.close()
            yield Routes(dict(zip(routes, fleet.endpoints("router"), strict=True)), info, fleet.watch)
