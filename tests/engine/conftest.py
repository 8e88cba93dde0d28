"""Two engines, P and D, of each kind that implements the port."""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from engine_pair import Pair

from kvloop.engine.factory import create_engine
from kvloop.engine.settings import MIB, EngineSettings

# Without vLLM (make test-fast) what imports it is not collected.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm_sampling.py", "test_vllm_engine.py"]


def vllm_settings(**changes: object) -> EngineSettings:
    """Return settings of a real engine on SmolLM2, with a small pool."""
    from kvloop.cli import checkpoint

    model = os.environ.get("KVLOOP_TEST_MODEL") or str(checkpoint.fetch("smollm2"))
    given = {
        "model": model,
        "served_model_name": "smollm2",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 150 * MIB,
        "test_hooks": True,
    }
    return EngineSettings.model_validate({**given, **changes})


def simulated_settings() -> EngineSettings:
    """Return settings of a simulated engine of about the same size."""
    extra = {"num_blocks": 106, "vocab_size": 49_152, "eos_every": 10_000}
    return EngineSettings(
        engine="simulated", max_model_len=1024, block_size=32, max_num_seqs=8, extra_engine_args=extra
    )


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
        await pair.start()
        yield pair
    finally:
        await pair.stop()
