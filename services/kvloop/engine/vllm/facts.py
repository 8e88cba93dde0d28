"""What does not change in the life of one engine."""

import hashlib
import json
import platform
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvloop.engine.port import EngineFacts
from kvloop.engine.settings import MANIFEST, EngineSettings
from kvloop.engine.vllm import env
from kvloop.engine.vllm.arguments import HASH_ALGORITHM


def engine_facts(
    settings: EngineSettings, vllm_config: Any, version: str, adapters: Mapping[str, str]
) -> EngineFacts:
    """Return the facts of an engine that has just started; the epoch is new each time.

    adapters: name -> digest of the files that it has loaded.
    """
    model = vllm_config.model_config
    return EngineFacts(
        engine="vllm",
        version=version,
        epoch=secrets.token_hex(8),
        model_name=settings.model_name,
        model_revision=revision(settings, model),
        adapters=tuple(settings.adapters),
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        block_size=vllm_config.cache_config.block_size,
        compatibility=compatibility(settings, vllm_config, version, adapters),
        bidirectional_kv_xfer=settings.bidirectional_kv_xfer,
        kv_recompute_threshold=settings.kv_recompute_threshold,
        hold_s=settings.decoder_kv_blocks_ttl,
        side_channel=env.side_channel(),
        transfer_backends=transfer_backends(vllm_config),
        prefix_caching=settings.enable_prefix_caching,
        default_max_tokens=model.get_diff_sampling_param().get("max_tokens") or 0,
    )


def transfer_backends(vllm_config: Any) -> tuple[str, ...]:
    """Return NIXL's backends as the connector's configuration names them; UCX when it names none."""
    extra = getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None) or {}
    return tuple(str(name) for name in extra.get("backends") or ("UCX",))


def revision(settings: EngineSettings, model_config: Any) -> str:
    """Return the name of these weights: as set, else the hub's commit, else the checkpoint's manifest."""
    if settings.revision:
        return settings.revision
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit:
        return str(commit)
    manifest = Path(settings.model_path) / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
    return "local"


def compatibility(
    settings: EngineSettings, vllm_config: Any, version: str, adapters: Mapping[str, str]
) -> str:
    """Return the digest of what two engines must have equal to exchange KV.

    What vLLM's own handshake compares, what it checks later (block size, ranks, layout), what block hashes
    depend on, and the adapters, of which those know the names alone. Everything is known before the first
    handshake, so unequal engines are never paired.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    factors = {
        "vllm": version,
        "nixl": _version("nixl"),
        "kvloop": _version("kvloop"),
        "model": model.model,
        "revision": revision(settings, model),
        "dtype": str(model.dtype),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "attention_backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "device": settings.device,
        "cross_layer_blocks": settings.device == "cuda",
        "kv_layout": env.kv_layout(),
        "speculative": None,
        "backends": settings.backends,
        "transfer_mode": "pull",
        "hash_algorithm": HASH_ALGORITHM,
        "python": platform.python_version_tuple()[:2],
        "hash_seed": env.hash_seed(),
        "weights_version": settings.weights_version,
        "adapters": [(name, path, adapters[name]) for name, path in sorted(settings.adapters.items())],
    }
    text = json.dumps(factors, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
