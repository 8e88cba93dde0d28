"""Every way a store can fail ends as DirectoryUnavailable, and costs at most one timeout.

What callers wait is not measured but counted: an attempt is an operation that went to the store; all others
fail at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from store_faults import Canned, Pauses, canned
from store_servers import until

from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.metastore.port import DirectoryUnavailable, Outage
from kvloop.v1alpha1 import lease_pb2

SCOPE = b"\x06" * 32
ENTRY = lease_pb2.DirectoryEntry(version=1, lease_id="a", decode_endpoint="d:1")
FOUND = b"*3\r\n$-1\r\n:0\r\n:1000002\r\n"


@pytest.fixture
async def server() -> AsyncIterator[Canned]:
    async with canned() as started:
        yield started


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@contextlib.asynccontextmanager
async def opened(url: str, pauses: Pauses, deadline_s: float = 5.0) -> AsyncIterator[Store]:
    store = open_store(url, options=StoreOptions(deadline_s=deadline_s, connect_s=5.0, sleep=pauses))
    try:
        yield store
    finally:
        await store.close()


async def outage_of(store: Store) -> Outage:
    with pytest.raises(DirectoryUnavailable) as caught:
        await store.directory.lookup(SCOPE)
    # Nothing of what the server said, or was asked, goes further.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value.outage


@pytest.mark.parametrize(
    ("answer", "outage"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", Outage.LOADING),
        (b"-MASTERDOWN Link with MASTER is down\r\n", Outage.CLUSTER_DOWN),
        (b"-CLUSTERDOWN Hash slot not served\r\n", Outage.CLUSTER_DOWN),
        (b"-NOAUTH Authentication required.\r\n", Outage.AUTHENTICATION),
        (b"-WRONGPASS invalid username-password pair\r\n", Outage.AUTHENTICATION),
        (b"-ERR something new\r\n", Outage.OTHER),
        (b"+OK\r\n", Outage.OTHER),
        (b"*-1\r\n", Outage.OTHER),
        (b"*1\r\n:1\r\n", Outage.OTHER),
        (b"\x00\xffnot the protocol\r\n", Outage.OTHER),
    ],
)
async def test_answers_that_open_the_breaker(
    server: Canned, pauses: Pauses, answer: bytes, outage: Outage
) -> None:
    server.answer = answer
    async with opened(server.url, pauses) as store:
        assert await outage_of(store) is outage
        assert store.link is not None
        assert store.link.attempts == 1


@pytest.mark.parametrize(
    ("answer", "outage"),
    [
        (b"-READONLY You can't write against a read only replica.\r\n", Outage.READONLY),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", Outage.OUT_OF_MEMORY),
        (b"-NOPERM this user has no permissions\r\n", Outage.PERMISSION),
        (b"-MISCONF Errors writing to the AOF file\r\n", Outage.READONLY),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", Outage.READONLY),
        (b"-MOVED 1 127.0.0.1:1\r\n", Outage.MOVED),
        (b"-ASK 1 127.0.0.1:1\r\n", Outage.MOVED),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", Outage.MOVED),
        (
            b"-ERR Error running script (call to f_0): @user_script:1: -OOM no memory\r\n",
            Outage.OUT_OF_MEMORY,
        ),
    ],
)
async def test_answers_that_concern_one_operation(
    server: Canned, pauses: Pauses, answer: bytes, outage: Outage
) -> None:
    server.answer = answer
    async with opened(server.url, pauses) as store:
        assert await outage_of(store) is outage
        assert not store.degraded
        server.answer = FOUND
        assert (await store.directory.lookup(SCOPE)).turn_start_us == 1_000_002


async def test_a_silent_store_costs_one_timeout_until_it_answers_a_probe(
    server: Canned, pauses: Pauses
) -> None:
    server.answer = None
    async with opened(server.url, pauses, deadline_s=0.02) as store:
        assert store.link is not None
        assert await outage_of(store) is Outage.TIMEOUT
        while len(pauses.seconds) < 10:
            for _ in range(100):
                assert await outage_of(store) is Outage.BREAKER
            await asyncio.sleep(0)
        assert store.link.attempts == 1
        assert store.link.outages[Outage.TIMEOUT] == 1
        # Pauses grow, are never in step, and have a limit.
        assert len(set(pauses.seconds)) == len(pauses.seconds)
        assert max(pauses.seconds) <= 2.0
        assert max(pauses.seconds[:2]) <= 0.1 < max(pauses.seconds)
        server.answer = b"+PONG\r\n"
        await until(lambda: _well(store))
        server.answer = FOUND
        assert (await store.directory.lookup(SCOPE)).entry is None


async def _well(store: Store) -> bool:
    return not store.degraded


async def test_operations_on_the_way_share_the_one_timeout(server: Canned, pauses: Pauses) -> None:
    server.answer = None
    async with opened(server.url, pauses, deadline_s=0.05) as store:
        outages = await asyncio.gather(*(outage_of(store) for _ in range(64)))
        # The first timeout gives the connection up, and with it whatever else waits there.
        assert Outage.TIMEOUT in outages
        assert set(outages) <= {Outage.TIMEOUT, Outage.CONNECTION}
        assert await outage_of(store) is Outage.BREAKER
        assert store.link is not None
        assert store.link.attempts == 64


async def test_a_store_that_hangs_up_is_connected_to_again(server: Canned, pauses: Pauses) -> None:
    server.answer = FOUND
    async with opened(server.url, pauses) as store:
        await store.directory.lookup(SCOPE)
        server.drop()
        await until(lambda: _answers(store))
        assert server.connections > 1


async def _answers(store: Store) -> bool:
    try:
        await store.directory.lookup(SCOPE)
    except DirectoryUnavailable:
        return False
    return True


async def test_a_connection_cut_in_mid_answer_mixes_nothing_up(server: Canned, pauses: Pauses) -> None:
    server.answer, server.hang_up = FOUND[:9], True
    async with opened(server.url, pauses) as store:
        assert await outage_of(store) is Outage.CONNECTION
        server.answer, server.hang_up = b"+PONG\r\n", False
        await until(lambda: _well(store))
        server.answer = FOUND
        assert (await store.directory.lookup(SCOPE)).turn_start_us == 1_000_002


async def test_nobody_listens(pauses: Pauses) -> None:
    async with canned() as gone:
        url = gone.url
    async with opened(url, pauses) as store:
        assert await outage_of(store) is Outage.CONNECTION
        assert await outage_of(store) is Outage.BREAKER
        with pytest.raises(DirectoryUnavailable):
            await store.directory.check()
        for operation in (
            store.directory.publish(SCOPE, ENTRY, 60),
            store.directory.remove(SCOPE, "a"),
            store.directory.set_alive(SCOPE, 60),
            store.directory.is_alive(SCOPE),
            store.directory.publish_hints(SCOPE, [b"d"], SCOPE, 60),
            store.directory.find_by_prefix(SCOPE, [b"d"]),
            store.registry.workers(),
            store.estimates.read(),
        ):
            with pytest.raises(DirectoryUnavailable):
                await operation


@pytest.mark.parametrize("kind", ["redis+sentinel", "redis+cluster"])
async def test_nobody_listens_of_several(pauses: Pauses, kind: str) -> None:
    async with canned() as gone:
        hosts = f"127.0.0.1:{gone.port},[::1]:{gone.port}"
    async with opened(f"{kind}://{hosts}/{'leases' if 'sentinel' in kind else ''}", pauses) as store:
        assert await outage_of(store) in {Outage.CONNECTION, Outage.CLUSTER_DOWN}
        assert await outage_of(store) is Outage.BREAKER


async def test_more_operations_than_may_be_on_their_way_are_refused(server: Canned, pauses: Pauses) -> None:
    server.answer = None
    store = open_store(
        server.url, options=StoreOptions(deadline_s=0.05, connect_s=5, max_concurrent=3, sleep=pauses)
    )
    outages = await asyncio.gather(*(outage_of(store) for _ in range(5)))
    assert outages.count(Outage.POOL) == 2
    assert outages.count(Outage.TIMEOUT) + outages.count(Outage.CONNECTION) == 3
    await store.close()


async def test_a_loop_that_stood_still_blames_nobody(server: Canned, pauses: Pauses) -> None:
    server.answer = FOUND
    async with opened(server.url, pauses, deadline_s=0.5) as store:
        await store.directory.lookup(SCOPE)
        lookup = asyncio.create_task(store.directory.lookup(SCOPE))
        # The question leaves and is answered; then the loop stands still beyond the deadline.
        await until(lambda: _asked(server, 2))
        time.sleep(0.6)  # noqa: ASYNC251
        assert (await lookup).turn_start_us == 1_000_002
        assert not store.degraded


async def test_a_cancelled_operation_leaves_the_order_of_answers(server: Canned, pauses: Pauses) -> None:
    server.answer = None
    async with opened(server.url, pauses) as store:
        task = asyncio.create_task(store.directory.lookup(SCOPE))
        await until(lambda: _asked(server, 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not store.degraded
        server.answer = FOUND.replace(b"2\r\n", b"7\r\n") + FOUND
        assert (await store.directory.lookup(SCOPE)).turn_start_us == 1_000_002


async def _asked(server: Canned, commands: int) -> bool:
    return server.commands >= commands


async def test_closing_ends_what_is_on_its_way(server: Canned, pauses: Pauses) -> None:
    server.answer = None
    store = open_store(server.url, options=StoreOptions(deadline_s=30, connect_s=5, sleep=pauses))
    task = asyncio.create_task(outage_of(store))
    await until(lambda: _asked(server, 1))
    await store.close()
    assert await task is Outage.CONNECTION
    assert await outage_of(store) is Outage.CLOSED
    assert not store.degraded
