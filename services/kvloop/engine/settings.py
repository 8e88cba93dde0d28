"""Settings of one engine, and the values that a machine chooses for what is left open.

An open value (None) is filled by `resolve`, a pure function of the settings and of whether the machine
has a GPU, so that what runs can be shown and tested without an engine.
"""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SMOLLM2 = "smollm2"
MANIFEST = "kvloop-manifest.json"
"""In a fetched checkpoint: hashes of its files."""
MIB = 1024 * 1024
READ_MARGIN_S = 5.0
"""A reader declines what expires within this time (vLLM's own margin)."""

Role = Literal["prefill", "decode"]

_OWN_ARGS = frozenset(
    {
        "kv_transfer_config",
        "disable_log_stats",
        "enable_log_requests",
        "served_model_name",
        "scheduling_policy",
        "structured_outputs_config",
        "enable_lora",
        "max_cpu_loras",
        "skip_tokenizer_init",
    }
)
_UNPROVEN_ARGS = frozenset(
    {"speculative_config", "data_parallel_size", "pipeline_parallel_size", "watermark"}
)


def cache_home() -> Path:
    """Return kvloop's folder in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvloop"


def smollm2_dir() -> Path:
    """Return where `kvloop model fetch smollm2` puts the checkpoint."""
    return cache_home() / "models" / "smollm2-135m-instruct"


def gpu_present() -> bool:
    """Return whether an NVIDIA GPU is there for this process, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    gpus = Path("/proc/driver/nvidia/gpus")
    return Path("/dev/nvidiactl").exists() and gpus.is_dir() and any(gpus.iterdir())


class EngineSettings(BaseModel):
    """What a prefill or decode worker says about its engine. None leaves the choice to the machine."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    engine: Literal["vllm", "simulated"] = "vllm"
    model: str = Field(SMOLLM2, min_length=1)
    """Hugging Face name, path, or "smollm2" for the fetched checkpoint."""
    served_model_name: str | None = None
    """Name in requests; the model's own by default."""
    revision: str | None = None
    """Revision on the hub, or the name of these weights; part of every lease's scope."""
    weights_version: str = Field("", max_length=64)
    """Name of the weights that lie under the model's name, if they change there (kvloop reload): workers of
    different ones are not paired."""
    adapters: dict[str, str] = {}
    """LoRA adapters: name -> path. Workers whose names, paths or files differ are not paired."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str | None = None
    max_model_len: int | None = Field(None, ge=2)
    block_size: int | None = Field(None, ge=1)
    """Tokens per KV block."""
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    kv_cache_memory_bytes: int | None = Field(None, ge=MIB)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1)
    visible_devices: str | None = Field(None, min_length=1)
    """GPUs for this engine, as in CUDA_VISIBLE_DEVICES. Workers that share a host need their own."""
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    seed: int | None = None
    """Of what is sampled without a seed of the request's own. None: another one in each process, as it should
    be where one answer comes from several engines. For the simulated engine it names the weights."""
    decoder_kv_blocks_ttl: float = Field(480.0, gt=READ_MARGIN_S)
    """Seconds for which a decode engine holds a turn's blocks."""
    kv_recompute_threshold: int = Field(64, ge=0)
    """Below this many readable tokens a prompt is recomputed."""
    bidirectional_kv_xfer: bool = True
    """Whether decode engines' blocks are read back."""
    prefill_hold_s: float = Field(30.0, ge=10)
    """Seconds for which a prefill engine holds a prompt's blocks for the decode engine."""
    hold_share: float = Field(0.5, gt=0, lt=1)
    """Share of the block pool that holds may keep."""
    nixl_backends: str = Field("UCX", pattern=r"^[A-Z0-9_]+(,[A-Z0-9_]+)*$")
    """What moves KV, best first, separated by commas: UCX, or LIBFABRIC on EFA."""
    nixl_side_channel_host: str = "127.0.0.1"
    nixl_side_channel_port: int = Field(0, ge=0, le=65535)
    """0 takes a free port."""
    omp_threads: int | None = Field(None, ge=1)
    extra_engine_args: dict[str, Any] = {}
    """Further vLLM engine arguments, by their Python names."""
    allow_untested: bool = False
    """Run the connector plugin on vLLM versions and models that it was not tested with."""
    control_path: Path | None = None
    """Unix socket of the engine core's table of holds, at most 100 characters; absent: one in a private
    temporary folder."""
    test_hooks: bool = False
    """Lets tests stop and break things inside the engine. Never in production."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.kv_cache_memory_bytes is not None and self.gpu_memory_utilization is not None:
            raise ValueError(
                "kv_cache_memory_bytes and gpu_memory_utilization both size the KV cache; set only one"
            )
        if self.device == "cpu" and self.gpu_memory_utilization is not None:
            raise ValueError(
                "gpu_memory_utilization means nothing on a CPU; set kv_cache_memory_bytes instead"
            )
        if self.device == "cpu" and self.visible_devices is not None:
            raise ValueError("visible_devices names GPUs, but device is cpu; remove one of them")
        _refuse_extra_args(self.extra_engine_args)
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({seqs}); "
                "raise the first or lower the second"
            )
        return self

    @property
    def backends(self) -> list[str]:
        """Return NIXL's backends, best first."""
        return self.nixl_backends.split(",")

    @property
    def model_path(self) -> str:
        """Return what vLLM loads: a path or a hub name."""
        return str(smollm2_dir()) if self.model == SMOLLM2 else self.model

    @property
    def model_name(self) -> str:
        """Return the name under which the model is served."""
        return self.served_model_name or self.model


def _refuse_extra_args(extra: dict[str, Any]) -> None:
    for name in extra:
        if name in EngineSettings.model_fields and name != "model":
            raise ValueError(f"extra_engine_args.{name} is a setting of its own; set {name} itself")
        if name in _OWN_ARGS or name == "model":
            raise ValueError(f"extra_engine_args.{name} is set by kvloop; remove it")
        if name in _UNPROVEN_ARGS:
            raise ValueError(
                f"extra_engine_args.{name} is not proven to be safe with KV that travels; remove it"
            )


def resolve(settings: EngineSettings, *, has_gpu: bool | None = None) -> EngineSettings:
    """Return the settings with every open value filled for this machine.

    has_gpu: None looks. Raises ValueError with what to change when the machine contradicts the settings.
    """
    found = gpu_present() if has_gpu is None else has_gpu
    if settings.device == "cuda" and not found:
        raise ValueError("device is cuda, but no NVIDIA GPU is visible here; set device to cpu or auto")
    if settings.device == "auto" and not found and settings.gpu_memory_utilization is not None:
        raise ValueError(
            "gpu_memory_utilization is set, but no GPU is visible here; set kv_cache_memory_bytes instead"
        )
    cuda = settings.device == "cuda" or (settings.device == "auto" and found)
    resolved = _fill(settings, _cuda_values(settings) if cuda else _cpu_values())
    granule = 16 if cuda else 32
    if resolved.block_size is not None and resolved.block_size % granule:
        raise ValueError(
            f"block_size {resolved.block_size} does not work on {resolved.device}; "
            f"set a multiple of {granule}"
        )
    seqs, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ValueError(
            f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({seqs}); "
            "raise the first or lower the second"
        )
    served = len(resolved.adapters)
    # Without pinned memory what waits for a place there is a view of the adapter's file.
    if not cuda and resolved.extra_engine_args.get("max_loras", served) < served:
        raise ValueError(
            f"extra_engine_args.max_loras is less than the number of adapters ({served}), which on a CPU are "
            "read from their files again; raise or remove it"
        )
    return resolved


def _cpu_values() -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 8192,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 400 * MIB,
        "enforce_eager": True,
        "omp_threads": 1,
    }


def _cuda_values(settings: EngineSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "auto",
        "block_size": 128,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enforce_eager": False,
    }
    if settings.kv_cache_memory_bytes is None:
        values["gpu_memory_utilization"] = 0.9
    return values


def _fill(settings: EngineSettings, values: dict[str, Any]) -> EngineSettings:
    opened = {
        name: value for name, value in values.items() if name == "device" or getattr(settings, name) is None
    }
    # A worker's settings have more fields; the engine's own are all that is kept.
    return EngineSettings.model_validate(
        {**settings.model_dump(include=set(EngineSettings.model_fields)), **opened}
    )
