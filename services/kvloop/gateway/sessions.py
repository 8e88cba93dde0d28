"""ChatService's sessions: each holds one of RouterService's open, at whichever router is there.

A client that knows gateways alone keeps its conversation alive through any of them. The gateway remembers
nothing of it: a router that goes away costs an opening at another one, a gateway that goes away one at
another gateway.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from kvloop.gateway.router import Metadata, Router, failure_of
from kvloop.gateway.routers import Routers
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.servicing import check_parsed
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import router_service_pb2

_OPEN_S = 10.0
"""How long a client may take to say what its session is of, and a router to open or to close it."""
_REOPENINGS = 6
"""Rounds over all routers until a session that was open is given up; its client opens another one."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_PASSING = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
)

Request = pb.ChatServiceSessionRequest
Response = pb.ChatServiceSessionResponse
Opening = Callable[[pb.ChatSessionOpen], router_service_pb2.SessionOpen]
"""Says what a router is told; raises Failure for what is none of a session."""


class Sessions:
    """The sessions that are open at this gateway."""

    def __init__(self, routers: Routers) -> None:
        """Take the routers; they are not this object's to close."""
        self._routers = routers
        self._over = asyncio.Event()

    def end(self) -> None:
        """End all sessions, and refuse new ones: their agents open them at another gateway."""
        self._over.set()

    async def serve(
        self, requests: AsyncIterator[Any], opening: Opening, metadata: Metadata
    ) -> AsyncGenerator[Response, None]:
        """Serve one stream until its Close, or its end.

        Failures: INVALID_FIELD, DRAINING, those of opening, and those of the router's Session.
        """
        if self._over.is_set():
            raise _draining()
        over = asyncio.create_task(self._over.wait())
        asking = asyncio.create_task(_next(requests))
        held = _Held(self._routers, metadata)
        try:
            await asyncio.wait({asking, over}, timeout=_OPEN_S, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not asking.done():
                raise _draining()
            first = asking.result() if asking.done() else None
            opened = await held.open(opening(_opened_by(first)))
            yield Response(opened=opened)
            asking = asyncio.create_task(_next(requests))
            holding = held.keep()
            await asyncio.wait({asking, holding, over}, return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                holding.result()
            if not asking.done():
                raise _draining()
            request = asking.result()
            if request is None:
                return
            _check_closing(request)
            yield Response(closed=router_service_pb2.SessionClosed(released=await held.close()))
        finally:
            over.cancel()
            asking.cancel()
            held.drop()


class _Held:
    """One session at the routers."""

    def __init__(self, routers: Routers, metadata: Metadata) -> None:
        self._routers = routers
        self._metadata = metadata
        self._opening = router_service_pb2.SessionOpen()
        self._call: Any = None
        self._closing = asyncio.Event()
        self._keeping: asyncio.Task[bool] | None = None

    async def open(self, opening: router_service_pb2.SessionOpen) -> router_service_pb2.SessionOpened:
        """Open it at the first router that takes it. Raises the Failure of the last one asked."""
        self._opening = opening
        failure = _lost()
        for router in self._routers.in_turn():
            try:
                return await self._open_at(router)
            except Failure as failed:
                failure = failed
                if failure.code not in _PASSING:
                    break
        raise failure

    def keep(self) -> "asyncio.Task[bool]":
        """Return the task that keeps it open; it ends with its close, or with the Failure that ended it."""
        self._keeping = asyncio.create_task(self._keep())
        return self._keeping

    async def close(self) -> bool:
        """Close it, and return whether anything was let go of. Raises Failure."""
        assert self._keeping is not None
        self._closing.set()
        # A stream that is broken just then shows where it is read.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(router_service_pb2.SessionRequest(close=router_service_pb2.SessionClose()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPEN_S):
                return await self._keeping
        return await self._end()

    def drop(self) -> None:
        """Let it lapse, if it is still open. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._call is not None:
            self._call.cancel()

    async def _keep(self) -> bool:
        while True:
            failure = _lost()
            try:
                answer = await self._call.read()
                if isinstance(answer, router_service_pb2.SessionResponse) and answer.HasField("closed"):
                    return answer.closed.released
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
            if not self._closing.is_set():
                if failure.code not in _PASSING:
                    raise failure
                await self._open_again(failure)
            if self._closing.is_set():
                return await self._end()

    async def _open_again(self, failure: Failure) -> None:
        """Open it anew. Raises Failure when no router takes it; returns early when it is to be closed."""
        pause_s = 0.0
        for _ in range(_REOPENINGS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            if self._closing.is_set():
                return
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
            try:
                await self.open(self._opening)
                return
            except Failure as later:
                failure = later
                if failure.code not in _PASSING:
                    break
        raise failure

    async def _open_at(self, router: Router) -> router_service_pb2.SessionOpened:
        if self._call is not None:
            self._call.cancel()
        self._call = call = router.stub.Session(metadata=self._metadata)
        try:
            async with asyncio.timeout(_OPEN_S):
                await call.write(router_service_pb2.SessionRequest(open=self._opening))
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None
        except (asyncio.InvalidStateError, TimeoutError):
            raise _lost() from None
        if not isinstance(answer, router_service_pb2.SessionResponse) or not answer.HasField("opened"):
            raise _lost()
        return answer.opened

    async def _end(self) -> bool:
        """Let go of what is held without a stream. Raises Failure."""
        opening = self._opening
        return await self._routers.end_conversation(
            router_service_pb2.EndConversationRequest(
                conversation_id=opening.conversation_id,
                model=opening.model,
                adapter=opening.adapter,
                cache_salt=opening.cache_salt,
            ),
            timeout_s=_OPEN_S,
            metadata=self._metadata,
        )


async def _next(requests: AsyncIterator[Any]) -> Any:
    """Return the next request, None after the last."""
    async for request in requests:
        check_parsed(request)
        return request
    return None


def _opened_by(request: object) -> pb.ChatSessionOpen:
    if not isinstance(request, Request) or request.WhichOneof("request") != "open":
        raise invalid("open", f"must be what a session begins with, within {_OPEN_S:.0f} s")
    return request.open


def _check_closing(request: object) -> None:
    if not isinstance(request, Request) or request.WhichOneof("request") != "close":
        raise invalid("close", "is all that an open session takes")


def _lost() -> Failure:
    return Failure(Reason.ERROR_REASON_DRAINING, "no router holds the session", retry_after_s=0.1)


def _draining() -> Failure:
    return Failure(Reason.ERROR_REASON_DRAINING, "this gateway is going away; use another", retry_after_s=0.1)
