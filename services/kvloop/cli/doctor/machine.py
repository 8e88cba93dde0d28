"""What this host has for moving KV. Looking is apart from judging, so that judging can be tested."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

_LOOK_S = 60.0
# In a process of its own: NIXL loads UCX, which reads the environment and starts threads.
_NIXL = """
import json
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("kvloop-doctor", nixl_agent_config(backends=[]))
print(json.dumps(list(agent.get_plugin_list())))
"""


_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class Rdma:
    """One RDMA device, EFA's among them."""

    name: str
    active: tuple[int, ...] = ()
    """Ports whose state is ACTIVE."""
    accessible: bool = False
    """Whether this process may open it; /sys lists devices that a container was not given, too."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of one host."""

    nixl_version: str = ""
    """"" when it is not installed."""
    nixl_works: bool = False
    """Whether an agent could be made."""
    nixl_plugins: tuple[str, ...] = ()
    gpus: int = 0
    infiniband: tuple[Rdma, ...] = ()
    memlock: int | None = None
    """Bytes of memory that this process may lock; None: any number."""
    efa_domains: tuple[str, ...] | None = None
    """What `fi_info -p efa` lists; None without the program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """UCX_*, FI_* and NIXL_* alone."""


def look() -> Machine:
    """Return the facts of this host; starts two short programs."""
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("nixl")
    works, plugins = _nixl() if version else (False, ())
    return Machine(
        nixl_version=version,
        nixl_works=works,
        nixl_plugins=plugins,
        gpus=_entries(Path("/proc/driver/nvidia/gpus")),
        infiniband=rdma_devices(Path("/sys/class"), Path("/dev/infiniband")),
        memlock=_memlock(),
        efa_domains=_efa(),
        environment={k: v for k, v in os.environ.items() if k.startswith(("UCX_", "FI_", "NIXL_"))},
    )


def rdma_devices(classes: Path, nodes: Path) -> tuple[Rdma, ...]:
    """Return the RDMA devices of /sys/class, and whether their nodes in /dev/infiniband can be opened."""
    openable = set()
    for name in _names(classes / "infiniband_verbs"):
        with contextlib.suppress(OSError):
            device = (classes / "infiniband_verbs" / name / "ibdev").read_text(encoding="ascii").strip()
            if os.access(nodes / name, os.R_OK | os.W_OK):
                openable.add(device)
    found = []
    for name in _names(classes / "infiniband"):
        ports = classes / "infiniband" / name / "ports"
        active = tuple(int(port) for port in _names(ports) if _is_active(ports / port / "state"))
        found.append(Rdma(name, active, name in openable))
    return tuple(found)


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text(encoding="ascii").split()
    except OSError:
        return False


def _memlock() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with contextlib.suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
        if int(effective, 16) >> _CAP_IPC_LOCK & 1:
            return None
    return None if limit == resource.RLIM_INFINITY else limit


def _nixl() -> tuple[bool, tuple[str, ...]]:
    done = _run([sys.executable, "-c", _NIXL])
    if done is None or done.returncode != 0:
        return False, ()
    try:
        return True, tuple(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return False, ()


def _efa() -> tuple[str, ...] | None:
    program = shutil.which("fi_info")
    if program is None:
        return None
    done = _run([program, "-p", "efa", "-t", "FI_EP_RDM"])
    return () if done is None else efa_domains(done.stdout)


def efa_domains(text: str) -> tuple[str, ...]:
    """Return the domains that fi_info's output names, each once."""
    lines = (line.strip() for line in text.splitlines())
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("domain:")]
    return tuple(dict.fromkeys(found))


def _run(command: list[str]) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _entries(folder: Path) -> int:
    return len(_names(folder))
