"""Real stores killed, paused, emptied, failed over and filled under a directory that goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import store_servers as servers
from store_faults import Pauses
from store_servers import until

from kvloop.metastore import keys
from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.metastore.port import DirectoryUnavailable, Level, Outage
from kvloop.v1alpha1 import lease_pb2

SCOPE = b"\x07" * 32


def entry(lease_id: str, start_us: int = 1) -> lease_pb2.DirectoryEntry:
    return lease_pb2.DirectoryEntry(
        version=1, lease_id=lease_id, decode_endpoint="d:1", turn_start_us=start_us
    )


@contextlib.asynccontextmanager
async def opened(url: str, deadline_s: float = 2.0) -> AsyncIterator[tuple[Store, Pauses]]:
    pauses = Pauses()
    store = open_store(url, options=StoreOptions(deadline_s=deadline_s, connect_s=2.0, sleep=pauses))
    try:
        yield store, pauses
    finally:
        await store.close()


async def outage(store: Store, scope: bytes = SCOPE) -> Outage | None:
    try:
        await store.directory.lookup(scope)
    except DirectoryUnavailable as error:
        return error.outage
    return None


async def _works(store: Store) -> bool:
    return await outage(store) is None


def attempts(store: Store) -> int:
    assert store.link is not None
    return store.link.attempts


@pytest.fixture(params=[servers.valkey, servers.debian_redis], ids=["valkey", "redis"])
def lone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[servers.Store]:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(request.param(tmp_path))
        yield store
        with contextlib.suppress(servers.RedisError):
            assert not store.keys_without_ttl()


async def test_killed_and_restarted_empty(lone: servers.Store) -> None:
    async with opened(lone.url) as (store, pauses):
        await store.directory.publish(SCOPE, entry("a"), 60)
        lone.servers[0].kill()
        await until(lambda: _away(store))
        before = attempts(store)
        failed = len(pauses.seconds)
        await until(lambda: _more(pauses, failed + 3))
        for _ in range(200):
            assert await outage(store) is Outage.BREAKER
        assert attempts(store) == before
        lone.servers[0].start()
        await until(lambda: _works(store))
        # Empty, scripts included.
        assert (await store.directory.lookup(SCOPE)).entry is None
        assert (await store.directory.publish(SCOPE, entry("b"), 60)).won


async def _away(store: Store) -> bool:
    return await outage(store) is Outage.BREAKER


async def _more(pauses: Pauses, count: int) -> bool:
    return len(pauses.seconds) >= count


async def test_paused(lone: servers.Store) -> None:
    async with opened(lone.url, deadline_s=0.025) as (store, pauses):
        await until(lambda: _works(store))
        await until(lambda: _published(store))
        before, failed = attempts(store), len(pauses.seconds)
        lone.servers[0].pause()
        try:
            assert await outage(store) is Outage.TIMEOUT
            while len(pauses.seconds) < failed + 2:
                assert await outage(store) is Outage.BREAKER
                await asyncio.sleep(0.001)
            assert attempts(store) == before + 1
        finally:
            lone.servers[0].resume()
        await until(lambda: _works(store))
        await until(lambda: _finds(store, "a"))


async def _published(store: Store) -> bool:
    try:
        return (await store.directory.publish(SCOPE, entry("a"), 60)).won
    except DirectoryUnavailable:
        return False


async def _finds(store: Store, lease_id: str) -> bool:
    try:
        found = (await store.directory.lookup(SCOPE)).entry
    except DirectoryUnavailable:
        return False
    return found is not None and found.lease_id == lease_id


async def test_emptied(lone: servers.Store) -> None:
    async with opened(lone.url) as (store, _):
        await store.directory.publish(SCOPE, entry("a"), 60)
        lone.servers[0].client().flushall()
        lone.servers[0].client().script_flush()
        assert (await store.directory.lookup(SCOPE)).entry is None
        assert not await store.directory.remove(SCOPE, "a")
        assert (await store.directory.publish(SCOPE, entry("b"), 60)).displaced is None


async def test_ten_thousand_expiries_at_once(lone: servers.Store) -> None:
    async with opened(lone.url) as (store, _):
        scopes = [number.to_bytes(4, "big") for number in range(10_000)]
        for start in range(0, len(scopes), 500):
            await asyncio.gather(
                *(store.directory.publish(scope, entry("a"), 1.0) for scope in scopes[start : start + 500])
            )
        await store.directory.publish(SCOPE, entry("stays"), 600)
        client = lone.servers[0].client()

        async def all_but_one_gone() -> bool:
            assert await _finds(store, "stays")
            return client.dbsize() == 1

        await until(all_but_one_gone)
        assert not store.degraded


async def test_full(tmp_path: Path) -> None:
    with servers.valkey(tmp_path, "maxmemory 3mb", "maxmemory-policy noeviction") as backing:
        async with opened(backing.url) as (store, _):
            await store.directory.publish(SCOPE, entry("a"), 60)
            backing.servers[0].client().config_set("maxmemory", 1)
            with pytest.raises(DirectoryUnavailable) as caught:
                await store.directory.publish(SCOPE, entry("b"), 60)
            assert caught.value.outage is Outage.OUT_OF_MEMORY
            assert await _finds(store, "a")
            with pytest.raises(DirectoryUnavailable) as caught:
                await store.directory.check()
            assert caught.value.outage is Outage.OUT_OF_MEMORY


async def test_a_replica_is_read_but_not_written(tmp_path: Path) -> None:
    with servers.debian_redis(tmp_path) as primary:
        replica = servers.Server(
            servers.debian_binary("redis-server"),
            tmp_path,
            [f"replicaof 127.0.0.1 {primary.servers[0].port}"],
            name="replica",
        )
        with servers.running(replica):
            async with opened(primary.url) as (store, _):
                await store.directory.publish(SCOPE, entry("a"), 60)
            servers.poll(lambda: replica.client().exists(keys.lease_key(SCOPE)), "replication")
            async with opened(f"redis://{replica.address}") as (store, _):
                assert await _finds(store, "a")
                with pytest.raises(DirectoryUnavailable) as caught:
                    await store.directory.publish(SCOPE, entry("b"), 60)
                assert caught.value.outage is Outage.READONLY
                assert not store.degraded
                await until(lambda: _finds(store, "a"))
                # Promoted: writable without a restart of ours.
                replica.client().replicaof("NO", "ONE")
                await until(lambda: _published(store))


@pytest.mark.parametrize(
    ("credentials", "expected"),
    [
        ("leases:wrong@", Outage.AUTHENTICATION),
        ("nobody:secret@", Outage.AUTHENTICATION),
        ("", Outage.AUTHENTICATION),
        ("other:secret@", Outage.PERMISSION),
        ("reader:secret@", Outage.PERMISSION),
        ("leases:secret@", None),
    ],
)
async def test_users(tmp_path: Path, credentials: str, expected: Outage | None) -> None:
    rights = "+@read +@write +eval +evalsha +time +ping +info"
    with servers.debian_redis(
        tmp_path,
        "user default off",
        f"user leases on >secret ~kvloop:* {rights}",
        f"user other on >secret ~other:* {rights}",
        "user reader on >secret ~kvloop:* +@read +eval +evalsha +time +ping +info",
    ) as backing:
        async with opened(backing.url.replace("redis://", f"redis://{credentials}")) as (store, _):
            if expected is None:
                assert (await store.directory.check()).fit
                return
            with pytest.raises(DirectoryUnavailable) as caught:
                await store.directory.publish(SCOPE, entry("a"), 60)
            assert caught.value.outage is expected
            assert "secret" not in str(caught.value)
            with pytest.raises(DirectoryUnavailable):
                await store.directory.check()


@pytest.mark.parametrize(
    ("setting", "level", "text"),
    [
        ("maxmemory-policy allkeys-lru", Level.WARNING, "volatile-ttl"),
        ("maxmemory-policy noeviction", Level.WARNING, "volatile-ttl"),
        ("maxmemory-policy volatile-ttl", None, ""),
        ("maxmemory 0", Level.NOTE, "maxmemory is not set"),
    ],
)
async def test_settings_are_checked(tmp_path: Path, setting: str, level: Level | None, text: str) -> None:
    with servers.valkey(tmp_path, "maxmemory 64mb", setting) as backing:
        async with opened(backing.url) as (store, _):
            report = await store.directory.check()
            assert report.fit
            assert [finding.level for finding in report.findings] == ([level] if level else [])
            assert all(text in finding.text for finding in report.findings)


async def test_failover_with_lost_writes(tmp_path: Path) -> None:
    with servers.sentinel(tmp_path) as backing:
        primary, replica = backing.servers
        async with opened(backing.url) as (store, _):
            await store.directory.publish(SCOPE, entry("kept", 1000), 600)
            servers.poll(lambda: replica.client().exists(keys.lease_key(SCOPE)), "replication")
            # What is written from here on is lost: the replica is cut off before.
            replica.client().replicaof("127.0.0.1", 1)
            servers.poll(
                lambda: replica.client().info("replication")["master_link_status"] == "down", "the cut"
            )
            await store.directory.publish(SCOPE, entry("lost", 2000), 600)
            primary.kill()
            replica.client().replicaof("127.0.0.1", primary.port)
            await until(lambda: _promoted(replica))
            await until(lambda: _works(store))
            found = (await store.directory.lookup(SCOPE)).entry
            assert found is None or found.lease_id == "kept"
            # The lost lease's worker publishes again or not: either way the later turn wins.
            await until(lambda: _wins(store, entry("next", 3000)))
            answer = await store.directory.publish(SCOPE, entry("lost", 2000), 600)
            assert not answer.won
            assert await _finds(store, "next")


async def _promoted(server: servers.Server) -> bool:
    # A server that changes its role drops its clients.
    with contextlib.suppress(servers.RedisError):
        return bool(server.client().info("replication")["role"] == "master")
    return False


async def _wins(store: Store, lease: lease_pb2.DirectoryEntry) -> bool:
    try:
        return (await store.directory.publish(SCOPE, lease, 600)).won
    except DirectoryUnavailable:
        return False


def _scopes_of(nodes: list[servers.Server], count: int = 90) -> dict[int, list[bytes]]:
    """Return scopes by the index of the node that owns them."""
    found: dict[int, list[bytes]] = {index: [] for index in range(len(nodes))}
    for number in range(count):
        scope = number.to_bytes(4, "big")
        for index, node in enumerate(nodes):
            with contextlib.suppress(servers.redis.exceptions.ResponseError):
                node.client().exists(keys.lease_key(scope))
                found[index].append(scope)
    return found


async def test_a_lost_node_costs_its_own_turns_only(tmp_path: Path) -> None:
    with servers.cluster(tmp_path) as backing:
        by_node = _scopes_of(backing.servers)
        async with opened(backing.url) as (store, _):
            for scopes in by_node.values():
                for scope in scopes:
                    await store.directory.publish(scope, entry("a"), 600)
            lost = backing.servers[1]
            lost.kill()
            await until(lambda: _away_for(store, by_node[1][0]))
            before = attempts(store)
            for scope in by_node[1]:
                assert await outage(store, scope) is not None
            spent = attempts(store) - before
            for scope in by_node[0] + by_node[2]:
                assert (await store.directory.lookup(scope)).entry is not None
            assert spent <= 2
            lost.start()
            await until(lambda: _works_for(store, by_node[1][0]))
            assert (await store.directory.lookup(by_node[1][0])).entry is None
            await until(lambda: _works_for(store, by_node[0][0]))


async def _away_for(store: Store, scope: bytes) -> bool:
    return await outage(store, scope) is Outage.BREAKER


async def _works_for(store: Store, scope: bytes) -> bool:
    return await outage(store, scope) is None


async def test_a_slot_that_moves_is_followed(tmp_path: Path) -> None:
    with servers.cluster(tmp_path) as backing:
        source, target = backing.servers[0].client(), backing.servers[1].client()
        scope, other = _scopes_of(backing.servers)[0][:2]
        key = keys.lease_key(scope)
        slot = source.execute_command("CLUSTER", "KEYSLOT", key)
        ids = {
            name: client.execute_command("CLUSTER", "MYID")
            for name, client in (("source", source), ("target", target))
        }
        async with opened(backing.url) as (store, _):
            await store.directory.publish(scope, entry("a"), 600)
            target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids["source"])
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids["target"])
            assert (await store.directory.lookup(scope)).entry is not None
            source.execute_command("MIGRATE", "127.0.0.1", backing.servers[1].port, key, 0, 5000)
            # ASK: the key is already there, the slot not yet.
            found = (await store.directory.lookup(scope)).entry
            assert found is not None
            assert not (await store.directory.publish(scope, entry("b", 0), 600)).won
            for client in (target, source, backing.servers[2].client()):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids["target"])
            # MOVED, once.
            for _ in range(3):
                found = (await store.directory.lookup(scope)).entry
                assert found is not None
            assert (await store.directory.publish(scope, entry("c", 5), 600)).won
            assert (await store.directory.lookup(other)).entry is None
            assert not store.degraded


@pytest.mark.parametrize("kind", ["::1", "unix"])
async def test_other_addresses(tmp_path: Path, kind: str) -> None:
    binary = str(servers.valkey_binary())
    path = tmp_path / "s.sock"
    host = kind if kind != "unix" else "127.0.0.1"
    server = servers.Server(binary, tmp_path, [f"unixsocket {path}"], host=host)
    with servers.running(server):
        url = f"redis://{server.address}/1" if kind != "unix" else f"unix://{path}?db=1"
        async with opened(url) as (store, _):
            await store.directory.publish(SCOPE, entry("a"), 60)
            assert await _finds(store, "a")
            assert server.client().info("keyspace")["db1"]["keys"] == 1


async def test_the_deployed_settings_are_fit(tmp_path: Path) -> None:
    lines = (Path(__file__).parents[2] / "deploy/store/valkey.conf").read_text().splitlines()
    users = [line.removeprefix("#   ") for line in lines if line.startswith("#   user ")]
    assert len(users) == 2
    with servers.valkey(tmp_path, *lines, *users) as backing:
        url = backing.url.replace("redis://", "redis://kvloop:PASSWORD@")
        async with opened(url) as (store, _):
            report = await store.directory.check()
            assert report.findings == ()
            await store.registry.workers()
            await store.estimates.merge("a", [1.0])
            await store.directory.publish_hints(SCOPE, [b"d"], SCOPE, 60)
            assert (await store.directory.find_by_prefix(SCOPE, [b"d"])).scope == b""
