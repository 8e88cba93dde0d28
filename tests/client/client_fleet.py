"""A fleet of processes with simulated engines and two routers, shared by the tests that leave it whole."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

WORKERS = {"engine": "simulated", "block_size": 16, "kv_recompute_threshold": 32}
ROUTER = {"directory_timeout_ms": 2000.0, "session_alive_s": 3.0}
PLAN = FleetPlan(
    prefill=({"enable_prefix_caching": False},), workers=WORKERS, routers=(dict(ROUTER), dict(ROUTER))
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(PLAN, tmp_path_factory.mktemp("fleet")) as running:
        yield running
