"""Leases of live conversations over time, on real routers and simulated decode workers."""

import asyncio
import secrets

import grpc
from router_sim import ids, sim_fleet, until_async
from session_kit import ALIVE_S, CLOSE, SHORT, begun, ended, opened, opening, pair, until_prolonged

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.runtime.errors import Reason


async def test_a_lease_outlives_its_ttl_while_the_session_is_open(store_url: str) -> None:
    conversation = secrets.token_hex(4)
    async with sim_fleet(url=store_url) as fleet:
        a, b = await pair(fleet)
        session = await opened(a, conversation)
        first = await b.say(ids(100), conversation, retention=SHORT)
        await until_prolonged(fleet, 2)
        history = [*ids(100), *first.token_ids, 7]
        second = await b.same_as_cold(history, conversation)
        assert second.way == ("READBACK", "PROVEN")
        await session.write(CLOSE)
        response = await session.read()
        assert response.closed.released
        assert await session.read() is grpc.aio.EOF
        assert await session.code() is grpc.StatusCode.OK
        assert await fleet.leases() == 0
        await fleet.whole()
        assert (await a.say(history, conversation)).way == ("RECOMPUTE", "NOT_FOUND")
        assert await a.end(conversation)


async def test_a_client_that_is_gone_lets_the_lease_lapse(store_url: str) -> None:
    conversation = secrets.token_hex(4)
    async with sim_fleet(url=store_url) as fleet:
        a, b = await pair(fleet)
        session = await opened(a, conversation)
        await b.say(ids(100), conversation, retention=SHORT)
        await until_prolonged(fleet, 2)
        session.cancel()
        assert await fleet.leases() == 1
        await fleet.whole()

        async def told() -> bool:
            table = fleet.decodes[0].app.parts.keeper.table  # type: ignore[union-attr]
            return table.endings["expired"] == 1

        await until_async(told, "the lease's end")
        answer = await b.say(ids(110), conversation)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")


async def test_without_session_a_lease_ends_by_its_ttl() -> None:
    async with sim_fleet() as fleet:
        a, _ = await pair(fleet)
        await a.say(ids(100), retention=SHORT)
        await fleet.whole()
        assert fleet.decodes[0].app.parts.prolonger.prolonged == 0  # type: ignore[union-attr]


async def test_a_live_lease_goes_when_room_is_needed() -> None:
    async with sim_fleet(engine={"num_blocks": 64, "max_model_len": 512, "hold_share": 0.25}) as fleet:
        a, b = await pair(fleet)
        session = await opened(a, "c")
        await b.say(ids(200), "c", retention=SHORT)
        await until_prolonged(fleet, 2)
        await b.say(ids(200, seed=1), "other")

        async def told() -> bool:
            table = fleet.decodes[0].app.parts.keeper.table  # type: ignore[union-attr]
            return table.endings["evicted"] == 1

        await until_async(told, "the eviction")
        session.cancel()
        assert await b.end("other")
        await fleet.whole()


async def test_a_session_survives_the_store_s_absence() -> None:
    async with sim_fleet() as fleet:
        a, b = await pair(fleet)
        beats = 0
        set_alive = fleet.flaky.set_alive

        async def failing(scope: bytes, ttl_s: float) -> None:
            nonlocal beats
            beats += 1
            if beats < 4:
                raise DirectoryUnavailable
            await set_alive(scope, ttl_s)

        fleet.flaky.set_alive = failing  # type: ignore[method-assign]
        session = await opened(a, "c")

        async def beating() -> bool:
            return beats >= 5

        await until_async(beating, "five beats")
        await b.say(ids(100), "c", retention=SHORT)
        await until_prolonged(fleet, 2)
        session.cancel()


async def test_a_draining_router_ends_its_sessions_and_another_takes_over() -> None:
    async with sim_fleet() as fleet:
        apps = [await fleet.router(session_alive_s=ALIVE_S) for _ in range(2)]
        a, b = [await fleet.client(app) for app in apps]
        session = await opened(a, "c")
        await b.say(ids(100), "c", retention=SHORT)
        draining = asyncio.create_task(apps[0].drain())
        failure = await ended(session)
        assert failure.reason == Reason.ERROR_REASON_DRAINING
        assert failure.retry_after_s
        await draining
        again = await opened(b, "c")
        await until_prolonged(fleet, 2)
        assert (await b.say([*ids(100), 7], "c")).way[0] == "READBACK"
        refused = await ended(await begun(a, opening("c")))
        assert refused.reason == Reason.ERROR_REASON_DRAINING
        again.cancel()
