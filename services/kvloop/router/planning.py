"""What is settled before the first leg: where the history might be, and how to come by the prompt's KV."""

import asyncio

from kvloop.metastore.port import DirectoryUnavailable, Found
from kvloop.router import costs as cost_model
from kvloop.router import verdict as verdicts
from kvloop.router.explain import Weighed
from kvloop.router.settings import RouterSettings
from kvloop.router.turn import Tools, Turn
from kvloop.router.verdict import Why
from kvloop.router.worker import DecodeWorker
from kvloop.v1alpha1 import lease_pb2, router_service_pb2, turn_pb2


async def lookup(turn: Turn, tools: Tools) -> None:
    """Find the newest lease of the conversation, or else of its parent: one round trip, or cold."""
    with turn.timed("lookup"):
        # The start of a turn only settles whose lease stays in the directory when two turns of one
        # conversation end at about the same time. A router's clock that is off can lose the later turn's
        # lease, which costs a cold turn; what is read is proven by digests all the same.
        turn.scope.turn_start_us = int(tools.clock.wall() * 1e6)
        scopes = _scopes(turn, tools)
        if not scopes:
            return
        try:
            found = await _look(scopes, tools)
        except DirectoryUnavailable:
            turn.directory_failed = True
            return
        turn.scope.turn_start_us = found[0].turn_start_us
        _take(turn, found)


async def _look(scopes: list[bytes], tools: Tools) -> list[Found]:
    try:
        async with asyncio.timeout(tools.settings.directory_timeout_ms / 1000):
            if len(scopes) == 1:
                return [await tools.directory.lookup(scopes[0])]
            return list(await asyncio.gather(*(tools.directory.lookup(scope) for scope in scopes)))
    except TimeoutError:
        raise DirectoryUnavailable from None


def _scopes(turn: Turn, tools: Tools) -> list[bytes]:
    if not tools.settings.reuse:
        return []
    parent = turn.request.parent_conversation_id
    scopes = [turn.scope.scope] if turn.scope.scope else []
    if parent and parent != turn.request.conversation_id:
        scopes.append(tools.identities.scope(turn.owner, parent))
    # A fork goes where the conversation that it comes from has left its prefix.
    turn.home = scopes[-1] if scopes else b""
    return scopes


def _take(turn: Turn, found: list[Found]) -> None:
    best = next((f for f in found if f.entry is not None), None)
    turn.entry = best.entry if best is not None else None
    turn.entry_remaining_s = best.remaining_s if best is not None else 0.0


def verdict(turn: Turn, tools: Tools) -> None:
    """Decide how the prompt's KV comes about, from what is known before the first leg."""
    with turn.timed("verdict"):
        entry = turn.entry
        turn.holder = None
        lease = holder = expected = None
        ruled_out = _ruled_out(turn, tools.settings)
        if entry is not None:
            lease = verdicts.Lease(entry.num_tokens, turn.entry_remaining_s, entry.held)
            worker = tools.pool.holder(entry.decode_endpoint, entry.epoch)
            if worker is not None and worker.info is not None:
                holder = _describe(worker, entry, turn)
                turn.holder = worker if holder.same_epoch else None
            if ruled_out is None:
                expected = verdicts.expect(turn.scope.digest_key, turn.request.prompt_token_ids, entry)
        settings = tools.settings
        threshold = settings.kv_recompute_threshold
        work = rates = costs = None
        if expected is not None:
            work, rates = _work(turn, tools, expected)
            costs = cost_model.expected(work, rates)
        question = verdicts.Question(
            prompt_tokens=turn.prompt_tokens,
            threshold=turn.served.kv_recompute_threshold if threshold is None else threshold,
            ruled_out=ruled_out,
            lease=lease,
            holder=holder,
            expected=expected,
            direct=_direct_limits(turn, settings),
            costs=costs if settings.by_cost else None,
        )
        turn.decision = verdicts.decide(question)
        turn.weighed = turn.weighed or Weighed(question, turn.decision, work, rates, costs)


def _work(turn: Turn, tools: Tools, expected: verdicts.Expected) -> tuple[cost_model.Work, cost_model.Rates]:
    prefill = tools.pool.likely_prefill(turn.served, turn.home)
    reusable = max(0, min(expected.upper, turn.prompt_tokens) - 1)
    work = cost_model.Work(
        prompt=turn.prompt_tokens,
        reusable=reusable,
        at_holder=turn.holder is not None,
        prefill_wait_ms=prefill.pending_ms if prefill is not None else 0.0,
        decode_wait_ms=turn.holder.pending_ms if turn.holder is not None else 0.0,
    )
    return work, tools.book.rates(turn.served, prefill, turn.holder)


def _describe(worker: DecodeWorker, entry: lease_pb2.DirectoryEntry, turn: Turn) -> verdicts.Holder:
    info = worker.info
    assert info is not None
    can_serve = turn.served.fits(info) and info.bidirectional_kv_xfer
    return verdicts.Holder(
        ready=worker.reachable,
        same_epoch=info.epoch == entry.epoch,
        can_serve_reads=can_serve,
        can_go_on=can_serve and info.prefix_caching and not worker.draining,
        direct_tokens=worker.direct_tokens,
    )


def _direct_limits(turn: Turn, settings: RouterSettings) -> verdicts.DirectLimits | None:
    if not settings.direct or turn.direct_refused:
        return None
    return verdicts.DirectLimits(settings.direct_max_suffix, settings.direct_budget_tokens)


def _ruled_out(turn: Turn, settings: RouterSettings) -> "turn_pb2.ReuseReason.ValueType | None":
    request = turn.request
    if not settings.reuse or request.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID:
        return Why.REUSE_REASON_DISABLED
    if not request.conversation_id and not request.parent_conversation_id:
        return Why.REUSE_REASON_NO_CONVERSATION
    if request.sampling.HasField("prompt_logprobs"):
        return Why.REUSE_REASON_FULL_PREFILL_NEEDED
    if turn.directory_failed:
        return Why.REUSE_REASON_DIRECTORY_UNAVAILABLE
    return None


async def look_again(turn: Turn, tools: Tools) -> None:
    """After a worker found the lease gone: a sibling may have published a longer one meanwhile.

    A turn looks again at most once, and goes cold when the directory still names the lease that is gone.
    """
    assert not turn.looked_again
    turn.looked_again = True
    gone = turn.entry.lease_id if turn.entry is not None else ""
    with turn.timed("lookup_again"):
        try:
            _take(turn, await _look(_scopes(turn, tools), tools))
        except DirectoryUnavailable:
            turn.entry = None
    if turn.entry is not None and turn.entry.lease_id == gone:
        turn.entry = None
    verdict(turn, tools)
