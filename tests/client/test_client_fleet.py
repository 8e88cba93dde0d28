"""The Python client on a fleet of processes: a router is killed under an agent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan
from kvloop.client import Client, Retention, SamplingParams

SAMPLING = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    workers = {"engine": "simulated", "block_size": 16, "kv_recompute_threshold": 32}
    router = {"directory_timeout_ms": 2000.0, "session_alive_s": 5.0}
    async with Fleet(FleetPlan(workers=workers, routers=(router, router)), tmp_path / "fleet") as running:
        yield running


async def test_a_killed_router_costs_neither_the_turn_nor_what_is_held(fleet: Fleet) -> None:
    async with Client(fleet.endpoints("router")) as client:
        history = list(range(100, 300))
        async with client.session("agent") as session:
            for turn in range(4):
                if turn == 2:
                    await fleet.kill("router-0")
                async for event in session.turn(
                    list(history), sampling=SAMPLING, retention=Retention(hold=True)
                ):
                    history += event.token_ids
                    if event.summary is not None:
                        assert event.summary.output_tokens == 32
                        read = event.summary.reuse.tokens
                        assert (read.readback + read.p_local + read.d_local > 0) == (turn > 0)
                history += range(1000, 1020)
            assert await client.get("agent") is not None
        assert await client.get("agent") is None
