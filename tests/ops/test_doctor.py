"""Deployments with one thing wrong: the doctor names it, and what to do.

The table is the specification. Fleets run on simulated engines and a real store; of hosts, see
test_doctor_host.py.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from doctor_kit import vllm_worker
from router_sim import SimFleet, sim_fleet

from kvloop.cli.doctor.examination import Deployment, examine
from kvloop.cli.doctor.findings import Finding, Status
from kvloop.cli.doctor.network import check_registry, check_side_channels
from kvloop.cli.doctor.workers import Seen
from kvloop.metastore.factory import Store, open_store
from kvloop.router.app import RouterApp
from kvloop.runtime.ports import free_port

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


@asynccontextmanager
async def closing_store(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    try:
        yield store
    finally:
        await store.close()


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


async def test_of_workers_that_do_not_answer_nothing_is_said_to_be_well(valkey_url: str) -> None:
    silent = [Seen("prefill", "127.0.0.1:1", None), Seen("decode", "127.0.0.1:2", None)]
    async with closing_store(valkey_url) as store:
        for finding in (await check_side_channels(silent), await check_registry(store, silent)):
            assert finding.status is Status.WARN
            assert "answers" in finding.text


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
