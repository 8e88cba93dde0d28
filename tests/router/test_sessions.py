"""Sessions at real routers, over simulated decode workers whose leases are short."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from router_sim import SimClient, SimFleet, ids, sim_fleet, until_async

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.router.auth import hash_token
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

ALIVE_S = 0.5
SHORT = turn_pb2.Retention(ttl=duration_pb2.Duration(nanos=600_000_000))


def opening(conversation: str, **fields: Any) -> router_service_pb2.SessionRequest:
    return router_service_pb2.SessionRequest(
        open=router_service_pb2.SessionOpen(conversation_id=conversation, **fields)
    )


CLOSE = router_service_pb2.SessionRequest(close=router_service_pb2.SessionClose())


async def opened(client: SimClient, conversation: str, **fields: Any) -> Any:
    """Open a session; return its call."""
    call = client.stub.Session(metadata=client.metadata)
    await call.write(opening(conversation, **fields))
    response = await call.read()
    assert response is not grpc.aio.EOF, await call.details()
    assert response.opened.alive_time.ToMilliseconds() > 0
    return call


async def ended(call: Any) -> Failure:
    """Return what a session ends with."""
    try:
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
    raise AssertionError(f"ended with {await call.code()}")


async def pair(fleet: SimFleet, **changes: Any) -> tuple[SimClient, SimClient]:
    """Return clients of two routers."""
    changes = {"session_alive_s": ALIVE_S} | changes
    one, other = [await fleet.router(**changes) for _ in range(2)]
    return await fleet.client(one), await fleet.client(other)


async def until_prolonged(fleet: SimFleet, times: int) -> None:
    async def often() -> bool:
        return sum(node.app.parts.prolonger.prolonged for node in fleet.decodes) >= times  # type: ignore[union-attr]

    await until_async(often, f"{times} times prolonged")


async def test_a_lease_outlives_its_ttl_while_the_session_is_open(store_url: str) -> None:
    conversation = secrets.token_hex(4)
    async with sim_fleet(url=store_url) as fleet:
        a, b = await pair(fleet)
        session = await opened(a, conversation)
        first = await b.say(ids(100), conversation, retention=SHORT)
        await until_prolonged(fleet, 4)
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
        assert fleet.decodes[0].app.parts.keeper.table.endings["expired"] == 1  # type: ignore[union-attr]
        answer = await b.say(ids(110), conversation)
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")


async def test_half_closing_without_a_close_lets_go_of_nothing() -> None:
    async with sim_fleet() as fleet:
        a, b = await pair(fleet)
        session = await opened(a, "c")
        await b.say(ids(100), "c")
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        assert await session.code() is grpc.StatusCode.OK
        assert await fleet.leases() == 1
        assert await b.end("c")


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
        assert fleet.decodes[0].app.parts.keeper.table.endings["evicted"] == 1  # type: ignore[union-attr]
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
        await until_prolonged(fleet, 3)
        assert (await b.say([*ids(100), 7], "c")).way[0] == "READBACK"
        refused = await ended(await _begun(a, opening("c")))
        assert refused.reason == Reason.ERROR_REASON_DRAINING
        again.cancel()


async def _begun(client: SimClient, *requests: Any) -> Any:
    call = client.stub.Session(metadata=client.metadata)
    # A refusal may come before everything is said; whoever reads is told of it.
    with contextlib.suppress(grpc.aio.AioRpcError):
        for request in requests:
            await call.write(request)
    return call


@pytest.mark.parametrize(
    ("requests", "reason", "field"),
    [
        ([CLOSE], Reason.ERROR_REASON_INVALID_FIELD, "open"),
        ([router_service_pb2.SessionRequest()], Reason.ERROR_REASON_INVALID_FIELD, "open"),
        ([opening("")], Reason.ERROR_REASON_INVALID_FIELD, "conversation_id"),
        ([opening("c" * 257)], Reason.ERROR_REASON_INVALID_FIELD, "conversation_id"),
        ([opening("c", cache_salt="s" * 257)], Reason.ERROR_REASON_INVALID_FIELD, "cache_salt"),
        ([opening("c", model="no such")], Reason.ERROR_REASON_MODEL_NOT_FOUND, "model"),
        ([opening("c"), opening("c")], Reason.ERROR_REASON_INVALID_FIELD, "close"),
        ([opening("c"), router_service_pb2.SessionRequest()], Reason.ERROR_REASON_INVALID_FIELD, "close"),
    ],
)
async def test_what_makes_no_session_is_refused_with_its_field(
    requests: list[Any], reason: int, field: str
) -> None:
    async with sim_fleet() as fleet:
        a, _ = await pair(fleet)
        failure = await ended(await _begun(a, *requests))
        assert (failure.reason, failure.field) == (reason, field)


async def test_a_stream_that_ends_without_a_word_is_refused() -> None:
    async with sim_fleet() as fleet:
        a, _ = await pair(fleet)
        call = await _begun(a)
        await call.done_writing()
        assert (await ended(call)).field == "open"


async def test_bytes_that_are_no_request_are_refused() -> None:
    async with sim_fleet() as fleet:
        a, _ = await pair(fleet)
        method = a.channel.stream_stream("/kvloop.v1alpha1.RouterService/Session")
        call = method()
        await call.write(b"\xff\xff")
        assert (await ended(call)).field == "request"


async def test_sessions_beyond_the_limit_are_told_to_come_back() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(max_sessions=1)
        client = await fleet.client(app)
        first = await opened(client, "c")
        failure = await ended(await _begun(client, opening("d")))
        assert failure.reason == Reason.ERROR_REASON_OVERLOADED
        assert failure.retry_after_s
        await first.write(CLOSE)
        assert not (await first.read()).closed.released
        assert await first.read() is grpc.aio.EOF
        (await opened(client, "d")).cancel()


async def test_sessions_are_the_tenant_s_own_and_end_with_its_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{hash_token('a')} acme\n{hash_token('b')} beta\n")
    async with sim_fleet() as fleet:
        app = await fleet.router(tokens_file=file, session_alive_s=ALIVE_S)
        acme, beta = await fleet.client(app, "a"), await fleet.client(app, "b")
        stranger = await fleet.client(app)
        assert (await ended(await _begun(stranger, opening("c")))).reason == (
            Reason.ERROR_REASON_UNAUTHENTICATED
        )
        await acme.say(ids(100))
        foreign = await opened(beta, "c")
        await foreign.write(CLOSE)
        assert not (await foreign.read()).closed.released
        assert await fleet.leases() == 1
        own = await opened(acme, "c")
        file.write_text(f"{hash_token('b')} beta\n")
        assert (await ended(own)).reason == Reason.ERROR_REASON_UNAUTHENTICATED
        assert await fleet.leases() == 1


async def test_a_router_that_stops_leaves_no_session_behind() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        session = await opened(client, "c")
        await app.stop()
        assert (await ended(session)).code is not None
