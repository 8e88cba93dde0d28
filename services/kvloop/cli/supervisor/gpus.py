"""Which GPUs of the host each worker of a fleet takes.

An engine takes most of a GPU's memory, so that two don't start on the same one: each worker gets its own, as
many as its tensor parallelism needs, in the order of starting. A worker whose own settings name devices keeps
those; devices named for all workers are what is dealt out. Workers whose memory is named may share.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kvloop.cli.supervisor.plan import FleetPlan, Values, role_of
from kvloop.engine.settings import gpu_present
from kvloop.runtime.config import ConfigError

_CHOICE = "CUDA_VISIBLE_DEVICES"
_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_DEVICES = "visible_devices"
_ROLES = ("prefill", "decode")


def here(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not gpu_present():
        return []
    chosen = os.environ.get(_CHOICE)
    if chosen is not None:
        return _names(chosen)
    return [str(number) for number, _ in enumerate(folder.iterdir())]


def deal(plan: FleetPlan, gpus: Sequence[str]) -> dict[str, str]:
    """Return visible_devices by worker, for those that need to be told.

    Raises ConfigError when there are too few.
    """
    named = plan.workers.get(_DEVICES)
    left = _names(str(named)) if named else list(gpus)
    if not left:
        return {}
    own = {
        f"{role}-{number}": entry
        for role, entries in zip(_ROLES, (plan.prefill, plan.decode), strict=True)
        for number, entry in enumerate(entries)
    }
    settings = {name: values for name, values in plan.settings().items() if role_of(name) in _ROLES}
    waiting = {
        name: int(values.get("tensor_parallel_size") or 1)
        for name, values in settings.items()
        if _takes_gpus(values) and not own[name].get(_DEVICES)
    }
    needed = sum(waiting.values())
    if needed > len(left):
        if all(any(settings[name].get(size) for size in _SIZES) for name in waiting):
            return {}
        raise ConfigError(
            f"{', '.join(waiting)} need {needed} GPUs, {len(left)} are there; start fewer workers, or let"
            f" them share: {' or '.join(_SIZES)} says how much memory each takes"
        )
    dealt = {}
    for name, count in waiting.items():
        dealt[name], left = ",".join(left[:count]), left[count:]
    return dealt


def _takes_gpus(values: Values) -> bool:
    return bool(values.get("engine", "vllm") == "vllm" and values.get("device", "auto") != "cpu")


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
