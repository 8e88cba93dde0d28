"""What is settled before the first leg: where the history might be, and how to come by the prompt's KV."""

import asyncio
from collections.abc import Sequence

from kvloop.metastore.hints import hint_lengths
from kvloop.metastore.port import DirectoryUnavailable, PrefixFound
from kvloop.router import belonging, placing
from kvloop.router import costs as cost_model
from kvloop.router import verdict as verdicts
from kvloop.router.explain import Weighed
from kvloop.router.identity import Owner
from kvloop.router.settings import RouterSettings
from kvloop.router.turn import Tools, Turn
from kvloop.router.verdict import Why
from kvloop.router.worker import DecodeWorker
from kvloop.runtime.digests import hint_group
from kvloop.v1alpha1 import lease_pb2, router_service_pb2, turn_pb2

_ROUND_TRIPS = 2
"""Of a lookup, at most: names or hints, then on a cluster what the hints lead to."""


async def lookup(turn: Turn, tools: Tools) -> None:
    """Find the newest lease of the conversation, or of its parent, or of the prompt's longest held beginning.

    One round trip (two on a cluster), or cold.
    """
    with turn.timed("lookup"):
        # The start of a turn only settles whose lease stays in the directory when two turns of one
        # conversation end at about the same time. A router's clock that is off can lose the later turn's
        # lease, which costs a cold turn; what is read is proven by digests all the same.
        turn.scope.turn_start_us = int(tools.clock.wall() * 1e6)
        names = _names(turn, tools, belonging.owners(turn, tools))
        try:
            found = await _look(turn, tools, [*names])
        except DirectoryUnavailable:
            turn.directory_failed = True
            return
        if found is not None:
            useful = belonging.join(turn, tools, found, names.get(found.scope, turn.owner))
            turn.scope.turn_start_us = found.found.turn_start_us
            _take(turn, found if useful else None)


async def _look(turn: Turn, tools: Tools, scopes: Sequence[bytes]) -> PrefixFound | None:
    """Ask the directory; None when there is nothing to ask for. Raises DirectoryUnavailable."""
    digests = _beginnings(turn, tools)
    if not scopes and not digests:
        return None
    try:
        # A store bounds each round trip itself, and what ends there opens its breaker; a turn that gave up at
        # the same time would keep that from happening.
        async with asyncio.timeout(_ROUND_TRIPS * tools.settings.directory_timeout_ms / 1000):
            if len(scopes) == 1 and not digests:
                found = await tools.directory.lookup(scopes[0])
                return PrefixFound(scopes[0] if found.entry is not None else b"", -1, found)
            return await tools.directory.find_by_prefix(hint_group(turn.scope.digest_key), digests, scopes)
    except TimeoutError:
        raise DirectoryUnavailable from None


def _names(turn: Turn, tools: Tools, owners: Sequence[Owner]) -> dict[bytes, Owner]:
    """Return the scopes that a lease may have, the best one's first, and whose each is."""
    if not tools.settings.reuse:
        return {}
    conversation, parent = turn.request.conversation_id, turn.request.parent_conversation_id
    scopes: dict[bytes, Owner] = {}
    for name in dict.fromkeys(name for name in (conversation, parent) if name):
        own = turn.scope.scope if name == conversation else tools.identities.scope(turn.owner, name)
        # A fork goes where the conversation that it comes from has left its prefix.
        turn.home = own
        scopes[own] = turn.owner
        for owner in owners[1:]:
            scopes[tools.identities.scope(owner, name)] = owner
    return scopes


def _beginnings(turn: Turn, tools: Tools) -> list[bytes]:
    """Return the digests by which a lease is looked for that no name leads to."""
    settings = tools.settings
    if not settings.prefix_hints or _forbidden(turn, settings) is not None:
        return []
    return [turn.prefixes.digest(length) for length in hint_lengths(turn.prompt_tokens)]


def _take(turn: Turn, found: PrefixFound | None) -> None:
    turn.entry = found.found.entry if found is not None else None
    turn.entry_remaining_s = found.found.remaining_s if found is not None else 0.0
    turn.found_scope = found.scope if found is not None else b""
    turn.by_prefix = found is not None and found.position >= 0
    turn.moves, turn.predecessor = False, None


def verdict(turn: Turn, tools: Tools, *, direct: bool = True) -> None:
    """Decide how the prompt's KV comes about, from what is known before the first leg.

    direct: whether the turn may still go without a prefill leg.
    """
    with turn.timed("verdict"):
        entry = turn.entry
        turn.holder = None
        lease = holder = expected = None
        ruled_out = _ruled_out(turn, tools.settings)
        if entry is not None:
            lease = verdicts.Lease(entry.num_tokens, turn.entry_remaining_s, entry.held)
            worker = tools.pool.holder(entry.decode_endpoint, entry.epoch)
            if worker is not None and worker.info is not None:
                holder = _describe(worker, entry, turn, tools)
                turn.holder = worker if holder.same_epoch else None
            if ruled_out is None:
                expected = verdicts.expect(turn.scope.digest_key, turn.prompt, entry, turn.prefixes)
                if turn.by_prefix:
                    _join(turn, entry, expected)
        settings = tools.settings
        threshold = settings.kv_recompute_threshold
        work = rates = costs = None
        if expected is not None:
            stays = turn.holder is not None and holder is not None and not holder.overloaded
            work, rates = _work(turn, tools, expected, at_holder=stays)
            costs = cost_model.expected(work, rates)
        question = verdicts.Question(
            prompt_tokens=turn.prompt_tokens,
            threshold=turn.served.kv_recompute_threshold if threshold is None else threshold,
            ruled_out=ruled_out,
            lease=lease,
            holder=holder,
            expected=expected,
            direct=_direct_limits(turn, settings) if direct else None,
            costs=costs if settings.by_cost and not _reads_back_anyway(turn) else None,
        )
        turn.decision = verdicts.decide(question)
        turn.weighed = turn.weighed or Weighed(question, turn.decision, work, rates, costs)


def decode_ahead(turn: Turn, tools: Tools) -> placing.Measure:
    """Return how much is ahead of a turn at decode workers."""
    rates = tools.book.rates(turn.served, None, None)
    return placing.decode_ms(rates.first_step_ms, tools.pool.least_capacity(turn.served))


def _work(
    turn: Turn, tools: Tools, expected: verdicts.Expected, *, at_holder: bool
) -> tuple[cost_model.Work, cost_model.Rates]:
    reusable = max(0, min(expected.upper, turn.prompt_tokens) - 1)
    own_ms = cost_model.prefill_leg(reusable, turn.prompt_tokens, tools.book.rates(turn.served, None, None))
    ahead = placing.prefill_ms(own_ms)
    prefill = tools.pool.likely_prefill(turn.served, turn.home, ahead)
    work = cost_model.Work(
        prompt=turn.prompt_tokens,
        reusable=reusable,
        at_holder=at_holder,
        # Other routers' turns there count as much as they do when a worker is chosen.
        prefill_wait_ms=ahead.of(prefill) if prefill is not None and own_ms > 0 else 0.0,
        decode_wait_ms=turn.holder.pending_ms if turn.holder is not None else 0.0,
    )
    return work, tools.book.rates(turn.served, prefill, turn.holder)


def _describe(
    worker: DecodeWorker, entry: lease_pb2.DirectoryEntry, turn: Turn, tools: Tools
) -> verdicts.Holder:
    info = worker.info
    assert info is not None
    can_serve = turn.served.fits(info) and info.bidirectional_kv_xfer
    return verdicts.Holder(
        ready=worker.reachable,
        same_epoch=info.epoch == entry.epoch,
        can_serve_reads=can_serve,
        can_go_on=can_serve and info.prefix_caching and not worker.leaving,
        direct_tokens=worker.direct_tokens,
        overloaded=can_serve and tools.pool.is_overloaded(turn.served, worker, decode_ahead(turn, tools)),
    )


def _direct_limits(turn: Turn, settings: RouterSettings) -> verdicts.DirectLimits | None:
    if not settings.direct or turn.direct_refused or _reads_back_anyway(turn):
        return None
    return verdicts.DirectLimits(settings.direct_max_suffix, settings.direct_budget_tokens)


def _reads_back_anyway(turn: Turn) -> bool:
    return turn.request.reuse_policy == router_service_pb2.REUSE_POLICY_READBACK


def _join(turn: Turn, entry: lease_pb2.DirectoryEntry, expected: verdicts.Expected) -> None:
    """Settle what a turn has to do with the conversation that its prompt's beginning led to."""
    # Many conversations may begin alike; only one that is mostly the same belongs where the other one is.
    turn.moves = 2 * expected.matched < turn.prompt_tokens
    if not turn.moves:
        turn.home = turn.found_scope
    # A turn without a name that goes on from all that another one left is its successor: what it leaves
    # holds that too, under the same hints, so whoever else goes on from there misses nothing.
    unnamed = not turn.request.conversation_id and not entry.conversation_id
    if unnamed and not expected.diverged and expected.matched == entry.num_tokens:
        turn.predecessor = entry


def _forbidden(turn: Turn, settings: RouterSettings) -> "turn_pb2.ReuseReason.ValueType | None":
    request = turn.request
    if not settings.reuse or request.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID:
        return Why.REUSE_REASON_DISABLED
    if request.sampling.HasField("prompt_logprobs"):
        return Why.REUSE_REASON_FULL_PREFILL_NEEDED
    return None


def _ruled_out(turn: Turn, settings: RouterSettings) -> "turn_pb2.ReuseReason.ValueType | None":
    request = turn.request
    forbidden = _forbidden(turn, settings)
    if forbidden == Why.REUSE_REASON_DISABLED:
        return forbidden
    named = request.conversation_id or request.parent_conversation_id
    if not named and turn.entry is None and not turn.directory_failed:
        return Why.REUSE_REASON_NO_CONVERSATION
    if forbidden is None and turn.directory_failed:
        return Why.REUSE_REASON_DIRECTORY_UNAVAILABLE
    return forbidden


async def look_again(turn: Turn, tools: Tools, *, direct: bool = True) -> None:
    """After a worker found the lease gone: a sibling may have published a longer one meanwhile.

    A turn looks again at most once, and goes cold when the directory still names the lease that is gone.
    direct: as for verdict.
    """
    assert not turn.looked_again
    turn.looked_again = True
    gone = turn.entry.lease_id if turn.entry is not None else ""
    with turn.timed("lookup_again"):
        try:
            # In the group that serves it by now.
            _take(turn, await _look(turn, tools, [*_names(turn, tools, [turn.owner])]))
        except DirectoryUnavailable:
            turn.entry = None
    if turn.entry is not None and turn.entry.lease_id == gone:
        turn.entry = None
    verdict(turn, tools, direct=direct)
