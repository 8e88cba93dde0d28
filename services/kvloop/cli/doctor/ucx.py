"""What UCX would move KV by, from its environment and the host's devices. Pure functions of a Machine."""

from dataclasses import dataclass

from kvloop.cli.doctor.findings import Finding, fail, ok, warn
from kvloop.cli.doctor.machine import Machine, Rdma

_NAME = "transport"
# By what UCX calls them, with the aliases under which UCX_TLS may name them ("all" is each of them).
_RDMA = {"rc": ("rc", "ib"), "dc": ("dc", "ib"), "ud": ("ud", "ib"), "srd": ("srd", "ib")}
_NVLINK = ("cuda_ipc", "cuda")


@dataclass(frozen=True, slots=True)
class Names:
    """A list of UCX's: what it allows, or with ^ in front what it does not."""

    listed: tuple[str, ...]
    excluded: bool

    @classmethod
    def parse(cls, text: str) -> "Names":
        """Return the list that a variable holds."""
        # \\name stands for that transport without its helpers.
        parts = (part.strip().lstrip("\\") for part in text.strip().removeprefix("^").split(","))
        return cls(tuple(part for part in parts if part), text.strip().startswith("^"))

    def allow(self, *aliases: str) -> bool:
        """Tell whether something is allowed that any of these names stand for; "all" does for everything."""
        named = not {"all", *aliases}.isdisjoint(self.listed)
        return named != self.excluded


def check_ucx(machine: Machine) -> Finding:
    """Tell which way UCX would take, above all whether it would silently be TCP."""
    if machine.gpus == 0:
        return ok(_NAME, "UCX over TCP, which is all that a host without GPUs needs")
    asked = machine.environment.get("UCX_TLS", "all")
    names = Names.parse(asked)
    nvlink = names.allow(*_NVLINK)
    if not _rdma_allowed(names):
        if not nvlink:
            return fail(
                _NAME,
                f"UCX_TLS={asked} leaves nothing but TCP: KV would silently take the slow way",
                "unset UCX_TLS, or add rc and cuda_ipc to it",
            )
        return warn(
            _NAME,
            f"UCX_TLS={asked} has no RDMA: between hosts UCX silently falls back to TCP",
            "unset UCX_TLS, or add rc to it, unless all workers share this host",
        )
    devices = [device for device in machine.infiniband if not device.name.startswith("efa")]
    if not devices:
        return warn(
            _NAME,
            f"UCX_TLS={asked}, but there is no InfiniBand or RoCE device: between hosts UCX silently "
            "falls back to TCP",
            "on EFA use the LIBFABRIC backend; elsewhere check the RDMA driver (ibv_devices)",
        )
    return _devices(devices, asked, machine.environment.get("UCX_NET_DEVICES", "all"))


def _devices(devices: list[Rdma], asked: str, nets: str) -> Finding:
    chosen = [device for device in devices if _chosen(device, Names.parse(nets))]
    if not chosen:
        return fail(
            _NAME,
            f"UCX_NET_DEVICES={nets} names none of {_told(devices)}: KV would silently go over TCP",
            "unset UCX_NET_DEVICES, or name RDMA devices and their ports (mlx5_0:1)",
        )
    usable = [device for device in chosen if device.accessible]
    if not usable:
        return fail(
            _NAME,
            f"{_told(chosen)} can't be opened (/dev/infiniband/uverbs*): KV would silently go over TCP",
            "give the container the devices (rdma/hca, or /dev/infiniband), open to its user",
        )
    up = [device for device in usable if device.active]
    if not up:
        return fail(
            _NAME,
            f"no port of {_told(usable)} is ACTIVE: KV would silently go over TCP",
            "check cable, switch and subnet manager (ibstat)",
        )
    return ok(_NAME, f"UCX ({asked}) over {_told(up)}")


def _rdma_allowed(names: Names) -> bool:
    # UCX_TLS may also name variants: rc_verbs, rc_mlx5, dc_x. To exclude one leaves the others.
    if not names.excluded:
        names = Names(
            tuple(part.partition("_")[0] if part[:2] in _RDMA else part for part in names.listed), False
        )
    return any(names.allow(*aliases) for aliases in _RDMA.values())


def _chosen(device: Rdma, nets: Names) -> bool:
    ports = {f"{device.name}:{port}" for port in device.active or (1,)}
    return any(nets.allow(device.name, port) for port in ports)


def _told(devices: list[Rdma]) -> str:
    return ", ".join(device.name for device in devices)
