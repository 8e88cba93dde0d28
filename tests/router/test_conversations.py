"""Letting go of conversations at routers that do not know who holds them."""

from typing import Any

import grpc
import pytest
from router_sim import SimClient, SimFleet, ids, sim_fleet

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.runtime.errors import Reason, from_rpc_error


async def apart(fleet: SimFleet, **changes: Any) -> tuple[SimClient, SimClient]:
    """Return clients of two routers that have one decode worker each."""
    routers = [
        await fleet.router(store=fleet.store, decode_endpoints=(node.endpoint,), **changes)
        for node in fleet.decodes
    ]
    one, other = [await fleet.client(router) for router in routers]
    return one, other


async def test_the_holder_is_found_in_the_registry(store_url: str) -> None:
    async with sim_fleet(decodes=2, url=store_url) as fleet:
        one, other = await apart(fleet)
        await one.say(ids(200))
        assert await fleet.leases() == 1
        assert await other.end()
        assert await fleet.leases() == 0
        assert not await one.end()
        await fleet.whole()


async def test_a_holder_that_restarted_unnoticed_is_asked() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(store=fleet.store)
        client = await fleet.client(app)
        await client.say(ids(200))
        info = app.pool.decode[0].info
        assert info is not None
        info.epoch = "a former life"
        assert await client.end()
        assert await fleet.leases() == 0
        await fleet.whole()


async def test_a_holder_that_the_registry_does_not_know_gets_no_call() -> None:
    async with sim_fleet(decodes=2) as fleet:
        one, other = await apart(fleet)
        await one.say(ids(200))
        holder = fleet.decodes[0]
        assert await fleet.store.registry.withdraw(holder.name, holder.engine.facts.epoch)
        # The entry names an address, but anybody who can write there can write any.
        assert await other.end()
        assert await fleet.leases() == 1
        # The hint is gone: the lease ends by its own time.
        assert not await one.end()


async def test_a_registry_that_does_not_answer_lets_go_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sim_fleet(decodes=2) as fleet:
        one, other = await apart(fleet)
        await one.say(ids(200))

        async def away() -> Any:
            raise DirectoryUnavailable

        monkeypatch.setattr(fleet.store.registry, "workers", away)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await other.end()
        failure = from_rpc_error(raised.value, Reason.ERROR_REASON_INTERNAL)
        assert failure.reason == Reason.ERROR_REASON_DIRECTORY_UNAVAILABLE
        monkeypatch.undo()
        assert await other.end()
        await fleet.whole()
