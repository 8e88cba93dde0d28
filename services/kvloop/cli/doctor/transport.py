"""Which way KV would take between engines, and whether that is the fast one. Pure functions of a Machine."""

from collections.abc import Sequence

from kvloop.cli.doctor.findings import Finding, fail, ok, warn
from kvloop.cli.doctor.machine import Machine
from kvloop.cli.doctor.ucx import check_ucx

UCX, LIBFABRIC = "UCX", "LIBFABRIC"

_MEMLOCK = 1024**3
"""Bytes that may be locked below which registering buffers is taken to fail."""
_SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")


def check_nixl(machine: Machine) -> Finding:
    """Tell whether NIXL can be used here at all."""
    name = "nixl"
    if not machine.nixl_version:
        return fail(
            name, "NIXL is not installed here", "install kvloop[cuda] or kvloop[cpu] where engines run"
        )
    if not machine.nixl_works:
        return fail(
            name,
            f"NIXL {machine.nixl_version} is installed, but no agent can be made",
            'run python -c "import nixl._api" and install what it misses (CUDA\'s runtime, say)',
        )
    return ok(name, f"NIXL {machine.nixl_version}")


def check_backends(machine: Machine, backends: Sequence[str]) -> Finding:
    """Tell whether NIXL has the plugins that the engines name."""
    name = "nixl-backends"
    missing = [backend for backend in backends if backend not in machine.nixl_plugins]
    if missing:
        return fail(
            name,
            f"NIXL has no plugin {', '.join(missing)}; it has {', '.join(machine.nixl_plugins) or 'none'}",
            "install a NIXL with that plugin, or set NIXL_PLUGIN_DIR to where it is",
        )
    return ok(name, f"{', '.join(backends)} available")


def check_transport(machine: Machine, backends: Sequence[str]) -> Finding:
    """Tell what would carry KV, above all whether it would silently be TCP."""
    if LIBFABRIC in backends:
        return _libfabric(machine)
    return check_ucx(machine)


def check_memlock(machine: Machine) -> Finding:
    """Tell whether memory can be registered with RDMA devices."""
    name, limit = "memlock", machine.memlock
    if limit is not None and limit < _MEMLOCK:
        return warn(
            name,
            f"RLIMIT_MEMLOCK is {limit // 1024} KiB: RDMA devices may refuse to register the engines' memory",
            "raise it where the process comes from: ulimit -l, ulimits.memlock (Compose), "
            "LimitMEMLOCK=infinity of the node's container runtime (Kubernetes)",
        )
    return ok(name, "unlimited" if limit is None else f"{limit // 1024**2} MiB")


def _libfabric(machine: Machine) -> Finding:
    name = "transport"
    provider = machine.environment.get("FI_PROVIDER", "efa")
    if provider.startswith(_SLOW_PROVIDERS):
        return fail(
            name,
            f"FI_PROVIDER={provider}: libfabric would use sockets, and KV would silently take the slow way",
            "set FI_PROVIDER=efa",
        )
    if machine.efa_domains is None:
        return fail(
            name,
            "the engines use LIBFABRIC, but fi_info is not installed",
            "install aws-efa-installer and put /opt/amazon/efa/bin on the PATH",
        )
    if not machine.efa_domains:
        return fail(
            name,
            "fi_info -p efa lists nothing: NIXL would fail to start, or silently use TCP",
            "reinstall aws-efa-installer, and check that the instance was launched with EFA interfaces",
        )
    rails = len(machine.efa_domains)
    if machine.gpus and rails % machine.gpus:
        return warn(
            name,
            f"{rails} EFA rails for {machine.gpus} GPUs: some GPUs have fewer than others",
            "check with fi_info -p efa and nvidia-smi topo -m that every rail is up",
        )
    per_gpu = f", {rails // machine.gpus} per GPU" if machine.gpus else ""
    return ok(name, f"LIBFABRIC over {rails} EFA rails{per_gpu}")
