"""A simulated fleet as processes that can be watched, and turns for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router_sim import ids

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.client import Client
from kvloop.v1alpha1 import sampling_pb2

WATCHED: dict[str, Any] = {"metrics_listen": "127.0.0.1:0", "directory_timeout_ms": 2000.0}


@asynccontextmanager
async def watched_fleet(folder: Path, **router: Any) -> AsyncIterator[Fleet]:
    """Open one P, two D and a router with metrics; D is read back from whenever it can be."""
    workers = {"engine": "simulated", "block_size": 32, "enable_prefix_caching": False}
    plan = FleetPlan(
        workers={**workers, **WATCHED},
        prefill=({"begin_read_timeout_s": 5.0},),
        decode=({}, {}),
        routers=({**WATCHED, "direct": False, "by_cost": False, **router},),
    )
    async with Fleet(plan, folder) as running:
        yield running


async def play(fleet: Fleet, conversation: str, turns: int = 3) -> None:
    """Play turns of a conversation that goes on from its own answers."""
    client = Client(fleet.endpoint("router-0"))
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    history = ids(100, seed=len(conversation))
    try:
        for _ in range(turns):
            async for event in client.turn(history, conversation_id=conversation, sampling=sampling):
                history = [*history, *event.token_ids]
            history += ids(50, seed=len(history))
    finally:
        await client.close()
