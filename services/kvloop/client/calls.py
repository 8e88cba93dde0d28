"""What clients of routers and of gateways have in common: connections, and calls that are tried again."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvloop.client.errors import CallFailed, failed
from kvloop.client.retry import PATIENT, RetryPolicy, is_away, is_passing
from kvloop.client.routers import Router, Routers

A = TypeVar("A")


class Calls:
    """Connections to one fleet. One instance serves any number of calls at once, on one event loop."""

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        token: str | None = None,
        tls: bool | grpc.ChannelCredentials = False,
        tls_server_name: str = "",
        retry: RetryPolicy = PATIENT,
        timeout_s: float = 600.0,
        call_timeout_s: float = 10.0,
    ) -> None:
        """Connects on first use.

        target: host:port of a router or gateway, or of several, of which one is used until it fails.
        token: the tenant's.
        tls: True trusts the system's roots; for others, or a certificate of one's own, give
        grpc.ssl_channel_credentials(...). tls_server_name: whose certificate it shows, if not the target's.
        timeout_s: of a turn, its retries included; call_timeout_s: of any other call.
        """
        targets = (target,) if isinstance(target, str) else tuple(target)
        credentials = (grpc.ssl_channel_credentials() if tls else None) if isinstance(tls, bool) else tls
        self.routers = Routers(targets, credentials, tls_server_name)
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.retry = retry
        self._timeout_s = timeout_s
        self._call_timeout_s = call_timeout_s

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """Close connections; what is under way is cancelled. Idempotent."""
        await self.routers.close()

    async def answer(
        self, attempt: Callable[[Router, float], AsyncGenerator[A, None]], timeout_s: float | None
    ) -> AsyncGenerator[A, None]:
        """Yield what an attempt at a router yields, up to a deadline; try again what may pass before that.

        timeout_s: None: the client's own. Raises CallFailed.
        """
        deadline = now() + (self._timeout_s if timeout_s is None else timeout_s)
        tries = 0
        while True:
            router, begun = self.routers.used, False
            tries += 1
            try:
                async with aclosing(attempt(router, deadline)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except CallFailed as failure:
                if begun:
                    raise
                await self._before_retrying(failure, router, tries, deadline)

    async def ask(self, call: Callable[[Router, float], Awaitable[A]]) -> A:
        """Return what a unary call answers, given a router and the seconds left. Raises CallFailed."""
        deadline, tries = now() + self._call_timeout_s, 0
        while True:
            router = self.routers.used
            tries += 1
            try:
                return await call(router, deadline - now())
            except grpc.aio.AioRpcError as error:
                await self._before_retrying(failed(error, router.target), router, tries, deadline)

    async def _before_retrying(
        self, failure: CallFailed, router: Router, tries: int, deadline: float
    ) -> None:
        """Wait for the time of the next try; raise the failure when there is to be none."""
        away = is_away(failure)
        if away:
            self.routers.leave(router)
        if not is_passing(failure) or tries >= self.retry.attempts:
            raise failure
        if away and tries < len(self.routers):
            return
        pause_s = self.retry.pause_s(failure, tries)
        if now() + pause_s >= deadline:
            raise failure
        await asyncio.sleep(pause_s)


def now() -> float:
    """Return the time of deadlines, in seconds."""
    return asyncio.get_running_loop().time()
