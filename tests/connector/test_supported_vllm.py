"""What the plugin refuses to run on, and how it is told to try."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def compat() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of itself
        from kvloop.connector import compat
    return compat


def config(parallel: dict[str, int], speculative: object = None, **extra: object) -> Any:
    given = {"bidirectional_kv_xfer": True} | extra
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=given.get,
            kv_load_failure_policy="fail",
            is_kv_consumer=True,
        ),
        max_concurrent_batches=1,
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        speculative_config=speculative,
    )


def caches(compat: Any, full: int, other: int = 0) -> Any:
    specs: list[Any] = [compat.FullAttentionSpec.__new__(compat.FullAttentionSpec) for _ in range(full)]
    specs += [object()] * other
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("release", "full", "other", "parallel", "speculative", "named"),
    [
        ("0.30.1", 1, 0, {}, None, "vLLM 0.30.1"),
        ("0.29.0", 1, 1, {}, None, "full attention"),
        ("0.29.0", 0, 1, {}, None, "full attention"),
        ("0.29.0", 2, 0, {}, None, "full attention"),
        ("0.29.0", 1, 0, {"pipeline_parallel_size": 2}, None, "pipeline"),
        ("0.29.0", 1, 0, {"decode_context_parallel_size": 2}, None, "context"),
        ("0.29.0", 1, 0, {}, object(), "speculative"),
    ],
)
def test_what_was_not_tested_is_refused_unless_asked_for(
    compat: Any,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    full: int,
    other: int,
    parallel: dict[str, int],
    speculative: object,
    named: str,
) -> None:
    monkeypatch.setattr(compat, "vllm_release", lambda: release)
    cache = caches(compat, full, other)
    with pytest.raises(ValueError, match=f"{named}.*kvloop_allow_untested"):
        compat.check_supported(config(parallel, speculative), cache)
    compat.check_supported(config(parallel, speculative, kvloop_allow_untested=True), cache)


@pytest.mark.parametrize("release", ["0.26.0", "0.29.0", "0.32.0"])
def test_what_was_tested_runs(compat: Any, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(compat, "vllm_release", lambda: release)
    compat.check_supported(config({}), caches(compat, 1))


def test_without_reads_back_there_is_no_flag_to_try(compat: Any) -> None:
    settings = config({}, bidirectional_kv_xfer=False, kvloop_allow_untested=True)
    with pytest.raises(ValueError, match="bidirectional_kv_xfer"):
        compat.check_supported(settings, caches(compat, 1))
