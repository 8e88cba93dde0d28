"""Deployments with one thing wrong: the doctor names it, and what to do.

The table is the specification. Where fleets are needed, they run on simulated engines and a real store;
hosts with GPUs and fabrics are described rather than had.
"""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import redis
from router_sim import SimFleet, sim_fleet

from kvloop.cli.doctor.examination import Deployment, check_machine, examine
from kvloop.cli.doctor.findings import Finding, Status
from kvloop.cli.doctor.live import judge_layout
from kvloop.cli.doctor.machine import Machine, efa_domains
from kvloop.cli.doctor.network import check_side_channels
from kvloop.cli.doctor.workers import Seen
from kvloop.metastore.factory import open_store
from kvloop.router.app import RouterApp
from kvloop.v1alpha1 import turn_pb2, worker_pb2

THRESHOLD = 32


@dataclass
class Site:
    """What a case may spoil."""

    fleet: SimFleet
    folder: Path
    url: str
    router: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """To what the doctor is told."""

    async def workers(self, prefill: dict[str, object], decode: dict[str, object]) -> None:
        """Start one P and one D with engines of their own settings."""
        common = dict(self.fleet.engine)
        self.fleet.engine = common | prefill
        await self.fleet.add_prefill()
        self.fleet.engine = common | decode
        await self.fleet.add_decode()
        self.fleet.engine = common

    async def examined(self) -> list[Finding]:
        app: RouterApp = await self.fleet.router(**self.router)
        deployment = Deployment(
            router=app.endpoint,
            prefill=[node.endpoint for node in self.fleet.prefills],
            decode=[node.endpoint for node in self.fleet.decodes],
            store=self.url,
        )
        return await examine(replace(deployment, **self.changes), None)


async def engines_differ(site: Site, **decode: object) -> None:
    await site.workers({}, decode)


async def reads_off_on_decode(site: Site) -> None:
    await engines_differ(site, bidirectional_kv_xfer=False)


async def another_hash_seed(site: Site) -> None:
    await engines_differ(site, hash_seed="1")


async def another_block_size(site: Site) -> None:
    await engines_differ(site, block_size=32)


async def another_revision(site: Site) -> None:
    await engines_differ(site, revision="v2")


async def short_holds(site: Site) -> None:
    await engines_differ(site, decoder_kv_blocks_ttl=20.0)


async def threshold_beyond_all_prompts(site: Site) -> None:
    await site.workers({"kv_recompute_threshold": 10_000}, {"kv_recompute_threshold": 10_000})


async def decode_worker_gone(site: Site) -> None:
    await site.workers({}, {})
    await site.fleet.decodes[0].app.stop()


async def store_gone(site: Site) -> None:
    await site.workers({}, {})
    site.changes["store"] = f"redis://127.0.0.1:{free_port()}"


async def store_evicts_leases(site: Site) -> None:
    await site.workers({}, {})
    with redis.Redis.from_url(site.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")


async def decode_worker_in_another_store(site: Site) -> None:
    ours = site.fleet.store
    await site.fleet.add_prefill()
    site.fleet.store = open_store("memory://")
    await site.fleet.add_decode()
    site.fleet.store = ours


async def reuse_off_in_the_router(site: Site) -> None:
    await site.workers({}, {})
    site.router["reuse"] = False


async def wrong_token(site: Site) -> None:
    await site.workers({}, {})
    tokens = site.folder / "tokens"
    tokens.write_text(f"{hashlib.sha256(b'right').hexdigest()} tenant\n", encoding="utf-8")
    site.router["tokens_file"] = tokens
    site.changes["token"] = "wrong"


async def router_gone(site: Site) -> None:
    await site.workers({}, {})
    site.changes["router"] = f"127.0.0.1:{free_port()}"


def free_port() -> int:
    with ExitStack() as opened:
        probe = opened.enter_context(socket())
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# What is wrong: finding, its status, words of its text, words of its remedy, findings that follow from it.
Spoil = Callable[[Site], Awaitable[None]]
FLEETS: dict[Spoil, tuple[str, Status, str, str, set[str]]] = {
    reads_off_on_decode: (
        *("bidirectional", Status.FAIL, "off on d0", "set bidirectional_kv_xfer"),
        {"live-read"},
    ),
    another_hash_seed: (
        *("compatibility", Status.FAIL, "can't exchange KV", "PYTHONHASHSEED"),
        {"live-read", "router"},
    ),
    another_block_size: (
        *("block-size", Status.FAIL, "16 on p0; 32 on d0", "same block_size"),
        {"compatibility", "live-read", "router"},
    ),
    another_revision: (
        *("model", Status.FAIL, "different weights", "same model and revision"),
        {"compatibility", "live-read", "router"},
    ),
    short_holds: ("hold-time", Status.WARN, "d0 20 s", "raise decoder_kv_blocks_ttl", set()),
    threshold_beyond_all_prompts: (
        *("threshold", Status.FAIL, "nothing is ever read back", "lower kv_recompute_threshold"),
        {"live-read"},
    ),
    decode_worker_gone: (
        *("decode-workers", Status.FAIL, "no decode worker answers", "kvloop serve decode"),
        {"live-read", "router"},
    ),
    store_gone: ("store", Status.FAIL, "every turn goes cold", "correct directory_url", set()),
    store_evicts_leases: ("store", Status.WARN, "allkeys-lru evicts leases", "volatile-ttl", set()),
    decode_worker_in_another_store: (
        *("registry", Status.FAIL, "d0 answer, but this store does not know", "same directory_url"),
        {"live-read"},
    ),
    reuse_off_in_the_router: ("live-read", Status.FAIL, "disabled", "set reuse on the router", set()),
    wrong_token: ("router", Status.FAIL, "refuses the credentials", "--token", set()),
    router_gone: ("router", Status.FAIL, "no router answers", "kvloop up", set()),
}


@pytest.mark.parametrize("spoil", FLEETS, ids=lambda spoil: spoil.__name__)
async def test_a_spoiled_fleet(spoil: Spoil, valkey_url: str, tmp_path: Path) -> None:
    name, status, text, remedy, followers = FLEETS[spoil]
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
    async with sim_fleet(0, 0, url=valkey_url) as fleet:
        site = Site(fleet, tmp_path, valkey_url)
        await spoil(site)
        findings = await site.examined()
    by_name = {finding.name: finding for finding in findings}
    assert by_name[name].status is status
    assert text in by_name[name].text
    assert remedy in by_name[name].remedy
    wrong = {finding.name for finding in findings if finding.status is not Status.OK}
    assert wrong - followers == {name}, [finding.as_json() for finding in findings]


async def test_a_fleet_with_nothing_wrong(valkey_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
        client.config_set("maxmemory", "0")
    async with sim_fleet(url=valkey_url) as fleet:
        site = Site(fleet, tmp_path, valkey_url)
        # Found through the registry alone.
        site.changes |= {"prefill": (), "decode": ()}
        findings = await site.examined()
        assert [f.as_json() for f in findings if f.status is not Status.OK] == []
        (read,) = (f for f in findings if f.name == "live-read")
        assert "from d0 to p0" in read.text
        assert "bytes in" in read.text
        (layout,) = (f for f in findings if f.name == "kv-layout")
        assert "per block of 16 tokens" in layout.text
        # It leaves nothing behind.
        await fleet.whole()
        assert await fleet.leases() == 0


GOOD_GPU = Machine(
    nixl_version="1.4.1",
    nixl_works=True,
    nixl_plugins=("LIBFABRIC", "UCX"),
    gpus=8,
    infiniband=("mlx5_0", "mlx5_1"),
    efa_domains=(),
)
GOOD_EFA = replace(
    GOOD_GPU,
    infiniband=tuple(f"efa_{n}" for n in range(16)),
    efa_domains=tuple(f"rdmap{n}s0-rdm" for n in range(16)),
)
MACHINES = {
    "no nixl": (Machine(), "UCX", "nixl", "not installed", "install kvloop"),
    "nixl broken": (
        *(replace(GOOD_GPU, nixl_works=False), "UCX", "nixl"),
        *("no agent can be made", "install what it misses"),
    ),
    "no plugin": (
        *(replace(GOOD_EFA, nixl_plugins=("UCX",)), "LIBFABRIC", "nixl-backends"),
        *("no plugin LIBFABRIC", "install a NIXL with that plugin"),
    ),
    "UCX told to use TCP": (
        *(replace(GOOD_GPU, environment={"UCX_TLS": "tcp,self"}), "UCX", "transport"),
        *("silently", "unset UCX_TLS"),
    ),
    "UCX without RDMA": (
        *(replace(GOOD_GPU, infiniband=()), "UCX", "transport"),
        *("silently falls back to TCP", "LIBFABRIC"),
    ),
    "UCX on EFA": (GOOD_EFA, "UCX", "transport", "silently falls back to TCP", "LIBFABRIC"),
    "no EFA provider": (
        *(replace(GOOD_EFA, efa_domains=()), "LIBFABRIC", "transport"),
        *("fi_info -p efa lists nothing", "reinstall aws-efa-installer"),
    ),
    "no fi_info": (
        *(replace(GOOD_EFA, efa_domains=None), "LIBFABRIC", "transport"),
        *("fi_info is not installed", "aws-efa-installer"),
    ),
    "libfabric told to use sockets": (
        *(replace(GOOD_EFA, environment={"FI_PROVIDER": "sockets"}), "LIBFABRIC", "transport"),
        *("silently", "FI_PROVIDER=efa"),
    ),
    "a rail down": (
        *(replace(GOOD_EFA, efa_domains=GOOD_EFA.efa_domains[1:] if GOOD_EFA.efa_domains else ()),),
        *("LIBFABRIC", "transport", "15 EFA rails for 8 GPUs", "every rail is up"),
    ),
}


def vllm_worker(*backends: str, endpoint: str = "127.0.0.1:1", side_channel: str = "") -> Seen:
    info = worker_pb2.WorkerInfo(
        worker_id="d0", engine="vllm", transfer_backends=backends, side_channel=side_channel
    )
    return Seen("decode", endpoint, info)


@pytest.mark.parametrize("case", MACHINES)
def test_a_spoiled_host(case: str) -> None:
    machine, backend, name, text, remedy = MACHINES[case]
    findings = {finding.name: finding for finding in check_machine(machine, [vllm_worker(backend)])}
    assert findings[name].status is not Status.OK
    assert text in findings[name].text
    assert remedy in findings[name].remedy


@pytest.mark.parametrize(
    ("machine", "backend", "said"),
    [
        (GOOD_GPU, "UCX", "mlx5_0, mlx5_1"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "^tcp"}), "UCX", "^tcp"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "rc,cuda_copy"}), "UCX", "rc"),
        (GOOD_EFA, "LIBFABRIC", "16 EFA rails, 2 per GPU"),
        (replace(GOOD_GPU, gpus=0, infiniband=()), "UCX", "without GPUs"),
    ],
)
def test_a_sound_host(machine: Machine, backend: str, said: str) -> None:
    findings = check_machine(machine, [vllm_worker(backend)])
    assert [finding.status for finding in findings] == [Status.OK] * 3
    assert said in findings[-1].text


@pytest.mark.parametrize(
    ("descriptors", "gpus", "status", "said"),
    [
        (3, 8, Status.OK, "1024 KiB per block of 16 tokens, in one piece"),
        (192, 8, Status.WARN, "in 64 pieces of 16 KiB: layer by layer"),
        (192, 0, Status.OK, "in 64 pieces of 16 KiB: layer by layer"),
    ],
)
def test_the_layout_is_what_a_read_moved(descriptors: int, gpus: int, status: Status, said: str) -> None:
    reuse = turn_pb2.Reuse(
        tokens=turn_pb2.TokenSources(readback=48),
        readback=turn_pb2.Transfer(bytes=3 * 1024 * 1024, descriptors=descriptors),
    )
    finding = judge_layout(reuse, 16, gpus)
    assert finding is not None
    assert finding.status is status
    assert said in finding.text
    assert bool(finding.remedy) == (status is Status.WARN)
    assert judge_layout(turn_pb2.Reuse(), 16, gpus) is None


def test_hosts_of_simulated_engines_need_no_nixl() -> None:
    simulated = Seen("decode", "127.0.0.1:1", worker_pb2.WorkerInfo(engine="simulated"))
    assert check_machine(Machine(), [simulated]) == []


async def test_a_side_channel_that_peers_can_not_reach() -> None:
    left = vllm_worker("UCX", endpoint="10.0.0.7:50052", side_channel="127.0.0.1:5600")
    finding = await check_side_channels([left])
    assert finding.status is Status.FAIL
    assert "loopback" in finding.text
    assert "nixl_side_channel_host" in finding.remedy
    closed = vllm_worker("UCX", side_channel=f"127.0.0.1:{free_port()}")
    finding = await check_side_channels([closed])
    assert finding.status is Status.FAIL
    assert "nothing listens" in finding.text
    assert "open the port" in finding.remedy


def test_fi_info_s_output() -> None:
    text = (
        "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\n    version: 123.0\n"
        "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\nprovider: efa\n    domain: rdmap1s6-rdm\n"
    )
    assert efa_domains(text) == ("rdmap0s6-rdm", "rdmap1s6-rdm")
    assert efa_domains("fi_getinfo: -61 (No data available)\n") == ()
