"""The client: turns and conversations, and tries of them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from kvloop.client.errors import CallFailed, broken_off, failed
from kvloop.client.events import Event, event_of
from kvloop.client.options import TurnOptions, generate_request
from kvloop.client.retry import PATIENT, RetryPolicy, is_away, is_passing
from kvloop.client.routers import Router, Routers
from kvloop.client.session import Session
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

if TYPE_CHECKING:
    from kvloop.client.routers import Stub

A = TypeVar("A")


class Client:
    """A client of one fleet's routers. One instance serves any number of turns at once, on one event loop."""

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

        target: host:port of a router, or of several, of which one is used until it fails.
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

    async def turn(
        self,
        prompt_ids: Sequence[int],
        *,
        conversation_id: str = "",
        model: str = "",
        adapter: str = "",
        cache_salt: str = "",
        **options: Unpack[TurnOptions],
    ) -> AsyncGenerator[Event, None]:
        """Serve one turn: yield the answer as it comes, and its summary last. Closing early cancels.

        prompt_ids: the whole history. conversation_id: under which KV is found and kept; "" for neither.

        Raises CallFailed. Once tokens have come, a failure is final: to go on, send the prompt with the
        tokens so far.
        """
        request = generate_request(prompt_ids, options)
        request.conversation_id = conversation_id
        request.model = model
        request.adapter = adapter
        request.cache_salt = cache_salt
        deadline = _now() + options.get("timeout_s", self._timeout_s)
        tries = 0
        while True:
            router, begun = self.routers.used, False
            tries += 1
            try:
                async with aclosing(self._attempt(router, request, deadline)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except CallFailed as failure:
                if begun:
                    raise
                await self._before_retrying(failure, router, tries, deadline)

    def session(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> Session:
        """Return a session to be entered with `async with`: meanwhile what is held is held on."""
        return Session(
            self,
            router_service_pb2.SessionOpen(
                conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
            ),
        )

    async def end(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> bool:
        """Let go of what is held for a conversation; False when nothing was. Raises CallFailed."""
        request = router_service_pb2.EndConversationRequest(
            conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
        )
        answer = await self._call(
            lambda stub, left_s: stub.EndConversation(request, timeout=left_s, metadata=self.metadata)
        )
        return answer.released

    async def get(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> turn_pb2.LeaseInfo | None:
        """Return what is held for a conversation, or None. Raises CallFailed."""
        request = router_service_pb2.GetConversationRequest(
            conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
        )
        try:
            answer = await self._call(
                lambda stub, left_s: stub.GetConversation(request, timeout=left_s, metadata=self.metadata)
            )
        except CallFailed as failure:
            if failure.reason == "CONVERSATION_NOT_FOUND":
                return None
            raise
        return answer.lease

    async def explain(self, request_id: str) -> router_service_pb2.ExplainTurnResponse:
        """Return why a recent turn of the router in use went the way it went. Raises CallFailed."""
        request = router_service_pb2.ExplainTurnRequest(request_id=request_id)
        return await self._call(
            lambda stub, left_s: stub.ExplainTurn(request, timeout=left_s, metadata=self.metadata)
        )

    async def _attempt(
        self, router: Router, request: router_service_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[Event, None]:
        call = router.stub.Generate(request, timeout=deadline - _now(), metadata=self.metadata)
        ended = False
        try:
            async for response in call:
                ended = response.HasField("summary")
                yield event_of(response)
        except grpc.aio.AioRpcError as error:
            raise failed(error, router.target) from None
        finally:
            call.cancel()
        if not ended:
            raise broken_off(router.target)

    async def _call(self, ask: "Callable[[Stub, float], Awaitable[A]]") -> A:
        deadline, tries = _now() + self._call_timeout_s, 0
        while True:
            router = self.routers.used
            tries += 1
            try:
                return await ask(router.stub, deadline - _now())
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
        if _now() + pause_s >= deadline:
            raise failure
        await asyncio.sleep(pause_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
