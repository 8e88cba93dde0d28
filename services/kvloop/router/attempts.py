"""One attempt of a turn: two legs, and what happens when one of them fails.

Nothing waits between the legs: the prefill worker holds its blocks only for a short time. A DIRECT attempt
has one worker and one leg; when that worker can't prove or pin what it holds, it says so before any token
and the turn goes through a prefill worker instead.
"""

import asyncio
import secrets
from collections.abc import Callable

from kvloop.router import beginning
from kvloop.router import verdict as verdicts
from kvloop.router.costs import compute_features
from kvloop.router.legs import CHUNK_TAG, LegFailed, timed_out
from kvloop.router.migration import Replay, lost
from kvloop.router.planning import look_again, verdict
from kvloop.router.relay import Relay
from kvloop.router.turn import Tools, Turn, leave
from kvloop.router.verdict import Verdict, Why
from kvloop.router.worker import AnyWorker, Calling, DecodeWorker, PrefillWorker
from kvloop.runtime import logs
from kvloop.runtime.errors import Reason
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, prefill_service_pb2, turn_pb2

_TELL_TIMEOUT_S = 3.0
# What a holder answers that will not go on from its lease, and what that says of the lease. UNSPECIFIED:
# nothing, it may still be read.
_REFUSALS = {
    Reason.ERROR_REASON_LEASE_NOT_FOUND: Why.REUSE_REASON_NOT_FOUND,
    Reason.ERROR_REASON_LEASE_EXPIRED: Why.REUSE_REASON_EXPIRED,
    Reason.ERROR_REASON_LEASE_EPOCH: Why.REUSE_REASON_EPOCH,
    Reason.ERROR_REASON_PREFIX_DIVERGED: Why.REUSE_REASON_UNSPECIFIED,
    Reason.ERROR_REASON_INCOMPATIBLE_ENGINES: Why.REUSE_REASON_UNSPECIFIED,
    Reason.ERROR_REASON_OVERLOADED: Why.REUSE_REASON_UNSPECIFIED,
    Reason.ERROR_REASON_DRAINING: Why.REUSE_REASON_UNSPECIFIED,
}

_log = logs.get("router")


async def prefill(turn: Turn, tools: Tools) -> None:
    """Have the prompt's KV made ready on P. Raises LegFailed."""
    with turn.timed("prefill"):
        try:
            turn.prefilled = await _prefill_once(turn, tools)
        except LegFailed as failed:
            if not failed.lease_missing or turn.looked_again:
                raise
            await look_again(turn, tools, direct=False)
            turn.attempt_id = secrets.token_hex(16)
            turn.prefilled = await _prefill_once(turn, tools)


async def _prefill_once(turn: Turn, tools: Tools) -> prefill_service_pb2.PrefillResponse:
    assert turn.pair is not None
    assert turn.pair.prefill is not None
    worker = turn.pair.prefill
    request = prefill_request(turn, first_token=beginning.asks(turn, tools))
    limit = min(turn.time_left_s(), tools.settings.prefill_timeout_s)
    turn.prefill_alone = worker.load == 0
    with _AtWork(worker, _expected_prefill_ms(turn, tools)):
        try:
            response = await _prefill_call(worker, request, turn.leg_prompt, limit)
        except asyncio.CancelledError:
            _abandon_prefill(turn, tools)
            raise
        except LegFailed as failed:
            if not failed.answered:
                _abandon_prefill(turn, tools)
            _note(turn, worker, failed)
            raise
    worker.succeeded()
    _note_read_back(turn, tools, response)
    leave(turn, tools, worker)
    return response


def _note_read_back(turn: Turn, tools: Tools, response: prefill_service_pb2.PrefillResponse) -> None:
    assert turn.pair is not None
    prefill = turn.pair.prefill
    if prefill is None or turn.holder is None or turn.decided.verdict != Verdict.VERDICT_READBACK:
        return
    if response.reuse.reason == Why.REUSE_REASON_READ_FAILED:
        tools.pool.pairs.failed(prefill, turn.holder)
    elif response.reuse.readback.bytes:
        tools.pool.pairs.succeeded(prefill, turn.holder)


async def _prefill_call(
    worker: PrefillWorker, request: prefill_service_pb2.PrefillRequest, prompt: bytes, limit_s: float
) -> prefill_service_pb2.PrefillResponse:
    try:
        async with worker.calling(None):
            return await worker.link.prefill(request, prompt, limit_s)
    except TimeoutError:
        raise timed_out("answer") from None


def prefill_request(turn: Turn, *, first_token: bool) -> prefill_service_pb2.PrefillRequest:
    """Return the first leg's request less the prompt: sampling untouched, and where to read if so decided."""
    decision = turn.decided
    request = prefill_service_pb2.PrefillRequest(
        request_id=turn.attempt_id,
        model=_model(turn),
        scope=turn.scope,
        sampling=turn.leg_sampling,
        first_token=first_token,
    )
    if turn.request.HasField("priority"):
        request.priority = turn.request.priority
    entry = turn.entry
    if decision.verdict == Verdict.VERDICT_READBACK and entry is not None and turn.holder is not None:
        request.read_source.CopyFrom(
            lease_pb2.ReadSource(
                # The address comes from the pool, not from the directory: an entry can't send P elsewhere.
                decode_endpoint=turn.holder.endpoint,
                lease_id=entry.lease_id,
                epoch=entry.epoch,
                num_tokens=entry.num_tokens,
                block_size=entry.block_size,
            )
        )
        request.report_missing_lease = not turn.looked_again
    else:
        request.cold_reason = decision.reason
    return request


def decode_request(turn: Turn) -> decode_service_pb2.DecodeRequest:
    """Return the second leg's request less the prompt: with P's handle, or with the lease to go on from."""
    request = decode_service_pb2.DecodeRequest(
        request_id=turn.attempt_id,
        model=_model(turn),
        scope=turn.scope,
        sampling=turn.leg_sampling,
        retention=turn.request.retention,
    )
    if turn.prefilled is not None:
        request.handle.CopyFrom(turn.prefilled.handle)
    else:
        assert turn.entry is not None
        request.direct.CopyFrom(
            decode_service_pb2.DirectTerms(
                lease_id=turn.entry.lease_id,
                epoch=turn.entry.epoch,
                num_tokens=turn.entry.num_tokens,
                soft=not turn.entry.held,
            )
        )
    if turn.request.HasField("priority"):
        request.priority = turn.request.priority
    return request


async def go_on(turn: Turn, tools: Tools, relay: Relay) -> bool:
    """Have D go on from what it holds (DIRECT); False when it would not, and the turn is decided anew.

    Raises LegFailed.
    """
    assert turn.pair is not None
    worker, suffix = turn.pair.decode, turn.prompt_tokens - turn.decided.expected_tokens
    features = compute_features(turn.decided.expected_tokens, turn.prompt_tokens)
    work_ms = tools.book.rates(turn.served, None, worker).decode.ms(features)
    worker.direct_tokens += suffix
    worker.pending_ms += work_ms
    turn.on_first_event = lambda: _computed(worker, suffix, work_ms)
    try:
        await decode(turn, tools, relay)
        return True
    except LegFailed as failed:
        reason = _REFUSALS.get(failed.failure.reason) if failed.answered and not turn.streaming else None
        if reason is None:
            raise
        turn.direct_refused = True
        turn.avoid.discard(worker)
        _log.info("direct_refused", request_id=turn.request_id, reason=failed.failure.reason_name)
    finally:
        turn.first_event()
    # A refusal is an answer, not a failed attempt.
    turn.attempt -= 1
    if reason == Why.REUSE_REASON_NOT_FOUND and not turn.looked_again:
        await look_again(turn, tools)
    elif reason == Why.REUSE_REASON_UNSPECIFIED:
        verdict(turn, tools)
    else:
        turn.decision = verdicts.cold(reason)
    return False


def _computed(worker: DecodeWorker, suffix: int, work_ms: float) -> None:
    worker.direct_tokens -= suffix
    worker.pending_ms = max(0.0, worker.pending_ms - work_ms)


def _expected_prefill_ms(turn: Turn, tools: Tools) -> float:
    # Not the read: meanwhile the engine computes for others.
    rates = tools.book.rates(turn.served, None, None)
    return rates.prefill.ms(compute_features(turn.to_read, turn.prompt_tokens))


async def decode(turn: Turn, tools: Tools, relay: Relay) -> None:
    """Pass D's answer on to the relay, to its end. Raises LegFailed."""
    leg = _decode(turn, tools, relay)
    await (beginning.to_first_event(turn, tools, leg) if turn.begun else leg)


async def _decode(turn: Turn, tools: Tools, relay: Relay) -> None:
    assert turn.pair is not None
    worker = turn.pair.decode
    turn.decode_alone, turn.decode_started = worker.load == 0, tools.clock.monotonic()
    heard_before = turn.heard
    with _AtWork(worker), turn.timed("decode"):
        try:
            await _decode_call(turn, tools, relay, worker)
            if turn.decoded is None:
                raise timed_out("summary")
        except LegFailed as failed:
            # With the summary the turn is complete, whatever becomes of the call.
            if turn.decoded is None:
                if failed.answered and turn.heard == heard_before:
                    _abandon_prefill(turn, tools)
                _note(turn, worker, failed)
                if failed.answered and failed.failure.reason == Reason.ERROR_REASON_KV_READ_FAILED:
                    _note_handoff(turn, tools, failed=True)
                raise
    worker.succeeded()
    _note_handoff(turn, tools, failed=False)
    _release_replaced(turn, tools)


async def _decode_call(turn: Turn, tools: Tools, relay: Relay, worker: DecodeWorker) -> None:
    limit = min(turn.time_left_s(), tools.settings.first_chunk_timeout_s)
    try:
        async with worker.calling(limit, lambda: turn.heard) as calling:
            take = _taker(turn, tools, relay, calling)
            await worker.link.decode(decode_request(turn), turn.leg_prompt, turn.time_left_s(), take)
    except TimeoutError:
        raise timed_out("chunk") from None


def _taker(turn: Turn, tools: Tools, relay: Relay, calling: Calling) -> Callable[[bytes], None]:
    """Return what passes a leg's events on; calling bounds the wait for each."""
    heard_before = turn.heard

    def take(raw: bytes) -> None:
        if turn.heard == heard_before:
            calling.bound_silence(tools.settings.chunk_timeout_s)
            _heard_first(turn, tools)
        _pass_on(turn, relay, raw)

    return take


def _note_handoff(turn: Turn, tools: Tools, *, failed: bool) -> None:
    assert turn.pair is not None
    prefill = turn.pair.prefill
    if prefill is None:
        return
    if failed:
        # Which of the two is to blame can't be told: the next attempt has another P as well as another D.
        turn.avoid.add(prefill)
    note = tools.pool.pairs.failed if failed else tools.pool.pairs.succeeded
    note(turn.pair.decode, prefill)


def _heard_first(turn: Turn, tools: Tools) -> None:
    turn.first_event()
    turn.decode_first_at = tools.clock.monotonic()
    if turn.first_event_at is None or not turn.streaming:
        turn.first_event_at = turn.decode_first_at
        turn.timings["first_chunk"] = (turn.first_event_at - turn.started) * 1000


def _pass_on(turn: Turn, relay: Relay, raw: bytes) -> None:
    turn.heard += 1
    if raw.startswith(CHUNK_TAG):
        if turn.replay is not None and (raw := _unheard(turn.replay, raw)) == b"":
            return
        turn.sent.append(raw)
        relay.put(raw)
        return
    if turn.replay is not None and not turn.replay.over:
        raise lost("the answer can't be repeated")
    response = decode_service_pb2.DecodeResponse.FromString(raw)
    if response.WhichOneof("event") == "summary":
        turn.decoded = response.summary


def _unheard(replay: Replay, raw: bytes) -> bytes:
    return raw if replay.over else replay.rest(raw) or b""


def _release_replaced(turn: Turn, tools: Tools) -> None:
    """Let go of the leases whose place the turn's own has taken."""
    decoded = turn.decoded
    assert decoded is not None
    replaced: list[decode_service_pb2.DisplacedLease | lease_pb2.DirectoryEntry] = []
    if decoded.HasField("displaced"):
        replaced.append(decoded.displaced)
    if turn.predecessor is not None and decoded.HasField("lease"):
        replaced.append(turn.predecessor)
    for lease in replaced:
        worker = tools.pool.holder(lease.decode_endpoint, lease.epoch)
        if worker is not None:
            # By its id alone: by the time this arrives, the conversation may have come back to that worker.
            tools.background.tell(worker.link.release_lease(lease.lease_id, b"", _TELL_TIMEOUT_S))


def _abandon_prefill(turn: Turn, tools: Tools) -> None:
    # Only while no decode worker can be reading: before the decode leg, or after D itself has said that it
    # is done with it. A cancelled or lost D may still be reading, and its engine tells P when it has
    # finished; P's own deadline covers what remains.
    assert turn.pair is not None
    if turn.pair.prefill is None:
        return
    tools.background.tell(turn.pair.prefill.link.release(turn.attempt_id, _TELL_TIMEOUT_S))


def _note(turn: Turn, worker: AnyWorker, failed: LegFailed) -> None:
    if failed.callers_fault:
        return
    if failed.going_away:
        # It gets no more turns, and what it holds can still be read.
        worker.drains()
        return
    turn.avoid.add(worker)
    # A leg that was cut off by the turn's own deadline says nothing about the worker.
    if failed.workers_fault and not turn.out_of_time:
        worker.failed()


class _AtWork:
    """Counts a leg at its worker while it is there. A class, since every leg passes through it."""

    __slots__ = ("_work_ms", "_worker")

    def __init__(self, worker: AnyWorker, work_ms: float = 0.0) -> None:
        self._worker, self._work_ms = worker, work_ms

    def __enter__(self) -> None:
        self._worker.in_flight += 1
        self._worker.pending_ms += self._work_ms

    def __exit__(self, *_: object) -> None:
        self._worker.in_flight -= 1
        self._worker.pending_ms = max(0.0, self._worker.pending_ms - self._work_ms)


def _model(turn: Turn) -> turn_pb2.ModelRef:
    served = turn.served
    return turn_pb2.ModelRef(name=served.name, revision=served.revision, adapter=served.adapter)
