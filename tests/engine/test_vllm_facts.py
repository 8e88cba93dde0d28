"""What engines must have equal to exchange KV. Reads configurations, starts no engine."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from engine_settings import vllm_settings

from kvloop.engine.settings import MIB, Role, resolve
from kvloop.engine.vllm import facts
from kvloop.engine.vllm.arguments import engine_arguments

pytestmark = pytest.mark.vllm

LIMIT = 512
FACTORS = 32
"""SmolLM2's head has 64 numbers, and a rotation takes two."""


def digest(role: Role = "decode", max_model_len: int = 1024, **changes: Any) -> str:
    settings = resolve(vllm_settings(max_model_len=max_model_len, **changes), has_gpu=False)
    with warnings.catch_warnings():
        # What vLLM imports warns of its own affairs.
        warnings.simplefilter("ignore")
        config = engine_arguments(settings, role, Path("control")).create_engine_config()
    return facts.compatibility(settings, config, "1", {})


def overridden(**values: Any) -> str:
    return digest(extra_engine_args={"hf_overrides": values})


def longrope(max_model_len: int) -> str:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * FACTORS,
        "long_factor": [4.0] * FACTORS,
        "original_max_position_embeddings": LIMIT,
    }
    overrides = {"rope_parameters": rope, "max_position_embeddings": 4 * LIMIT}
    return digest(max_model_len=max_model_len, extra_engine_args={"hf_overrides": overrides})


def test_equal_engines_are_equal_whatever_else_they_are_told() -> None:
    same = digest()
    assert digest("prefill") == same
    assert digest(enable_prefix_caching=False, max_num_seqs=3, max_num_batched_tokens=512) == same
    assert digest(kv_cache_memory_bytes=99 * MIB, seed=5, omp_threads=2, hold_share=0.3) == same
    assert digest(max_model_len=768) == same


def test_equal_engines_are_equal_in_other_processes() -> None:
    here = Path(__file__).parent
    code = "import test_vllm_facts; print(test_vllm_facts.digest('prefill'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert run.stdout.split()[-1] == digest()


def test_models_that_compute_other_kv_are_not_equal() -> None:
    variants = [
        digest(),
        overridden(rope_parameters={"rope_type": "default", "rope_theta": 5_000.0}),
        overridden(rope_theta=5_001.0),
        overridden(rms_norm_eps=0.1),
        digest(extra_engine_args={"load_format": "dummy"}),
        digest(extra_engine_args={"model_loader_extra_config": {"part": "other"}}),
    ]
    assert len(set(variants)) == len(variants)


def test_long_factors_are_told_from_short_ones() -> None:
    short, long = longrope(LIMIT), longrope(LIMIT + 1)
    assert short != long
    assert longrope(LIMIT - 1) == short
    assert longrope(2 * LIMIT) == long
    assert digest(max_model_len=LIMIT) == digest(max_model_len=LIMIT + 1)
