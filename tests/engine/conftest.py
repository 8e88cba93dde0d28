"""Two engines, P and D, of each kind that implements the port."""

import importlib.util
import sys
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from engine_pair import Pair
from engine_settings import simulated_settings, vllm_settings

from kvloop.engine.factory import create_engine

# Without vLLM (make test-fast) what imports it is not collected.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm_sampling.py", "test_vllm_engine.py"]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["simulated", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])],
)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """P and D, started; stopped at the end."""
    settings = simulated_settings() if request.param == "simulated" else vllm_settings()
    pair = Pair(create_engine(settings, "prefill"), create_engine(settings, "decode"))
    try:
        with warnings.catch_warnings():
            # What vLLM imports warns of its own affairs.
            warnings.simplefilter("ignore")
            await pair.start()
        yield pair
    finally:
        await pair.stop()
