"""What does not change in the life of one engine."""

import dataclasses
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

_ORIGIN = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""What a model's configuration says of where it comes from."""
_LONGROPES = frozenset({"longrope", "su"})
_LLAMA4_LONG = 32_768


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
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
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
    depend on, the adapters, of which those know the names alone, and what makes other KV of the same tokens.
    Everything is known before the first handshake, so unequal engines are never paired.
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
        "computed": computed(vllm_config),
        "adapters": [(name, path, adapters[name]) for name, path in sorted(settings.adapters.items())],
    }
    text = json.dumps(factors, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def computed(vllm_config: Any) -> dict[str, Any]:
    """Return what the KV of given tokens depends on beside the weights: how the model is set up."""
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    lora, parallel = vllm_config.lora_config, vllm_config.parallel_config
    config = _stable(model.hf_config.to_dict())
    return {
        "config": {name: value for name, value in config.items() if name not in _ORIGIN},
        "long": _long(config, model.max_model_len),
        "quantization": [str(model.quantization), _stable(getattr(model, "quantization_config", None))],
        "load": [str(load.load_format), _stable(load.model_loader_extra_config)],
        "model_impl": str(model.model_impl),
        "skipped_layers": _stable(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "context_parallel": getattr(parallel, "decode_context_parallel_size", 1),
        "lora": None
        if lora is None
        else [str(lora.lora_dtype), _stable(getattr(lora, "target_modules", None))],
    }


def _long(config: Any, max_model_len: int) -> list[bool]:
    """Return how the model's own choices fall that it makes by max_model_len.

    Longrope takes the long factors for all tokens as soon as prompts may be long, and Llama 4 tunes its
    attention then.
    """
    limits: list[int] = [_LLAMA4_LONG] if "llama4" in str(config.get("model_type")) else []

    def look(part: Any, default: Any) -> None:
        if not isinstance(part, dict):
            return
        limit = part.get("original_max_position_embeddings", default)
        kinds = {str(part.get("rope_type")), str(part.get("type"))}
        if isinstance(limit, int) and kinds & _LONGROPES:
            limits.append(limit)
        for inner in part.values():
            look(inner, limit)

    look(config, None)
    return [max_model_len > limit for limit in limits]


def _stable(value: Any) -> Any:
    """Return a value as JSON that is equal in every process."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _stable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_stable(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(str(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _stable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    text = str(value)
    # An object that tells no more than its address.
    return type(value).__qualname__ if " at 0x" in text else text


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
