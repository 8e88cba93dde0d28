"""One router: its connection, and the streams that carry turns to it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.runtime.errors import Failure, Reason, code_of, from_rpc_error, from_status, unexplained
from kvloop.runtime.mux.caller import Caller, CallFailed
from kvloop.runtime.security import Security
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc

if TYPE_CHECKING:
    from kvloop.v1alpha1 import errors_pb2

Metadata = tuple[tuple[str, str], ...]

RETRY_AFTER_S = 1.0
_HEALTH_TIMEOUT_S = 1.0

# Reasons for statuses that carry none of kvloop's own.
_FALLBACK = {
    "DEADLINE_EXCEEDED": Reason.ERROR_REASON_DEADLINE_EXCEEDED,
    "UNAUTHENTICATED": Reason.ERROR_REASON_UNAUTHENTICATED,
    "UNAVAILABLE": Reason.ERROR_REASON_DRAINING,
    "RESOURCE_EXHAUSTED": Reason.ERROR_REASON_OVERLOADED,
    "INVALID_ARGUMENT": Reason.ERROR_REASON_INVALID_FIELD,
}


class _NoSuchStream(Exception):
    """A router that has no Attach."""


class _StreamBroke(Failure):
    """A stream that ended under its calls."""


class Router:
    """One router."""

    def __init__(self, address: str, security: Security, name: str, streams: int) -> None:
        self._channel = security.channel(address, name)
        # mypy-protobuf's stub answers a union of sync and async calls.
        self.stub: Any = router_service_pb2_grpc.RouterServiceStub(self._channel)
        self._callers = deque(
            Caller(self.stub.Attach, router_service_pb2.RouterServiceAttachRequest, _carried_failure)
            for _ in range(streams)
        )
        self._attach: bool | None = None
        """Whether it has the stream; None while nothing has come over one."""
        self._turns = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(
        self, request: router_service_pb2.GenerateRequest, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[router_service_pb2.GenerateResponse, None]:
        """Serve one turn. Raises Failure; closing cancels."""
        self._turns += 1
        self._idle.clear()
        try:
            if self._attach is not False:
                try:
                    async with aclosing(self._carried(request, timeout_s, metadata)) as answers:
                        async for raw in answers:
                            self._attach = True
                            yield router_service_pb2.GenerateResponse.FromString(raw)
                    return
                except _NoSuchStream:
                    self._attach = False
                except _StreamBroke:
                    # Where there is no such stream, it may also look as if it had broken.
                    if self._attach:
                        raise
            call = self.stub.Generate(request, timeout=timeout_s, metadata=metadata)
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                raise failure_of(error) from None
            finally:
                # A call that has ended by itself takes no notice.
                call.cancel()
        finally:
            self._turns -= 1
            if not self._turns:
                self._idle.set()

    async def _carried(
        self, request: router_service_pb2.GenerateRequest, timeout_s: float, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        caller = self._callers[0]
        self._callers.rotate(-1)
        stream = caller.stream
        try:
            async with aclosing(caller.call(request.SerializeToString(), timeout_s, metadata)) as answers:
                async for raw in answers:
                    yield raw
        except Failure as failure:
            if may_move(failure):
                # Behind a balancer, the next stream leads to a router that stays.
                caller.renew(stream)
            raise

    async def ready(self) -> bool:
        """Return whether it says that it can serve turns."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def leave(self) -> None:
        """Close the connection once the turns over it are over."""
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection; what goes on over it ends."""
        await asyncio.gather(*(caller.close() for caller in self._callers))
        await self._channel.close()


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """Return what a router's status says, with a reason also where it names none."""
    return _patient(from_rpc_error(error, _reason(code_of(error).name)))


def may_move(failure: Failure) -> bool:
    """Tell whether another router may serve what one failed of: it is away, or goes away."""
    return failure.reason == Reason.ERROR_REASON_DRAINING


def _carried_failure(failed: CallFailed) -> Exception:
    """Return the same of a call that shared a stream."""
    if failed.code == "UNIMPLEMENTED":
        return _NoSuchStream()
    if failed.status is None:
        kind = _StreamBroke if failed.code == "UNAVAILABLE" else Failure
        told = unexplained(failed.code, _reason(failed.code))
        return _patient(kind(told.reason, told.message))
    return _patient(from_status(failed.status, _reason(code_pb2.Code.Name(failed.status.code))))


def _reason(code: str) -> "errors_pb2.ErrorReason.ValueType":
    return _FALLBACK.get(code, Reason.ERROR_REASON_INTERNAL)


def _patient(failure: Failure) -> Failure:
    """Return a failure that says when to come again, if waiting helps."""
    waiting_helps = failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    if failure.retry_after_s is None and waiting_helps:
        failure.retry_after_s = RETRY_AFTER_S
    return failure
