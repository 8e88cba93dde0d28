"""One decode leg, in a task of its own, whatever becomes of the call that asked for it.

A leg ends in one of three ways: the engine finishes (the hold is published, then the summary is there to
be read), the caller leaves (what the engine kept is published when that was asked for, else freed), or the
engine fails (nothing is held, the caller gets the failure).
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable

from kvloop.decode import direct
from kvloop.decode.direct import Direct
from kvloop.decode.keeper import Keeper, Kept
from kvloop.decode.pump import Pump
from kvloop.engine.port import DecodeJob, Engine, EngineFacts, Finish, HoldTerms
from kvloop.engine.watching import watch_transfer
from kvloop.runtime import checks, logs, tracing
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import decode_service_pb2

MAX_HANDLE_CHARS = 4 * 1024 * 1024

_log = logs.get("decode")


def check_request(request: decode_service_pb2.DecodeRequest, facts: EngineFacts) -> None:
    """Raise the Failure of the first thing wrong with a request."""
    checks.check_request_id(request.request_id, required=True)
    checks.check_model(
        request.model, name=facts.model_name, revision=facts.model_revision, adapters=facts.adapters
    )
    checks.check_scope(request.scope)
    length = checks.check_prompt(
        request.prompt_token_ids, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size
    )
    checks.check_sampling(request.sampling, vocab_size=facts.vocab_size)
    checks.check_lengths(length, request.sampling, facts.max_model_len)
    checks.check_retention(request.retention)
    if request.HasField("direct"):
        direct.check_terms(request)
    elif request.HasField("handle"):
        _check_handle(request.handle.params_json)


def _check_handle(params_json: str) -> None:
    field = "handle.params_json"
    if len(params_json) > MAX_HANDLE_CHARS:
        raise invalid(field, f"must have at most {MAX_HANDLE_CHARS} characters")
    try:
        params = json.loads(params_json)
    except (ValueError, RecursionError):
        raise invalid(field, "is not valid JSON") from None
    if not isinstance(params, dict) or not params:
        raise invalid(field, "must be a JSON object that is not empty")


def _may_be_held(error: Exception) -> bool:
    """Tell whether a turn that failed may have reached the engine, which then aborts it and may hold it."""
    return not isinstance(error, Failure) or error.reason in {
        Reason.ERROR_REASON_WORKER_FAILED,
        Reason.ERROR_REASON_INTERNAL,
    }


class Leg:
    """One decode leg."""

    def __init__(
        self,
        request: decode_service_pb2.DecodeRequest,
        engine: Engine,
        keeper: Keeper,
        direct: Direct,
        *,
        clock: Clock,
        worker_id: str,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._clock = clock
        self._worker_id = worker_id
        self._metrics = metrics
        self._request = request
        retention = request.retention
        self._hold = retention.hold if retention.HasField("hold") else True
        self._hold_on_cancel = retention.hold_on_cancel
        self._terms = self._hold_terms()
        job = self._job()
        self._pump = Pump(
            direct.deltas(request.direct, request.scope.digest_key, job)
            if request.HasField("direct")
            else engine.decode(job)
        )
        self._over = False
        self._task: asyncio.Task[None] | None = None
        self._summary: decode_service_pb2.DecodeSummary | None = None

    async def responses(self) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        """Yield chunks, then the summary. Raises the engine's failure."""
        async for chunk in self._pump.chunks():
            yield decode_service_pb2.DecodeResponse(chunk=chunk)
        yield decode_service_pb2.DecodeResponse(summary=self._summary)

    def start(self) -> "asyncio.Task[None]":
        """Begin; return the task, which the caller keeps."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def leave(self) -> None:
        """Say that nobody reads any more: cancels a leg that generates; any other ends by itself."""
        if not self._over and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        with tracing.span("decode.leg") as span:
            await self._serve(span)

    async def _serve(self, span: tracing.Span) -> None:
        try:
            finish = await self._pump.drain()
            self._over = True
            self._summary = await self._finish(finish)
            span.note(
                output_tokens=self._summary.output_tokens,
                held_tokens=self._summary.lease.num_tokens,
                handoff_bytes=self._summary.handoff.bytes,
                handoff_ms=self._summary.handoff.duration_ms,
            )
        except asyncio.CancelledError:
            self._over = True
            await self._cancelled()
            raise
        except Exception as error:  # noqa: BLE001 - the caller's stream raises it
            self._over = True
            if _may_be_held(error):
                self._discard_later()
            else:
                await self._discard()
            self._pump.close(error)
        else:
            self._pump.close()

    async def _finish(self, finish: Finish) -> decode_service_pb2.DecodeSummary:
        watch_transfer(self._metrics, finish.handoff)
        kept = Kept()
        if finish.hold is not None:
            if self._hold:
                kept = await self._guarded(
                    self._keeper.keep(self._request.scope, self._tokens(), finish.hold)
                )
            else:
                await self._discard()
        else:
            # A stop string ends a turn before the engine has: it may yet hold what nobody waited for.
            self._discard_later()
        summary = decode_service_pb2.DecodeSummary(
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            output_tokens=self._pump.output_tokens,
        )
        if kept.lease is not None:
            summary.lease.lease_id = kept.lease.lease_id
            summary.lease.num_tokens = kept.lease.num_tokens
            remaining = kept.lease.remaining_s(self._clock.monotonic())
            summary.lease.remaining_time.FromNanoseconds(int(remaining * 1e9))
            summary.lease.decode_worker = self._worker_id
        if kept.displaced is not None:
            summary.displaced.decode_endpoint = kept.displaced.decode_endpoint
            summary.displaced.lease_id = kept.displaced.lease_id
            summary.displaced.epoch = kept.displaced.epoch
        if finish.handoff is not None:
            summary.handoff.duration_ms = finish.handoff.duration_ms
            summary.handoff.bytes = finish.handoff.bytes
            summary.handoff.descriptors = finish.handoff.descriptors
        if self._request.HasField("direct"):
            summary.tokens.d_local = finish.sources.local
            summary.tokens.computed = finish.sources.computed
        return summary

    async def _cancelled(self) -> None:
        await self._pump.abandon()
        if self._terms is None:
            return
        if self._hold_on_cancel:
            await self._guarded(
                self._keeper.keep_cancelled(self._request.scope, self._tokens, self._terms.lease_id)
            )
        else:
            # Its end and the cancellation can cross.
            self._discard_later()

    async def _guarded(self, keeping: Awaitable[Kept]) -> Kept:
        """Return what was kept; trouble with a lease never fails the turn that left it."""
        try:
            return await keeping
        except Exception as error:  # noqa: BLE001 - told in the log, and the hold is let go
            _log.error("keeping_failed", error=type(error).__name__, exc_info=error)
            self._discard_later()
            return Kept()

    async def _discard(self) -> None:
        if self._terms is not None:
            await self._keeper.discard(self._terms)

    def _discard_later(self) -> None:
        if self._terms is not None:
            self._keeper.discard_later(self._terms.lease_id)

    def _tokens(self) -> bytes:
        return self._request.prompt_token_ids + self._pump.answer()

    def _hold_terms(self) -> HoldTerms | None:
        # Without a scope nobody could find the lease.
        if not self._request.scope.scope or not (self._hold or self._hold_on_cancel):
            return None
        return HoldTerms(
            lease_id=secrets.token_hex(16),
            ttl_s=self._keeper.ttl_s(self._request.retention),
            on_cancel=self._hold_on_cancel,
            tenant=self._request.scope.tenant,
        )

    def _job(self) -> DecodeJob:
        request = self._request
        return DecodeJob(
            request_id=request.request_id,
            prompt=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.scope.cache_salt,
            adapter=request.model.adapter,
            priority=request.priority,
            handle_json=request.handle.params_json if request.HasField("handle") else None,
            hold=self._terms,
        )
