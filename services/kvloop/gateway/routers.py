"""The routers that serve turns: one channel each, taken in turn, the next one when one is away.

A turn moves to another router only before its first answer, and only when the one asked could not have
started it for good: it does not answer, or it says that it is going away.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc

_HEALTH_TIMEOUT_S = 1.0

Metadata = tuple[tuple[str, str], ...]

# Reasons for statuses that carry none of kvloop's own.
_FALLBACK = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.ERROR_REASON_DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAUTHENTICATED: Reason.ERROR_REASON_UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE: Reason.ERROR_REASON_DRAINING,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.ERROR_REASON_OVERLOADED,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.ERROR_REASON_INVALID_FIELD,
}
_RETRY_AFTER_S = 1.0


class Routers:
    """Channels to the routers of one fleet."""

    def __init__(self, endpoints: Sequence[str], security: Security = PLAIN) -> None:
        """Take host:port of each; connects on first use."""
        self._endpoints = tuple(endpoints)
        self._security = security
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[router_service_pb2_grpc.RouterServiceStub] = []
        self._next = 0

    async def start(self) -> None:
        """Make the channels, on the loop that will use them."""
        self._channels = [self._security.channel(endpoint) for endpoint in self._endpoints]
        self._stubs = [router_service_pb2_grpc.RouterServiceStub(channel) for channel in self._channels]

    async def stop(self) -> None:
        """Close the channels; running turns end with CANCELLED."""
        await asyncio.gather(*(channel.close() for channel in self._channels))
        self._channels, self._stubs = [], []

    async def generate(
        self, request: router_service_pb2.GenerateRequest, *, timeout_s: float, metadata: Metadata
    ) -> AsyncIterator[router_service_pb2.GenerateResponse]:
        """Serve one turn. Raises Failure. Closing the iterator cancels the turn.

        A stream that ends without a summary is a failure too: the answer is not complete.
        """
        deadline = time.monotonic() + timeout_s
        first = self._next
        self._next = (self._next + 1) % max(1, len(self._stubs))
        for attempt in range(len(self._stubs)):
            # mypy-protobuf's stub answers a union of sync and async calls.
            stub: Any = self._stubs[(first + attempt) % len(self._stubs)]
            left = max(0.001, deadline - time.monotonic())
            call = stub.Generate(request, timeout=left, metadata=metadata)
            begun = ended = False
            try:
                async for response in call:
                    begun = True
                    ended = response.HasField("summary")
                    yield response
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
                if begun or attempt + 1 == len(self._stubs) or not _may_move(failure):
                    raise failure from None
                continue
            finally:
                # A call that has ended by itself takes no notice.
                call.cancel()
            if not ended:
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the answer broke off")
            return

    def __len__(self) -> int:
        """Return how many routers there are."""
        return len(self._stubs)

    def session(self, metadata: Metadata) -> Any:
        """Return a call of Session at the next router, with nothing said on it yet."""
        return self._take().Session(metadata=metadata)

    async def end_conversation(
        self, request: router_service_pb2.EndConversationRequest, *, timeout_s: float, metadata: Metadata
    ) -> bool:
        """Let go of what is held for a conversation; False when nothing was. Raises Failure."""
        for left in reversed(range(len(self._stubs))):
            try:
                answer = await self._take().EndConversation(request, timeout=timeout_s, metadata=metadata)
                return bool(answer.released)
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
                if not left or not _may_move(failure):
                    raise failure from None
        raise Failure(Reason.ERROR_REASON_DRAINING, "there is no router", retry_after_s=_RETRY_AFTER_S)

    def _take(self) -> Any:
        """Return the next router's stub; mypy-protobuf's answers a union of sync and async calls."""
        stub = self._stubs[self._next % len(self._stubs)]
        self._next = (self._next + 1) % len(self._stubs)
        return stub

    async def ready(self) -> bool:
        """Return whether some router says that it can serve turns."""
        checks = [asyncio.create_task(_serving(channel)) for channel in self._channels]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """Return what a router's status says, with a reason also where it names none."""
    fallback = _FALLBACK.get(error.code(), Reason.ERROR_REASON_INTERNAL)
    failure = from_rpc_error(error, fallback)
    waiting_helps = failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    if failure.retry_after_s is None and waiting_helps:
        failure.retry_after_s = _RETRY_AFTER_S
    return failure


def _may_move(failure: Failure) -> bool:
    return failure.reason == Reason.ERROR_REASON_DRAINING


async def _serving(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
