"""A rig per test."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from sim_rig import Rig, audit


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """Engines that are audited and stopped at the end."""
    rig = Rig()
    yield rig
    for engine in rig.engines:
        if engine.alive:
            audit(engine)
    await rig.close()
