"""The routers that serve turns: taken in turn, the next one when one is away.

The turns at a router share one stream; a router that has no such stream gets a call per turn.

A turn moves to another router only before its first answer, and only when the one asked could not have
started it for good: it does not answer, or it says that it is going away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.runtime.errors import Failure, Reason, from_rpc_error, from_status, unexplained
from kvloop.runtime.mux.caller import Caller, CallFailed
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc

if TYPE_CHECKING:
    from kvloop.v1alpha1 import errors_pb2

_HEALTH_TIMEOUT_S = 1.0

Metadata = tuple[tuple[str, str], ...]

# Reasons for statuses that carry none of kvloop's own.
_FALLBACK = {
    "DEADLINE_EXCEEDED": Reason.ERROR_REASON_DEADLINE_EXCEEDED,
    "UNAUTHENTICATED": Reason.ERROR_REASON_UNAUTHENTICATED,
    "UNAVAILABLE": Reason.ERROR_REASON_DRAINING,
    "RESOURCE_EXHAUSTED": Reason.ERROR_REASON_OVERLOADED,
    "INVALID_ARGUMENT": Reason.ERROR_REASON_INVALID_FIELD,
}
_RETRY_AFTER_S = 1.0


class _NoSuchStream(Exception):
    """A router that has no Attach."""


class _Router:
    """One router."""

    def __init__(self, endpoint: str, security: Security) -> None:
        self.channel = security.channel(endpoint)
        # mypy-protobuf's stub answers a union of sync and async calls.
        self.stub: Any = router_service_pb2_grpc.RouterServiceStub(self.channel)
        self._caller = Caller(
            self.stub.Attach, router_service_pb2.RouterServiceAttachRequest, _carried_failure
        )
        self._attach = True
        """Whether it has the stream, as far as is known."""

    async def generate(
        self, request: router_service_pb2.GenerateRequest, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[router_service_pb2.GenerateResponse, None]:
        """Serve one turn. Raises Failure; closing cancels."""
        if self._attach:
            try:
                async with aclosing(
                    self._caller.call(request.SerializeToString(), timeout_s, metadata)
                ) as answers:
                    async for raw in answers:
                        yield router_service_pb2.GenerateResponse.FromString(raw)
                return
            except _NoSuchStream:
                self._attach = False
        call = self.stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None
        finally:
            # A call that has ended by itself takes no notice.
            call.cancel()

    async def close(self) -> None:
        """Close the connection; what goes on over it ends."""
        await self._caller.close()
        await self.channel.close()


class Routers:
    """Connections to the routers of one fleet."""

    def __init__(self, endpoints: Sequence[str], security: Security = PLAIN) -> None:
        """Take host:port of each; connects on first use."""
        self._endpoints = tuple(endpoints)
        self._security = security
        self._routers: list[_Router] = []
        self._next = 0

    async def start(self) -> None:
        """Make the channels, on the loop that will use them."""
        self._routers = [_Router(endpoint, self._security) for endpoint in self._endpoints]

    async def stop(self) -> None:
        """Close the connections; running turns end with a failure."""
        await asyncio.gather(*(router.close() for router in self._routers))
        self._routers = []

    async def generate(
        self, request: router_service_pb2.GenerateRequest, *, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[router_service_pb2.GenerateResponse, None]:
        """Serve one turn. Raises Failure. Closing the iterator cancels the turn.

        A stream that ends without a summary is a failure too: the answer is not complete.
        """
        deadline = time.monotonic() + timeout_s
        first = self._next
        self._next = (self._next + 1) % max(1, len(self._routers))
        for attempt in range(len(self._routers)):
            router = self._routers[(first + attempt) % len(self._routers)]
            left = max(0.001, deadline - time.monotonic())
            begun = ended = False
            try:
                async with aclosing(router.generate(request, left, metadata)) as answers:
                    async for response in answers:
                        begun = True
                        ended = response.HasField("summary")
                        yield response
            except Failure as failure:
                if begun or attempt + 1 == len(self._routers) or not _may_move(failure):
                    raise
                continue
            if not ended:
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the answer broke off")
            return

    def __len__(self) -> int:
        """Return how many routers there are."""
        return len(self._routers)

    def session(self, metadata: Metadata) -> Any:
        """Return a call of Session at the next router, with nothing said on it yet."""
        return self._take().Session(metadata=metadata)

    async def end_conversation(
        self, request: router_service_pb2.EndConversationRequest, *, timeout_s: float, metadata: Metadata
    ) -> bool:
        """Let go of what is held for a conversation; False when nothing was. Raises Failure."""
        for left in reversed(range(len(self._routers))):
            try:
                answer = await self._take().EndConversation(request, timeout=timeout_s, metadata=metadata)
                return bool(answer.released)
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
                if not left or not _may_move(failure):
                    raise failure from None
        raise Failure(Reason.ERROR_REASON_DRAINING, "there is no router", retry_after_s=_RETRY_AFTER_S)

    def _take(self) -> Any:
        """Return the next router's stub."""
        stub = self._routers[self._next % len(self._routers)].stub
        self._next = (self._next + 1) % len(self._routers)
        return stub

    async def ready(self) -> bool:
        """Return whether some router says that it can serve turns."""
        checks = [asyncio.create_task(_serving(router.channel)) for router in self._routers]
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
    return _patient(from_rpc_error(error, _reason(error.code().name)))


def _carried_failure(failed: CallFailed) -> Exception:
    """Return the same of a call that shared a stream."""
    if failed.code == "UNIMPLEMENTED":
        return _NoSuchStream()
    if failed.status is None:
        return _patient(unexplained(failed.code, _reason(failed.code)))
    return _patient(from_status(failed.status, _reason(code_pb2.Code.Name(failed.status.code))))


def _reason(code: str) -> "errors_pb2.ErrorReason.ValueType":
    return _FALLBACK.get(code, Reason.ERROR_REASON_INTERNAL)


def _patient(failure: Failure) -> Failure:
    """Return a failure that says when to come again, if waiting helps."""
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
