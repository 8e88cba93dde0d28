"""Sessions at real routers: who gets one, who does not, and how they end."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from router_sim import ids, sim_fleet
from session_kit import ALIVE_S, CLOSE, begun, ended, opened, opening, pair

from kvloop.router.auth import hash_token
from kvloop.runtime.errors import Reason
from kvloop.v1alpha1 import router_service_pb2


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
        failure = await ended(await begun(a, *requests))
        assert (failure.reason, failure.field) == (reason, field)


async def test_a_stream_that_ends_without_a_word_is_refused() -> None:
    async with sim_fleet() as fleet:
        a, _ = await pair(fleet)
        call = await begun(a)
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
        failure = await ended(await begun(client, opening("d")))
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
        assert (await ended(await begun(stranger, opening("c")))).reason == (
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
