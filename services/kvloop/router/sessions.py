"""Sessions: while an agent holds one open, its conversation counts as alive.

A session is a stream and nothing else: its router keeps the alive key in the directory, several times per
TTL, and remembers nothing once the stream is over. Any router may keep any conversation alive, turns go to
any router, and decode workers ask the directory before a lease ends. A directory that is away fails no
session: the key is written again at the next beat.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvloop.metastore.port import DirectoryUnavailable
from kvloop.router import conversations
from kvloop.router.turn import Tools
from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.servicing import check_parsed
from kvloop.v1alpha1 import router_service_pb2

_OPEN_S = 10.0
"""How long a client may take to say what its session is of."""
_BEATS_PER_TTL = 3

Request = router_service_pb2.SessionRequest
Response = router_service_pb2.SessionResponse

_log = logs.get("router")


class Sessions:
    """The sessions that are open at this router."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._ttl_s = tools.settings.session_alive_s
        self._open = 0
        self._over = asyncio.Event()

    def __len__(self) -> int:
        """Return how many sessions are open."""
        return self._open

    def end(self) -> None:
        """End all sessions, and refuse new ones: their agents open them at another router."""
        self._over.set()

    async def serve(self, requests: AsyncIterator[Any], tenant: Callable[[], str]) -> AsyncIterator[Response]:
        """Serve one stream until its Close, or its end.

        tenant: asked again at every beat, so that a token that was withdrawn keeps nothing alive. Failures:
        DRAINING, OVERLOADED, UNAUTHENTICATED, INVALID_FIELD, MODEL_NOT_FOUND, NO_WORKER, and of a Close
        those of EndConversation.
        """
        if self._over.is_set():
            raise _draining()
        settings = self._tools.settings
        if self._open >= settings.max_sessions:
            raise Failure(
                Reason.ERROR_REASON_OVERLOADED,
                "too many sessions at once",
                metadata={"limit": str(settings.max_sessions)},
                retry_after_s=settings.retry_after_ms / 1000,
            )
        tenant()
        self._open += 1
        try:
            async for response in self._serve(_Waiting(requests, self._over), tenant):
                yield response
        finally:
            self._open -= 1

    async def _serve(self, waiting: "_Waiting", tenant: Callable[[], str]) -> AsyncIterator[Response]:
        try:
            opened = _opening(await waiting.next(_OPEN_S))
            conversation = conversations.of(opened, tenant(), self._tools)
            await self._beat(conversation)
            response = Response()
            response.opened.alive_time.FromMilliseconds(int(self._ttl_s * 1000))
            yield response
            while (request := await waiting.next(self._pause_s())) is not END:
                if request is None:
                    conversation = self._again(opened, tenant(), conversation)
                    await self._beat(conversation)
                    continue
                _check_closing(request)
                released = await conversations.release(conversation, self._tools)
                yield Response(closed=router_service_pb2.SessionClosed(released=released))
                return
        except _Over:
            raise _draining() from None
        finally:
            waiting.close()

    def _again(
        self,
        opened: router_service_pb2.SessionOpen,
        tenant: str,
        before: conversations.Conversation,
    ) -> conversations.Conversation:
        """Return the conversation's scopes as they are now: a model may be served in another revision."""
        try:
            return conversations.of(opened, tenant, self._tools)
        except Failure:
            return before

    async def _beat(self, conversation: conversations.Conversation) -> None:
        for scope in conversation.scopes:
            try:
                await self._tools.directory.set_alive(scope, self._ttl_s)
            except DirectoryUnavailable as error:
                _log.debug("session_not_kept", outage=str(error))

    def _pause_s(self) -> float:
        # Spread, so that sessions opened together don't beat together.
        return self._ttl_s / _BEATS_PER_TTL * random.uniform(0.7, 1.0)


class _End:
    """Stands for the end of the client's requests."""


END = _End()


class _Over(Exception):
    """The router ends its sessions."""


class _Waiting:
    """A client's requests, waited for with a limit, and not past the router's end."""

    def __init__(self, requests: AsyncIterator[Any], over: asyncio.Event) -> None:
        self._requests = requests
        self._next: asyncio.Task[Any] | None = None
        self._ending = asyncio.create_task(over.wait())

    async def next(self, limit_s: float) -> Request | _End | None:
        """Return the next request, END after the last, None when there is none in time."""
        if self._next is None:
            self._next = asyncio.create_task(_next(self._requests))
        done, _ = await asyncio.wait(
            {self._next, self._ending}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._next in done:
            request, self._next = self._next.result(), None
            check_parsed(request)
            return request  # type: ignore[no-any-return]
        if done:
            raise _Over
        return None

    def close(self) -> None:
        """Wait no more."""
        self._ending.cancel()
        if self._next is not None:
            self._next.cancel()


async def _next(requests: AsyncIterator[Any]) -> Any:
    async for request in requests:
        return request
    return END


def _opening(request: Request | _End | None) -> router_service_pb2.SessionOpen:
    if not isinstance(request, Request) or request.WhichOneof("request") != "open":
        raise invalid("open", f"must be what a session begins with, within {_OPEN_S:.0f} s")
    return request.open


def _check_closing(request: object) -> None:
    if not isinstance(request, Request) or request.WhichOneof("request") != "close":
        raise invalid("close", "is all that an open session takes")


def _draining() -> Failure:
    return Failure(Reason.ERROR_REASON_DRAINING, "this router is going away; use another", retry_after_s=0.1)
