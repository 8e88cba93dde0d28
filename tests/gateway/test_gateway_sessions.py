"""ChatService's sessions over routers by script: held open, moved on, closed, and left."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from gateway_router import FakeRouter, Session

from kvloop.gateway.routers import Routers
from kvloop.gateway.sessions import Sessions
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.servicing import Unparsable
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import router_service_pb2

OPEN = pb.ChatServiceSessionRequest(open=pb.ChatSessionOpen(conversation_id="c", cache_salt="s"))
CLOSE = pb.ChatServiceSessionRequest(close=router_service_pb2.SessionClose())
AWAY = Failure(Reason.ERROR_REASON_DRAINING, "going away")
METADATA = (("authorization", "Bearer key"),)


@pytest.fixture
def pair() -> Iterator[tuple[FakeRouter, FakeRouter]]:
    one, other = FakeRouter(None), FakeRouter(None)  # type: ignore[arg-type]
    yield one, other
    one.stop()
    other.stop()


@pytest.fixture
async def sessions(pair: tuple[FakeRouter, FakeRouter]) -> AsyncIterator[Sessions]:
    routers = Routers([f"127.0.0.1:{router.port}" for router in pair])
    await routers.start()
    yield Sessions(routers)
    await routers.stop()


def opening(asked: pb.ChatSessionOpen) -> router_service_pb2.SessionOpen:
    return router_service_pb2.SessionOpen(
        conversation_id=asked.conversation_id, model="m", cache_salt=asked.cache_salt
    )


class Client:
    """One stream: what is said on it, and what is answered."""

    def __init__(self, sessions: Sessions) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: AsyncGenerator[pb.ChatServiceSessionResponse, None] = sessions.serve(
            self._requests(), opening, METADATA
        )

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self.said.get()) is not None:
            yield request

    async def say(self, request: Any) -> pb.ChatServiceSessionResponse | None:
        """Say something, None for the end, and return the next answer; None: there is none any more."""
        self.said.put_nowait(request)
        return await self.next()

    async def next(self) -> pb.ChatServiceSessionResponse | None:
        async with asyncio.timeout(20):
            return await anext(self.answers, None)


@asynccontextmanager
async def client_of(sessions: Sessions) -> AsyncIterator[Client]:
    client = Client(sessions)
    async with aclosing(client.answers):
        yield client


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other threads' doing
            await asyncio.sleep(0.01)


def held_by(pair: tuple[FakeRouter, FakeRouter]) -> list[Session]:
    return [session for router in pair for session in router.sessions]


async def refusal(client: Client, request: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        await client.say(request)
    return caught.value


async def test_a_session_is_the_routers(sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]) -> None:
    async with client_of(sessions) as client:
        opened = await client.say(OPEN)
        assert opened is not None
        assert opened.opened.alive_time.seconds == 30
        (session,) = held_by(pair)
        asked = session.opening
        assert (asked.conversation_id, asked.model, asked.cache_salt) == ("c", "m", "s")
        assert session.metadata["authorization"] == "Bearer key"
        closed = await client.say(CLOSE)
        assert closed is not None
        assert closed.closed.released
        assert session.closed
        assert await client.next() is None
    assert not any(router.let_go for router in pair)


async def test_an_end_without_close_lets_it_lapse(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client:
        await client.say(OPEN)
        assert await client.say(None) is None
    (session,) = held_by(pair)
    await until(session.ended.is_set)
    assert not session.closed
    assert not any(router.let_go for router in pair)


async def test_a_client_that_is_gone_lets_it_lapse(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client:
        await client.say(OPEN)
        waiting = asyncio.create_task(client.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    (session,) = held_by(pair)
    await until(session.ended.is_set)
    assert not session.closed


async def test_a_router_that_goes_away_costs_an_opening(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client:
        await client.say(OPEN)
        waiting = asyncio.create_task(client.next())
        pair[0].sessions[0].events.put(AWAY)
        await until(lambda: pair[1].sessions)
        client.said.put_nowait(CLOSE)
        closed = await waiting
        assert closed is not None
        assert closed.closed.released
    assert pair[1].sessions[0].opening == pair[0].sessions[0].opening
    assert pair[1].sessions[0].closed


async def test_what_one_router_refuses_another_may_take(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    pair[0].refusals.append(Failure(Reason.ERROR_REASON_OVERLOADED, "too many sessions"))
    async with client_of(sessions) as client:
        assert await client.say(OPEN)
    assert len(pair[1].sessions) == 1


async def test_when_all_refuse_the_last_ones_word_counts(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    for router in pair:
        router.refusals.append(Failure(Reason.ERROR_REASON_OVERLOADED, "too many sessions"))
    async with client_of(sessions) as client:
        assert (await refusal(client, OPEN)).reason == Reason.ERROR_REASON_OVERLOADED


async def test_what_no_router_will_take_is_refused_at_once(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    pair[0].refusals.append(Failure(Reason.ERROR_REASON_UNAUTHENTICATED, "who is it"))
    async with client_of(sessions) as client:
        assert (await refusal(client, OPEN)).reason == Reason.ERROR_REASON_UNAUTHENTICATED
    assert not held_by(pair)


async def test_a_token_withdrawn_ends_the_session(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client:
        await client.say(OPEN)
        pair[0].sessions[0].events.put(Failure(Reason.ERROR_REASON_UNAUTHENTICATED, "no more"))
        with pytest.raises(Failure) as caught:
            await client.next()
    assert caught.value.reason == Reason.ERROR_REASON_UNAUTHENTICATED
    assert not pair[1].sessions


async def test_a_close_while_no_stream_is_open_lets_go_all_the_same(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client:
        await client.say(OPEN)
        waiting = asyncio.create_task(client.next())
        for router in pair:
            router.refusals.extend([AWAY] * 5)
        pair[0].sessions[0].events.put(AWAY)
        await until(lambda: len(pair[0].refusals) < 4)
        client.said.put_nowait(CLOSE)
        closed = await waiting
        assert closed is not None
        assert closed.closed.released
    let_go = [request for router in pair for request in router.let_go]
    assert [(one.conversation_id, one.model, one.cache_salt) for one in let_go] == [("c", "m", "s")]


async def test_a_gateway_that_goes_away_ends_its_sessions(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter]
) -> None:
    async with client_of(sessions) as client, client_of(sessions) as later:
        await client.say(OPEN)
        sessions.end()
        with pytest.raises(Failure) as caught:
            await client.next()
        assert caught.value.reason == Reason.ERROR_REASON_DRAINING
        assert (await refusal(later, OPEN)).reason == Reason.ERROR_REASON_DRAINING
    (session,) = held_by(pair)
    await until(session.ended.is_set)
    assert not session.closed


@pytest.mark.parametrize(
    ("said", "field"),
    [([CLOSE], "open"), ([None], "open"), ([OPEN, OPEN], "close"), ([Unparsable()], "request")],
    ids=["no opening", "nothing", "two openings", "no message"],
)
async def test_what_is_no_session(
    sessions: Sessions, pair: tuple[FakeRouter, FakeRouter], said: list[Any], field: str
) -> None:
    async with client_of(sessions) as client:
        for request in said[:-1]:
            await client.say(request)
        failure = await refusal(client, said[-1])
    assert (failure.reason, failure.field) == (Reason.ERROR_REASON_INVALID_FIELD, field)
    assert len(held_by(pair)) == len(said) - 1
