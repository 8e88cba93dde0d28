"""Settings of an engine: what a machine fills in, and what is refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvloop.engine import settings as engine_settings
from kvloop.engine.settings import MIB, EngineSettings, resolve


def test_a_cpu_gets_the_cpu_values() -> None:
    made = resolve(EngineSettings(), has_gpu=False)
    assert made.device == "cpu"
    assert made.dtype == "float32"
    assert made.block_size == 32
    assert made.max_model_len == 8192
    assert made.max_num_batched_tokens == 2048
    assert made.max_num_seqs == 8
    assert made.kv_cache_memory_bytes == 400 * MIB
    assert made.gpu_memory_utilization is None
    assert made.enforce_eager
    assert made.omp_threads == 1


def test_a_gpu_gets_the_cuda_values() -> None:
    made = resolve(EngineSettings(), has_gpu=True)
    assert made.device == "cuda"
    assert made.block_size == 128
    assert made.gpu_memory_utilization == 0.9
    assert made.kv_cache_memory_bytes is None
    assert made.enforce_eager is False


def test_what_is_set_stays() -> None:
    given = EngineSettings(block_size=64, dtype="bfloat16", enforce_eager=False, omp_threads=4)
    made = resolve(given, has_gpu=False)
    assert (made.block_size, made.dtype, made.enforce_eager, made.omp_threads) == (64, "bfloat16", False, 4)


def test_a_cache_in_bytes_needs_no_share_of_the_gpu() -> None:
    made = resolve(EngineSettings(kv_cache_memory_bytes=MIB), has_gpu=True)
    assert made.gpu_memory_utilization is None


def test_a_cpu_has_no_visible_devices() -> None:
    with pytest.raises(ValidationError, match="visible_devices names GPUs"):
        EngineSettings(device="cpu", visible_devices="0")


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(EngineSettings(), has_gpu=False)
    assert resolve(once, has_gpu=False) == once


def test_a_cpu_may_be_chosen_on_a_gpu_machine() -> None:
    assert resolve(EngineSettings(device="cpu"), has_gpu=True).device == "cpu"


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"kv_cache_memory_bytes": MIB, "gpu_memory_utilization": 0.5}, "set only one"),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "set kv_cache_memory_bytes"),
        ({"max_num_seqs": 10, "max_num_batched_tokens": 9}, "raise the first"),
        ({"extra_engine_args": {"block_size": 16}}, "set block_size itself"),
        ({"extra_engine_args": {"kv_transfer_config": {}}}, "remove it"),
        ({"extra_engine_args": {"speculative_config": {}}}, "remove it"),
        ({"extra_engine_args": {"watermark": 0.05}}, "remove it"),
        ({"extra_engine_args": {"max_cpu_loras": 1}}, "remove it"),
        ({"decoder_kv_blocks_ttl": 5}, "greater than 5"),
        ({"prefill_hold_s": 9}, "greater than or equal to 10"),
        ({"hold_share": 1.0}, "less than 1"),
        ({"nixl_side_channel_port": 70_000}, "65535"),
        ({"no_such_setting": 1}, "Extra inputs"),
    ],
)
def test_contradictions_say_what_to_change(values: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        EngineSettings.model_validate(values)


@pytest.mark.parametrize(
    ("values", "has_gpu", "advice"),
    [
        ({"device": "cuda"}, False, "set device to cpu"),
        ({"gpu_memory_utilization": 0.5}, False, "set kv_cache_memory_bytes"),
        ({"block_size": 16}, False, "multiple of 32"),
        ({"block_size": 24}, True, "multiple of 16"),
        ({"max_num_seqs": 4096}, False, "raise the first"),
        (
            {"adapters": {"a": "/a", "b": "/b"}, "extra_engine_args": {"max_loras": 1}},
            False,
            "raise or remove",
        ),
    ],
)
def test_the_machine_may_contradict(values: dict[str, object], has_gpu: bool, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        resolve(EngineSettings.model_validate(values), has_gpu=has_gpu)


def test_no_gpu_is_seen_when_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not engine_settings.gpu_present()


def test_smollm2_lives_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = tmp_path / "kvloop" / "models" / "smollm2-135m-instruct"
    assert EngineSettings().model_path == str(expected)
    assert EngineSettings().model_name == "smollm2"
    assert EngineSettings(model="org/name").model_path == "org/name"
    assert EngineSettings(model="/a/path", served_model_name="short").model_name == "short"
