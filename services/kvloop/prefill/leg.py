"""One prefill leg: read back what is proven, compute the rest, once more from cold when a read fails."""

import asyncio
import contextlib
from dataclasses import dataclass, replace

from kvloop.engine.port import Engine, EngineFacts, PrefillJob, PrefillOutcome
from kvloop.engine.watching import watch_transfer
from kvloop.prefill.reading import NotRead, Pin, Reader, missing
from kvloop.runtime import background, checks, logs, tokens, tracing
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import prefill_service_pb2, turn_pb2

COLD_SUFFIX = "~cold"

_log = logs.get("prefill")


def check_request(request: prefill_service_pb2.PrefillRequest, facts: EngineFacts) -> None:
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


@dataclass(frozen=True, slots=True)
class _Done:
    """What a leg came to."""

    outcome: PrefillOutcome
    verdict: "turn_pb2.Verdict.ValueType"
    reason: "turn_pb2.ReuseReason.ValueType"
    retried: bool = False


class Legs:
    """Runs prefill legs on one engine."""

    def __init__(self, engine: Engine, reader: Reader, clock: Clock, metrics: Metrics) -> None:
        self._engine = engine
        self._reader = reader
        self._clock = clock
        self._metrics = metrics
        self.running = 0
        self._quiet = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Legs that were cancelled, until the engine has heard of it."""

    async def run(
        self, request: prefill_service_pb2.PrefillRequest, time_left_s: float
    ) -> prefill_service_pb2.PrefillResponse:
        """Serve a leg. Cancellation aborts it; nothing stays held or pinned then."""
        check_request(request, self._engine.facts)
        self.running += 1
        started = self._clock.monotonic()
        try:
            done = await self._prefill(request, time_left_s)
        finally:
            self.running -= 1
            self._quiet.set()
        response = _response(done, (self._clock.monotonic() - started) * 1000)
        self._watch(done, response.reuse)
        return response

    async def finished(self) -> None:
        """Return when no leg is in progress."""
        while self.running:
            self._quiet.clear()
            await self._quiet.wait()

    async def close(self, patience_s: float) -> None:
        """Give the engine patience_s seconds to end what was cancelled; call before the reader's close."""
        await background.end(self._tasks, patience_s)

    async def release(self, request_id: str) -> bool:
        """Let go of a leg's outcome, whichever of its two attempts made it."""
        return await self._engine.release_prefill(request_id) or await self._engine.release_prefill(
            request_id + COLD_SUFFIX
        )

    async def probe(self) -> None:
        """Fill in the metrics that are kept here."""
        self._metrics.put("kvloop_legs_in_flight", value=self.running)

    def _watch(self, done: _Done, reuse: turn_pb2.Reuse) -> None:
        verdict = turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_").lower()
        reason = turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_").lower()
        self._metrics.add("kvloop_prefills", verdict, reason)
        self._metrics.add("kvloop_cold_retries", amount=done.retried)
        watch_transfer(self._metrics, done.outcome.readback)
        tracing.note(
            verdict=verdict,
            reason=reason,
            p_local_tokens=reuse.tokens.p_local,
            readback_tokens=reuse.tokens.readback,
            computed_tokens=reuse.tokens.computed,
            readback_bytes=reuse.readback.bytes,
            readback_ms=reuse.readback.duration_ms,
            retried=done.retried,
        )

    async def _prefill(self, request: prefill_service_pb2.PrefillRequest, time_left_s: float) -> _Done:
        job = PrefillJob(
            request_id=request.request_id,
            prompt=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.scope.cache_salt,
            adapter=request.model.adapter,
            priority=request.priority,
            first_token=request.first_token,
        )
        try:
            pin = await self._begin(request, time_left_s)
        except NotRead as cold:
            failure = missing(cold) if request.report_missing_lease else None
            if failure is not None:
                raise failure from None
            return _Done(await self._engine.prefill(job), turn_pb2.VERDICT_RECOMPUTE, cold.reason)
        try:
            outcome = await self._engine.prefill(replace(job, read=pin.grant))
        except Failure as failure:
            self._reader.end(pin)
            if failure.reason != Reason.ERROR_REASON_KV_READ_FAILED:
                raise
            _log.warning("read_failed", endpoint=pin.endpoint, lease_id=pin.lease_id)
        except BaseException:
            background.spawn(self._tasks, self._end_when_over(pin, job.request_id))
            raise
        else:
            self._reader.end(pin)
            return _judge(outcome, pin, self._engine.facts)
        again = replace(job, request_id=job.request_id + COLD_SUFFIX)
        outcome = await self._engine.prefill(again)
        return _Done(outcome, turn_pb2.VERDICT_RECOMPUTE, turn_pb2.REUSE_REASON_READ_FAILED, retried=True)

    async def _end_when_over(self, pin: Pin, request_id: str) -> None:
        """Take a cancelled leg's pin off; not before the engine knows, since till then it may cache the read.

        Without the engine's word the pin's own time ends it.
        """
        with contextlib.suppress(Failure):
            if await self._engine.prefill_ended(request_id, pin.grant.pin_s):
                self._reader.end(pin)

    async def _begin(self, request: prefill_service_pb2.PrefillRequest, time_left_s: float) -> Pin:
        """Return a pin worth reading under. Raises NotRead."""
        if request.sampling.HasField("prompt_logprobs"):
            raise NotRead(turn_pb2.REUSE_REASON_FULL_PREFILL_NEEDED)
        if not request.HasField("read_source"):
            raise NotRead(request.cold_reason or turn_pb2.REUSE_REASON_NO_CONVERSATION)
        facts = self._engine.facts
        pin = await self._reader.begin(
            request.read_source, request.scope, request.prompt_token_ids, facts, time_left_s
        )
        if pin.grant.num_tokens < facts.kv_recompute_threshold:
            self._reader.end(pin)
            raise NotRead(turn_pb2.REUSE_REASON_BELOW_THRESHOLD)
        return pin


def _judge(outcome: PrefillOutcome, pin: Pin, facts: EngineFacts) -> _Done:
    """Return what the engine's own report says of a leg that had leave to read."""
    if outcome.sources.external > 0:
        return _Done(outcome, turn_pb2.VERDICT_READBACK, turn_pb2.REUSE_REASON_PROVEN)
    # The prefix cache holds whole blocks, so less than one is nothing that it could have had.
    left = pin.grant.num_tokens - outcome.sources.local
    local = left < facts.block_size
    reason = turn_pb2.REUSE_REASON_LOCAL if local else turn_pb2.REUSE_REASON_BELOW_THRESHOLD
    return _Done(outcome, turn_pb2.VERDICT_RECOMPUTE, reason)


def _response(done: _Done, prefill_ms: float) -> prefill_service_pb2.PrefillResponse:
    outcome = done.outcome
    response = prefill_service_pb2.PrefillResponse(
        held_ms=max(0, int(outcome.held_s * 1000)), prompt_logprobs=outcome.prompt_logprobs
    )
    response.handle.params_json = outcome.handle_json
    if outcome.first is not None:
        response.first.token_ids = tokens.pack([outcome.first.token_id])
        response.first.text = outcome.first.text
        response.first.logprobs.extend(outcome.first.logprobs)
        if outcome.first.ends:
            response.first.finish_reason = turn_pb2.FINISH_REASON_STOP
    reuse = response.reuse
    reuse.verdict, reuse.reason, reuse.retried = done.verdict, done.reason, done.retried
    reuse.prefill_ms = prefill_ms
    reuse.tokens.p_local = outcome.sources.local
    reuse.tokens.readback = outcome.sources.external
    reuse.tokens.computed = outcome.sources.computed
    if outcome.readback is not None:
        reuse.readback.duration_ms = outcome.readback.duration_ms
        reuse.readback.bytes = outcome.readback.bytes
        reuse.readback.descriptors = outcome.readback.descriptors
    return response
