"""From resolved settings to vLLM's engine arguments."""

import secrets
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from kvloop.engine.settings import EngineSettings, Role

_SEED_BITS = 31
HASH_ALGORITHM = "sha256"
"""Of pickled tokens: 2 ms less per 24k tokens and leg than sha256_cbor, and equal between engines that agree
in what `facts.compatibility` compares, Python's version among it."""
GRAMMAR_BACKEND = "xgrammar"


def engine_arguments(settings: EngineSettings, role: Role, control_path: Path) -> AsyncEngineArgs:
    """Return the arguments of one engine, connector included."""
    values: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.model_name,
        "revision": None if Path(settings.model_path).exists() else settings.revision,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "prefix_caching_hash_algo": HASH_ALGORITHM,
        "seed": secrets.randbits(_SEED_BITS) if settings.seed is None else settings.seed,
        # One backend for an engine's life: with "auto" the first request would choose it for all.
        "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
        # Equal to first come, first served while no request asks for another priority.
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "kv_transfer_config": transfer_config(settings, role, control_path),
    }
    for name in (
        "dtype",
        "max_model_len",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "enforce_eager",
    ):
        value = getattr(settings, name)
        if value is not None:
            values[name] = value
    if settings.adapters:
        # All stay in memory: none is read again from files that may be others by then.
        served = len(settings.adapters)
        kept = max(served, settings.extra_engine_args.get("max_loras", served))
        values |= {"enable_lora": True, "max_loras": served, "max_cpu_loras": kept}
    return AsyncEngineArgs(**{**values, **settings.extra_engine_args})


def transfer_config(settings: EngineSettings, role: Role, control_path: Path) -> KVTransferConfig:
    """Return the connector's configuration.

    No engine_id: with a fixed one, peers could not read from an engine that has restarted.
    """
    extra: dict[str, Any] = {
        # The plugin is built on it; whether reads are served or issued is the services' affair.
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": settings.kv_recompute_threshold,
        "decoder_kv_blocks_ttl": settings.decoder_kv_blocks_ttl,
        "kv_lease_duration": round(settings.prefill_hold_s),
        "backends": settings.backends,
        "kvloop_control_path": str(control_path),
        "kvloop_hold_share": settings.hold_share,
        "kvloop_allow_untested": settings.allow_untested,
        "kvloop_weights_version": settings.weights_version,
        "kvloop_test_hooks": settings.test_hooks,
    }
    if settings.device == "cpu":
        extra["num_threads"] = 1
    else:
        extra["enable_cross_layers_blocks"] = True
    return KVTransferConfig(
        kv_connector="KvloopConnector",
        kv_connector_module_path="kvloop.connector.connector",
        # P reads, too, and only for engines that may read does vLLM keep a request's blocks until the step
        # that still writes them is over.
        kv_role="kv_both" if role == "prefill" else "kv_consumer",
        kv_buffer_device="cpu" if settings.device == "cpu" else "cuda",
        kv_load_failure_policy="fail",
        kv_connector_extra_config=extra,
    )
