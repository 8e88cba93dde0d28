"""Calls to workers: one link per worker, one channel per link, one fresh request per attempt.

The legs of all turns share one stream per worker; workers that have no such stream get a call per leg. Steps
know only these classes. Decode answers stay serialized: a chunk has the same bytes in DecodeResponse as in
GenerateResponse (field 1), and the router forwards it without looking into it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from kvloop.runtime import tracing
from kvloop.runtime.errors import Failure, Reason, from_rpc_error, from_status, unexplained
from kvloop.runtime.mux.caller import Caller, CallFailed
from kvloop.runtime.security import PLAIN, Security
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    worker_pb2,
)

PrefillRequest = prefill_service_pb2.PrefillRequest
DecodeRequest = decode_service_pb2.DecodeRequest

PROMPT_TAG = b"\x22"
"""Ahead of the prompt's length and bytes in a serialized request of a leg."""
CHUNK_TAG = b"\x0a"
"""First byte of a serialized response whose event is a chunk."""

_PREFILL = "/kvloop.v1alpha1.PrefillService/Prefill"
_DECODE = "/kvloop.v1alpha1.DecodeService/Decode"

# What the client asked for is at fault; another worker would say the same.
_CALLER = frozenset(
    {
        Reason.ERROR_REASON_INVALID_FIELD,
        Reason.ERROR_REASON_EMPTY_PROMPT,
        Reason.ERROR_REASON_PROMPT_TOO_LONG,
        Reason.ERROR_REASON_MULTIPLE_COMPLETIONS,
        Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED,
        Reason.ERROR_REASON_MODEL_NOT_FOUND,
    }
)
# What speaks against the worker, beyond this one turn.
_WORKER = frozenset(
    {
        Reason.ERROR_REASON_WORKER_FAILED,
        Reason.ERROR_REASON_INTERNAL,
        Reason.ERROR_REASON_DRAINING,
        Reason.ERROR_REASON_NO_WORKER,
    }
)


class LegFailed(Exception):
    """A leg that did not do its work."""

    def __init__(self, failure: Failure, *, answered: bool) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.answered = answered
        """Whether the worker itself said so, and so is done with the leg; otherwise it may still be at it."""
        self.late = False
        """Whether the deadline of a question ended it."""

    @property
    def callers_fault(self) -> bool:
        """Tell whether trying again is pointless."""
        return self.failure.reason in _CALLER

    @property
    def workers_fault(self) -> bool:
        """Tell whether the worker should be left alone for a while."""
        return not self.answered or self.failure.reason in _WORKER

    @property
    def going_away(self) -> bool:
        """Tell whether the worker refused because it is about to end; then it says no time to come back."""
        failure = self.failure
        drains = self.answered and failure.reason == Reason.ERROR_REASON_DRAINING
        return drains and failure.retry_after_s is None

    @property
    def lease_missing(self) -> bool:
        """Tell whether the holder knows no such lease."""
        return self.answered and self.failure.reason == Reason.ERROR_REASON_LEASE_NOT_FOUND


def _leg_failed(error: grpc.RpcError) -> LegFailed:
    return _judged(from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED))


def _carried_leg_failed(failed: CallFailed) -> LegFailed:
    unknown = Reason.ERROR_REASON_UNSPECIFIED
    if failed.status is None:
        return _judged(unexplained(failed.code, unknown))
    return _judged(from_status(failed.status, unknown))


def _judged(failure: Failure) -> LegFailed:
    if failure.reason != Reason.ERROR_REASON_UNSPECIFIED:
        return LegFailed(failure, answered=True)
    worker = Failure(Reason.ERROR_REASON_WORKER_FAILED, f"worker failed: {failure.message}")
    return LegFailed(worker, answered=False)


def _not_told(error: grpc.aio.AioRpcError) -> LegFailed:
    failed = _leg_failed(error)
    failed.late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    return failed


def timed_out(what: str) -> LegFailed:
    """Return the failure of a worker that did not answer in the time it was given."""
    failure = Failure(Reason.ERROR_REASON_WORKER_FAILED, f"worker failed: no {what} in time")
    return LegFailed(failure, answered=False)


def whole(request: PrefillRequest | DecodeRequest, prompt: bytes) -> bytes:
    """Return a leg's request, serialized, with the prompt that it lacks.

    A prompt may be as large as all else together is small: here it is copied once, not into the message and
    out of it again. Both requests have it in field 4.
    """
    size, length = bytearray(), len(prompt)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return b"".join((request.SerializeToString(), PROMPT_TAG, size, prompt))


class PrefillLink:
    """One prefill worker."""

    def __init__(self, endpoint: str, security: Security = PLAIN, name: str = "") -> None:
        self._channel = security.channel(endpoint, name)
        self._stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(self._channel)
        self._prefill: Any = self._channel.unary_unary(_PREFILL)
        self._caller = Caller(
            self._stub.Attach,
            prefill_service_pb2.PrefillServiceAttachRequest,
            _carried_leg_failed,
            security.shown_token,
        )
        self._attach = False
        """Whether the worker has the stream, as it last said."""

    async def prefill(
        self, request: PrefillRequest, prompt: bytes, timeout_s: float
    ) -> prefill_service_pb2.PrefillResponse:
        """Run the leg; request lacks the prompt. Raises LegFailed; cancellation cancels the call."""
        if self._attach:
            return await self._carried(whole(request, prompt), timeout_s)
        try:
            raw = await self._prefill(whole(request, prompt), timeout=timeout_s, metadata=tracing.outgoing())
        except grpc.aio.AioRpcError as error:
            raise _leg_failed(error) from None
        return prefill_service_pb2.PrefillResponse.FromString(raw)

    async def _carried(self, request: bytes, timeout_s: float) -> prefill_service_pb2.PrefillResponse:
        answers: list[bytes] = []
        metadata = tracing.outgoing() or ()
        await self._caller.run(request, timeout_s, answers.append, metadata)
        if not answers:
            raise timed_out("answer")
        return prefill_service_pb2.PrefillResponse.FromString(answers[0])

    async def release(self, request_id: str, timeout_s: float) -> bool:
        """Let go of an attempt's KV. Raises LegFailed."""
        request = prefill_service_pb2.ReleasePrefillRequest(request_id=request_id)
        try:
            return bool((await self._stub.ReleasePrefill(request, timeout=timeout_s)).released)
        except grpc.aio.AioRpcError as error:
            raise _leg_failed(error) from None

    async def info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        """Return the worker's facts. Raises LegFailed."""
        request = prefill_service_pb2.PrefillServiceGetInfoRequest()
        try:
            response = await self._stub.GetInfo(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _not_told(error) from None
        info: worker_pb2.WorkerInfo = response.info
        self._attach = info.attach
        return info

    async def close(self) -> None:
        """Close the channel."""
        await self._caller.close()
        await self._channel.close()


class DecodeLink:
    """One decode worker."""

    def __init__(self, endpoint: str, security: Security = PLAIN, name: str = "") -> None:
        self._channel = security.channel(endpoint, name)
        self._stub: Any = decode_service_pb2_grpc.DecodeServiceStub(self._channel)
        # Not the stub's: requests are serialized already, and answers stay serialized.
        self._decode: Any = self._channel.unary_stream(_DECODE)
        self._caller = Caller(
            self._stub.Attach,
            decode_service_pb2.DecodeServiceAttachRequest,
            _carried_leg_failed,
            security.shown_token,
        )
        self._attach = False
        """Whether the worker has the stream, as it last said."""

    async def decode(
        self, request: DecodeRequest, prompt: bytes, timeout_s: float, take: Callable[[bytes], None]
    ) -> None:
        """Give take each serialized DecodeResponse as it comes; return at the end of the leg.

        request lacks the prompt. Raises LegFailed, and what take raises; cancellation cancels the call.
        """
        asked = whole(request, prompt)
        if self._attach:
            await self._caller.run(asked, timeout_s, take, tracing.outgoing() or ())
            return
        call = self._decode(asked, timeout=timeout_s, metadata=tracing.outgoing())
        try:
            async for raw in call:
                take(raw)
        except grpc.aio.AioRpcError as error:
            raise _leg_failed(error) from None
        finally:
            call.cancel()

    async def release_lease(self, lease_id: str, scope: bytes, timeout_s: float) -> bool:
        """Let go of a lease. Raises LegFailed."""
        request = decode_service_pb2.ReleaseLeaseRequest(lease_id=lease_id, scope=scope)
        try:
            return bool((await self._stub.ReleaseLease(request, timeout=timeout_s)).released)
        except grpc.aio.AioRpcError as error:
            raise _leg_failed(error) from None

    async def info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        """Return the worker's facts. Raises LegFailed."""
        request = decode_service_pb2.DecodeServiceGetInfoRequest()
        try:
            response = await self._stub.GetInfo(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _not_told(error) from None
        info: worker_pb2.WorkerInfo = response.info
        self._attach = info.attach
        return info

    async def close(self) -> None:
        """Close the channel."""
        await self._caller.close()
        await self._channel.close()


class Background:
    """Calls that nobody waits for, kept until they end so that they are neither lost nor leaked."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def tell(self, coroutine: Any) -> None:
        """Run a call whose failure does not matter."""
        task = asyncio.create_task(_ignore_failure(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for the calls under way; each has its own deadline."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _ignore_failure(coroutine: Any) -> object:
    try:
        return await coroutine
    except LegFailed:
        return None
