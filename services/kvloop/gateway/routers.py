"""The routers that serve turns: taken in turn, the next one when one is away.

Turns at a router share streams; a router that has no such stream gets a call per turn. A turn moves to
another router only before its first answer, and only when the one asked could not have started it for good:
it does not answer, or it says that it is going away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc

from kvloop.gateway.router import RETRY_AFTER_S, Metadata, Router, failure_of, may_move
from kvloop.runtime import background, endpoints
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.resolving import RESOLVE_EVERY_S, addresses
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1 import router_service_pb2


class Routers:
    """Connections to the routers of one fleet."""

    def __init__(self, endpoints: Sequence[str], security: Security = PLAIN, streams: int = 1) -> None:
        """Take host:port of each, and how many streams carry turns to each; connects on first use."""
        self._endpoints = tuple(endpoints)
        self._security = security
        self._streams = streams
        self._behind: dict[str, dict[str, Router]] = {}
        """The routers behind each endpoint, by address."""
        self._next = 0
        self._following: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Make the channels, on the loop that will use them, and follow who is behind the names."""
        self._behind = {endpoint: {endpoint: self._router(endpoint, "")} for endpoint in self._endpoints}
        await self._resolve()
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Close the connections; running turns end with a failure."""
        tasks = [*self._leaving, *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(router.close() for router in self._all()))
        self._behind, self._following = {}, None

    async def generate(
        self, request: router_service_pb2.GenerateRequest, *, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[router_service_pb2.GenerateResponse, None]:
        """Serve one turn. Raises Failure. Closing the iterator cancels the turn.

        A stream that ends without a summary is a failure too: the answer is not complete.
        """
        deadline = time.monotonic() + timeout_s
        failure = _nobody()
        for router in self.in_turn():
            left = max(0.001, deadline - time.monotonic())
            begun = ended = False
            try:
                async with aclosing(router.generate(request, left, metadata)) as answers:
                    async for response in answers:
                        begun = True
                        ended = response.HasField("summary")
                        yield response
            except Failure as failed:
                if begun or not may_move(failed):
                    raise
                failure = failed
                continue
            if not ended:
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the answer broke off")
            return
        raise failure

    async def end_conversation(
        self, request: router_service_pb2.EndConversationRequest, *, timeout_s: float, metadata: Metadata
    ) -> bool:
        """Let go of what is held for a conversation; False when nothing was. Raises Failure."""
        failure = _nobody()
        for router in self.in_turn():
            try:
                answer = await router.stub.EndConversation(request, timeout=timeout_s, metadata=metadata)
                return bool(answer.released)
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
                if not may_move(failure):
                    raise failure from None
        raise failure

    def in_turn(self) -> tuple[Router, ...]:
        """Return the routers in the order in which one call asks them; the next call begins with the second.

        A single one is there twice: behind its address a balancer may have others.
        """
        routers = self._all()
        if len(routers) == 1:
            return routers * 2
        first = self._next % max(1, len(routers))
        self._next = first + 1
        return routers[first:] + routers[:first]

    async def ready(self) -> bool:
        """Return whether some router says that it can serve turns."""
        checks = [asyncio.create_task(router.ready()) for router in self._all()]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()

    def _all(self) -> tuple[Router, ...]:
        return tuple(router for behind in self._behind.values() for router in behind.values())

    def _router(self, address: str, name: str) -> Router:
        return Router(address, self._security, name, self._streams)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Meet the routers that are new behind a name, and leave those that are there no more."""
        for endpoint in self._endpoints:
            found = await addresses(endpoint)
            if not found:
                continue
            name, former = endpoints.parse(endpoint).host, self._behind[endpoint]
            known = {address: former.get(address) or self._router(address, name) for address in found}
            self._behind[endpoint] = known
            for gone in (router for address, router in former.items() if address not in known):
                background.spawn(self._leaving, gone.leave())


def _nobody() -> Failure:
    return Failure(Reason.ERROR_REASON_DRAINING, "there is no router", retry_after_s=RETRY_AFTER_S)
