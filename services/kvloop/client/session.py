"""Sessions: a conversation's KV is held for as long as its agent is there."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from kvloop.client.errors import CallFailed, failed
from kvloop.client.events import Event
from kvloop.client.options import TurnOptions
from kvloop.client.retry import is_final
from kvloop.v1alpha1 import router_service_pb2

if TYPE_CHECKING:
    from kvloop.client.client import Client
    from kvloop.client.routers import Router

_OPEN_S = 10.0
_CLOSE_S = 10.0


class Session:
    """A conversation with an agent there. Leaving it lets go at once of what is held.

    Leaving it by an exception lets go of nothing: what is held stays for its time, so that whoever starts the
    agent again finds it. A stream that breaks is opened again, at another router when there is one; turns
    don't depend on it.
    """

    def __init__(self, client: "Client", opening: router_service_pb2.SessionOpen) -> None:
        """Use Client.session."""
        self._client = client
        self._opening = opening
        self._opened: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[bool | None] | None = None
        self._streams = 0

    @property
    def conversation_id(self) -> str:
        """Return the conversation's name."""
        return self._opening.conversation_id

    @property
    def streams(self) -> int:
        """Return how many streams have been opened: 1, and one more each time that one broke."""
        return self._streams

    async def __aenter__(self) -> Self:
        """Open the session. Raises CallFailed."""
        self._opened = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(self._opened))
        try:
            awaited: set[asyncio.Future[Any]] = {self._opened, self._holding}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not self._opened.done():
                raise _outcome(self._holding) or _given_up()
            await self._opened
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session, or leave it as it is when something went wrong. Raises CallFailed."""
        if kind is None:
            await self.close()
        else:
            await self._abandon()

    async def turn(
        self, prompt_ids: Sequence[int], **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Event, None]:
        """Serve one turn of this conversation, as Client.turn does. Raises CallFailed."""
        opening = self._opening
        events = self._client.turn(
            prompt_ids,
            conversation_id=opening.conversation_id,
            model=opening.model,
            adapter=opening.adapter,
            cache_salt=opening.cache_salt,
            **options,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    async def close(self) -> bool:
        """Let go of what is held and end the session; False when nothing was held. Raises CallFailed."""
        if self._holding is None:
            return False
        holding, self._holding = self._holding, None
        self._closing.set()
        try:
            await asyncio.wait({holding}, timeout=_CLOSE_S)
        finally:
            holding.cancel()
        released: bool | None = None
        if holding.done():
            error = _outcome(holding)
            if error is None:
                released = holding.result()
            elif not isinstance(error, CallFailed):
                raise error
        if released is not None:
            return released
        # The stream was broken just then; any router can let go.
        opening = self._opening
        return await self._client.end(
            opening.conversation_id,
            model=opening.model,
            adapter=opening.adapter,
            cache_salt=opening.cache_salt,
        )

    async def _abandon(self) -> None:
        if self._holding is not None:
            holding, self._holding = self._holding, None
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def _hold(self, opened: "asyncio.Future[None]") -> bool | None:
        """Keep a stream open until the session is closed; return what its close released, None if unknown."""
        retry, tries = self._client.retry, 0
        while not self._closing.is_set():
            router = self._client.routers.used
            streams = self._streams
            try:
                return await self._stream(router, opened)
            except CallFailed as failure:
                tries = 1 if self._streams > streams else tries + 1
                self._client.routers.leave(router)
                if not opened.done() and (is_final(failure) or tries >= max(retry.attempts, 1)):
                    opened.set_exception(failure)
                    return None
                if is_final(failure):
                    raise
                pause_s = 0.0 if tries < len(self._client.routers) else retry.pause_s(failure, min(tries, 10))
                await _wait(self._closing, pause_s)
        return None

    async def _stream(self, router: "Router", opened: "asyncio.Future[None]") -> bool:
        call = router.stub.Session(metadata=self._client.metadata)
        try:
            async with asyncio.timeout(_OPEN_S):
                await call.write(router_service_pb2.SessionRequest(open=self._opening))
                _said(await call.read(), "opened", router)
            self._streams += 1
            if not opened.done():
                opened.set_result(None)
            return await self._until_closed(call, router)
        except TimeoutError:
            raise CallFailed(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the session was not opened in time", target=router.target
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                raise failed(error, router.target) from None
            raise _ended(router) from None
        finally:
            call.cancel()

    async def _until_closed(self, call: Any, router: "Router") -> bool:
        reading = asyncio.create_task(call.read())
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await call.write(router_service_pb2.SessionRequest(close=router_service_pb2.SessionClose()))
            response = _said(await reading, "closed", router)
            return response.closed.released
        finally:
            reading.cancel()
            closing.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)


def _outcome(holding: "asyncio.Task[bool | None]") -> BaseException | None:
    """Return what a task that is done has failed with."""
    # A client that is closed cancels its calls, and with them whoever waits for one.
    return _given_up() if holding.cancelled() else holding.exception()


def _given_up() -> CallFailed:
    return CallFailed(grpc.StatusCode.CANCELLED, "the session was given up", target="")


def _said(response: Any, event: str, router: "Router") -> router_service_pb2.SessionResponse:
    if not isinstance(response, router_service_pb2.SessionResponse) or response.WhichOneof("event") != event:
        raise _ended(router)
    return response


def _ended(router: "Router") -> CallFailed:
    return CallFailed(grpc.StatusCode.UNAVAILABLE, "the session's stream ended", target=router.target)


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({waiting}, timeout=limit_s)
    waiting.cancel()
