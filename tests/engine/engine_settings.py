"""Settings of the engines under test."""

import os

from kvloop.engine.settings import MIB, EngineSettings


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
