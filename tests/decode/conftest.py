"""A pair of workers on simulated engines."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_kit import Pair, open_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with open_pair() as workers:
        yield workers
