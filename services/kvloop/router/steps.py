"""The steps of a turn, and their order.

    admit -> lookup -> verdict -> (place -> prefill -> decode) -> summary
                                  (place -> go on, for DIRECT)

Each step reads and fills the Turn and is timed under its own name. What stands in brackets is one attempt:
when a leg fails before the first chunk, the turn starts again there, cold, with a fresh id; when it fails
later, the answer goes on there (migration.py).
"""

import asyncio
import secrets

from kvloop.router import belonging
from kvloop.router.attempts import decode, go_on, prefill
from kvloop.router.beginning import begin
from kvloop.router.explain import reuse_of
from kvloop.router.identity import SCOPE_BYTES, Owner
from kvloop.router.legs import LegFailed
from kvloop.router.migration import bounded, repeatable
from kvloop.router.pairing import place
from kvloop.router.planning import lookup, verdict
from kvloop.router.recovery import start_again
from kvloop.router.relay import Relay
from kvloop.router.turn import Tools, Turn, leave
from kvloop.router.verdict import Verdict, Why
from kvloop.runtime import checks, logs, tokens
from kvloop.runtime.digests import Prefixes
from kvloop.runtime.errors import Failure, invalid
from kvloop.v1alpha1 import router_service_pb2

_MAX_SALT = 256
_POLICIES = frozenset(router_service_pb2.ReusePolicy.values())

_log = logs.get("router")


async def serve(turn: Turn, tools: Tools, relay: Relay) -> None:
    """Serve an admitted turn: chunks and the summary go to the relay.

    Raises Failure; cancellation tells both legs.
    """
    outcome = "INTERNAL"
    try:
        await _serve(turn, tools, relay)
        outcome = "ok"
    except Failure as failure:
        outcome = failure.reason_name
        raise
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        tools.memory.keep(turn, outcome)


async def _serve(turn: Turn, tools: Tools, relay: Relay) -> None:
    await lookup(turn, tools)
    verdict(turn, tools)
    turn.expected_tokens = turn.decided.expected_tokens
    while True:
        try:
            await place(turn, tools)
            if turn.is_direct:
                if await go_on(turn, tools, relay):
                    break
                continue
            await prefill(turn, tools)
            if (chunk := begin(turn, tools)) is not None:
                relay.put(chunk)
            await decode(turn, tools, relay)
            break
        except LegFailed as failed:
            if not start_again(turn, tools, failed):
                break
        finally:
            leave(turn, tools)
    answer = summary(turn, tools.name())
    relay.finish(answer.SerializeToString())
    tools.watch.answered(turn, answer.summary)
    if turn.origin is None:
        tools.book.learn(turn)
    decision = turn.decided
    _log.debug(
        "turn_done",
        request_id=turn.request_id,
        attempts=turn.attempt,
        verdict=Verdict.Name(decision.verdict),
        reason=Why.Name(decision.reason),
        timings={name: round(spent, 3) for name, spent in turn.timings.items()},
    )


def admit(
    request: router_service_pb2.GenerateRequest, tenant: str, time_left_s: float | None, tools: Tools
) -> Turn:
    """Check a request and return its turn. Raises the Failure that names the field."""
    started = tools.clock.monotonic()
    time_left = checks.check_deadline(time_left_s)
    checks.check_request_id(request.request_id, required=False)
    checks.check_conversation_id(request.conversation_id)
    checks.check_conversation_id(request.parent_conversation_id, "parent_conversation_id")
    check_salt(request.cache_salt)
    if request.reuse_policy not in _POLICIES:
        raise invalid("reuse_policy", "is not a known policy")
    served = tools.pool.resolve(request.model, request.adapter, lambda: belonging.key(request, tenant, tools))
    checks.check_sampling(request.sampling, vocab_size=served.vocab_size)
    checks.check_retention(request.retention)
    prompt = request.prompt_token_ids
    prompt_tokens = checks.check_prompt(
        prompt, max_model_len=served.max_model_len, vocab_size=served.vocab_size
    )
    left = checks.check_lengths(prompt_tokens, request.sampling, served.max_model_len)
    sampling = bounded(request.sampling, served.default_max_tokens, left)
    owner = Owner(tenant, served.name, served.revision, served.adapter, request.cache_salt)
    # With reuse off nobody would look for a lease, so none is asked for.
    conversation = request.conversation_id if tools.settings.reuse else ""
    turn = Turn(
        request=request,
        tenant=tenant,
        deadline=started + time_left,
        clock=tools.clock,
        request_id=request.request_id or secrets.token_hex(16),
        started=started,
        patience=tools.admission.patience(),
        served=served,
        owner=owner,
        scope=tools.identities.turn_scope(owner, conversation),
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        prefixes=Prefixes(tools.identities.digest_key(owner), prompt),
        sampling=repeatable(sampling) if tools.settings.max_migrations else sampling,
    )
    if not conversation and _is_held(request, tools):
        # Nobody knows this name; the prompt's beginning leads to it.
        turn.scope.scope = secrets.token_bytes(SCOPE_BYTES)
    turn.timings["admit"] = (tools.clock.monotonic() - started) * 1000
    return turn


def _is_held(request: router_service_pb2.GenerateRequest, tools: Tools) -> bool:
    """Tell whether a turn that names no conversation is held."""
    settings, retention = tools.settings, request.retention
    # A cold run for comparison leaves nothing unless it says so.
    by_default = settings.hold_unnamed and request.reuse_policy != router_service_pb2.REUSE_POLICY_FORBID
    wanted = retention.hold if retention.HasField("hold") else by_default
    return wanted and settings.reuse and settings.prefix_hints


def check_salt(salt: str) -> None:
    """Accept a client's salt of up to 256 characters."""
    if len(salt) > _MAX_SALT:
        raise invalid("cache_salt", f"must have at most {_MAX_SALT} characters")


def summary(turn: Turn, router: str) -> router_service_pb2.GenerateResponse:
    """Return the end of the answer, as this router says it."""
    assert turn.pair is not None
    assert turn.decoded is not None
    decoded = turn.decoded
    response = router_service_pb2.GenerateResponse()
    out = response.summary
    out.finish_reason = decoded.finish_reason
    if decoded.HasField("stop_reason"):
        out.stop_reason = decoded.stop_reason
    out.prompt_tokens = turn.prompt_tokens
    out.output_tokens = tokens.count(turn.carried) + decoded.output_tokens
    out.migrated = turn.migrations > 0
    out.reuse.CopyFrom(reuse_of(turn))
    if turn.origin is not None:
        out.prompt_logprobs.extend(turn.origin_logprobs)
    elif turn.prefilled is not None:
        out.prompt_logprobs.extend(turn.prefilled.prompt_logprobs)
    if decoded.HasField("lease"):
        out.lease.CopyFrom(decoded.lease)
    if turn.first_event_at is not None:
        out.ttft_ms = (turn.first_event_at - turn.started) * 1000
    out.request_id = turn.request_id
    if turn.pair.prefill is not None:
        out.prefill_worker = turn.pair.prefill.name
    out.decode_worker = turn.pair.decode.name
    out.router = router
    return response
