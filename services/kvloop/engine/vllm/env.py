"""The environment of an engine process.

vLLM, UCX and OpenMP read their environment when they are imported or spawned, so it is set before vllm is
imported and the engine core inherits it. That is why the adapter imports vllm late.
"""

import importlib.util
import ipaddress
import os
import shutil
from pathlib import Path

from kvloop.engine.settings import EngineSettings
from kvloop.runtime import ports
from kvloop.runtime.config import ConfigError
from kvloop.runtime.endpoints import Endpoint

PARENT_PID = "KVLOOP_ENGINE_PARENT_PID"
"""Arms the parent-death signal in engine cores whose parent this is."""

_HASH_SEED = "PYTHONHASHSEED"
_LAYOUT = "VLLM_KV_CACHE_LAYOUT"


def environment(settings: EngineSettings, port: int) -> dict[str, str]:
    """Return what must be set for an engine with resolved settings. port: of the NIXL side channel."""
    env = {
        PARENT_PID: str(os.getpid()),
        # A fork would copy the threads' locks of a process that already serves gRPC.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.nixl_side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    if settings.device == "cpu":
        threads = str(settings.omp_threads or 1)
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        if settings.tensor_parallel_size == 1:
            # One rank works within the engine core; otherwise a CPU engine has a process for it.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        if settings.omp_threads is not None:
            env["OMP_NUM_THREADS"] = str(settings.omp_threads)
        if settings.visible_devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = settings.visible_devices
    return env


def defaults(settings: EngineSettings) -> dict[str, str]:
    """Return what is set only where the user has not set it."""
    env = {
        # Block hashes must agree between engines; versions before 0.29 seed them from here.
        _HASH_SEED: "0",
        "VLLM_HOST_IP": settings.nixl_side_channel_host,
        # vLLM warns at length about what is chosen here on purpose.
        "VLLM_LOGGING_LEVEL": "ERROR" if settings.device == "cpu" else "WARNING",
        "NIXL_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(settings.model_path).exists():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if settings.device == "cpu":
        env["UCX_TLS"] = "tcp,self"
        if is_loopback(settings.nixl_side_channel_host):
            env["UCX_NET_DEVICES"] = "lo"
        return env
    # In vLLM 0.26 all layers of a block lie together only with this layout and the V1 model runner. From 0.29
    # on HND, which is what vLLM itself takes for NIXL, means layer by layer; BHLNC is the other.
    env |= {_LAYOUT: "HND", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if not _flashinfer_samples():
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env


def _flashinfer_samples() -> bool:
    """Return whether FlashInfer's sampler is there: compiled beforehand, or with nvcc to compile it."""
    if importlib.util.find_spec("flashinfer") is None:
        return False
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    # As FlashInfer looks for it.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()


def apply(settings: EngineSettings, port: int) -> None:
    """Set the environment of this process, for vLLM here and for the engine core that is spawned next."""
    os.environ.update(environment(settings, port))
    for name, value in defaults(settings).items():
        os.environ.setdefault(name, value)
    # Whole GiB, and above the bytes asked for.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def side_channel() -> str:
    """Return host:port of this process's NIXL side channel, once it is chosen."""
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "")
    port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return str(Endpoint(host, int(port))) if host and port else ""


def hash_seed() -> str:
    """Return what block hashes are seeded with."""
    return os.environ.get(_HASH_SEED, "")


def kv_layout() -> str:
    """Return the layout of the KV cache that is asked for, "" for vLLM's own choice."""
    return os.environ.get(_LAYOUT, "")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def side_channel_port(settings: EngineSettings) -> int:
    """Return the port asked for, or one that is free right now.

    Raises ConfigError when nothing can listen there: vLLM would only find out once the model is loaded.
    """
    host, port = settings.nixl_side_channel_host, settings.nixl_side_channel_port
    if port:
        try:
            ports.try_listening(host, port)
        except OSError as error:
            raise ConfigError(
                f"nixl_side_channel_port: nothing can listen at {host}, port {port} ({error.strerror});"
                " set another port, or an address of this host as nixl_side_channel_host"
            ) from None
        return port
    # The engine binds it much later.
    try:
        return ports.free_port(host)
    except OSError as error:
        raise ConfigError(
            f"nixl_side_channel_port: {error}; set one, or an address of this host as nixl_side_channel_host"
        ) from None
