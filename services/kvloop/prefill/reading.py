"""The reader's side of a read: prove, ask, and always say when it is over.

Whatever goes wrong here is a reason to recompute, never to fail the turn. A pin that was granted is ended
on every path: after the read, when nothing was read, when the answer came after its asker had gone on.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from kvloop.engine.port import EngineFacts, ReadGrant
from kvloop.prefill.peers import EndpointRule, Peers
from kvloop.runtime import background, logs, tracing
from kvloop.runtime.clock import Clock
from kvloop.runtime.digests import prefix_digests, proof_lengths
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.runtime.tokens import count
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, turn_pb2

T = TypeVar("T")
END_READ_ATTEMPTS = 3
END_READ_PAUSE_S = 0.1

_REASONS = {
    Reason.ERROR_REASON_LEASE_NOT_FOUND: turn_pb2.REUSE_REASON_NOT_FOUND,
    Reason.ERROR_REASON_LEASE_EXPIRED: turn_pb2.REUSE_REASON_EXPIRED,
    Reason.ERROR_REASON_LEASE_EPOCH: turn_pb2.REUSE_REASON_EPOCH,
    Reason.ERROR_REASON_PREFIX_DIVERGED: turn_pb2.REUSE_REASON_DIVERGED,
    Reason.ERROR_REASON_INCOMPATIBLE_ENGINES: turn_pb2.REUSE_REASON_INCOMPATIBLE,
}

_log = logs.get("prefill")


class NotRead(Exception):
    """Nothing can be read back, and why."""

    def __init__(self, reason: "turn_pb2.ReuseReason.ValueType") -> None:
        super().__init__(turn_pb2.ReuseReason.Name(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Pin:
    """A read that was granted, and where."""

    endpoint: str
    lease_id: str
    grant: ReadGrant


@dataclass(frozen=True, slots=True)
class ReaderTimes:
    """Bounds, in seconds."""

    begin_s: float = 0.5
    """What a holder has to answer in; a turn waits for no longer, nor for longer than it has."""
    end_s: float = 1.0
    pin_s: float = 30.0


class Reader:
    """Asks decode workers for leave to read."""

    def __init__(
        self,
        peers: Peers,
        rule: EndpointRule,
        side_channel: Callable[[str, str], Awaitable[str]],
        clock: Clock,
        times: ReaderTimes,
    ) -> None:
        """side_channel: tells where reads begin of the engine at an endpoint, in an epoch; "": not known."""
        self._peers = peers
        self._rule = rule
        self._side_channel = side_channel
        self._clock = clock
        self._times = times
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(
        self,
        source: lease_pb2.ReadSource,
        scope: turn_pb2.TurnScope,
        prompt: bytes,
        facts: EngineFacts,
        time_left_s: float,
    ) -> Pin:
        """Return leave to read what the lease and the prompt share.

        At least one token of the prompt is left to compute. Raises NotRead.
        """
        if not facts.bidirectional_kv_xfer:
            raise NotRead(turn_pb2.REUSE_REASON_INCOMPATIBLE)
        readable = min(source.num_tokens, count(prompt) - 1)
        if readable < max(1, facts.kv_recompute_threshold):
            raise NotRead(turn_pb2.REUSE_REASON_BELOW_THRESHOLD)
        endpoint = await self._rule.admit(source.decode_endpoint)
        if endpoint is None:
            _log.warning("endpoint_refused", lease_id=source.lease_id)
            raise NotRead(turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE)
        if self._peers.is_resting(endpoint):
            raise NotRead(turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE)
        side_channel = await self._side_channel(endpoint, source.epoch)
        lengths = proof_lengths(readable, facts.block_size)
        request = decode_service_pb2.BeginReadRequest(
            lease_id=source.lease_id,
            epoch=source.epoch,
            scope=scope,
            prefix_lengths=lengths,
            prefix_digests=b"".join(prefix_digests(scope.digest_key, prompt, lengths)),
            compatibility=facts.compatibility,
        )
        request.pin_time.FromNanoseconds(int(self._times.pin_s * 1e9))
        # Whether a holder is mute is judged by begin_s alone; a turn short of time says nothing of it.
        mute = asyncio.get_running_loop().call_later(self._times.begin_s, self._peers.failed, endpoint)
        asking = self._spawn(self._ask(endpoint, request, mute))
        try:
            done, _ = await asyncio.wait({asking}, timeout=min(self._times.begin_s, time_left_s))
        except asyncio.CancelledError:
            asking.add_done_callback(self._end_unwanted)
            raise
        if not done:
            asking.add_done_callback(self._end_unwanted)
            raise NotRead(turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE)
        pin = asking.result()
        return replace(pin, grant=replace(pin.grant, side_channel=side_channel))

    def end(self, pin: Pin) -> None:
        """Take a pin off, in the background; a lost message costs the pin's own time."""
        self._spawn(self._end(pin))

    async def close(self, patience_s: float) -> None:
        """Give messages on their way patience_s seconds, then drop them."""
        await background.end(self._tasks, patience_s)

    async def _ask(
        self, endpoint: str, request: decode_service_pb2.BeginReadRequest, mute: asyncio.TimerHandle
    ) -> Pin:
        """Return what the holder grants, also when nobody waits any more: such a pin must be ended.

        mute: called off by any answer.
        """
        sent = self._clock.monotonic()
        try:
            answer = await self._peers.stub(endpoint).BeginRead(
                request, timeout=self._times.pin_s, metadata=tracing.outgoing()
            )
        except grpc.aio.AioRpcError as error:
            elapsed = self._clock.monotonic() - sent
            raise NotRead(self._why(endpoint, error, late=elapsed >= self._times.begin_s)) from None
        finally:
            mute.cancel()
        # The holder counts from when it answered, so from no earlier than when it was asked.
        elapsed = self._clock.monotonic() - sent
        if elapsed < self._times.begin_s:
            self._peers.answered(endpoint)
        grant = ReadGrant(
            read_id=answer.read_id,
            handle_json=answer.handle.params_json,
            num_tokens=answer.num_tokens,
            pin_s=max(0.0, answer.pin_time.ToNanoseconds() / 1e9 - elapsed),
        )
        pin = Pin(endpoint, request.lease_id, grant)
        if grant.num_tokens not in request.prefix_lengths or not grant.read_id:
            _log.warning("grant_refused", lease_id=request.lease_id)
            self.end(pin)
            raise NotRead(turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE)
        return pin

    def _why(
        self, endpoint: str, error: grpc.aio.AioRpcError, *, late: bool
    ) -> "turn_pb2.ReuseReason.ValueType":
        failure = from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
        if not late:
            # Whatever names a reason is a worker's answer.
            if failure.reason == Reason.ERROR_REASON_UNSPECIFIED:
                self._peers.failed(endpoint)
            else:
                self._peers.answered(endpoint)
        reason = _REASONS.get(failure.reason)
        if reason is None:
            _log.info("begin_read_failed", endpoint=endpoint, code=error.code().name, why=failure.reason_name)
            return turn_pb2.REUSE_REASON_DECODE_UNAVAILABLE
        return reason

    async def _end(self, pin: Pin) -> None:
        request = decode_service_pb2.EndReadRequest(lease_id=pin.lease_id, read_id=pin.grant.read_id)
        for attempt in range(END_READ_ATTEMPTS):
            try:
                await self._peers.stub(pin.endpoint).EndRead(request, timeout=self._times.end_s)
                return
            except grpc.aio.AioRpcError as error:
                if attempt == END_READ_ATTEMPTS - 1:
                    _log.info("end_read_failed", endpoint=pin.endpoint, code=error.code().name)
                    return
            await asyncio.sleep(END_READ_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))

    def _end_unwanted(self, asking: "asyncio.Task[Pin]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.end(asking.result())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def missing(failure: NotRead) -> Failure | None:
    """Return the failure by which a router learns that it should look once more, if that is the case."""
    if failure.reason == turn_pb2.REUSE_REASON_NOT_FOUND:
        return Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "the decode worker knows no such lease")
    return None
