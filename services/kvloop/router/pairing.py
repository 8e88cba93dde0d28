"""Which two workers serve an attempt of a turn, and the places that it takes there."""

import asyncio

from kvloop.router import placing
from kvloop.router import verdict as verdicts
from kvloop.router.costs import prefill_leg
from kvloop.router.planning import decode_ahead, verdict
from kvloop.router.turn import Tools, Turn
from kvloop.router.verdict import Verdict, Why
from kvloop.router.workers import Pair
from kvloop.runtime.errors import Failure, Reason

_LOOK_AGAIN_S = 0.1


async def place(turn: Turn, tools: Tools) -> None:
    """Choose the two workers of a new attempt. Failure NO_WORKER."""
    with turn.timed("place"):
        turn.new_attempt()
        limit = tools.settings.max_turns_per_worker
        if turn.is_direct and turn.holder is not None and limit is not None and turn.holder.places >= limit:
            turn.direct_refused = True
            verdict(turn, tools)
        if turn.is_direct:
            assert turn.holder is not None
            turn.pair = Pair(None, turn.holder)
            _take_places(turn)
            return
        reads_back = turn.decided.verdict == Verdict.VERDICT_READBACK
        turn.pair = await _pick(turn, tools, reads_back=reads_back)
        _take_places(turn)
        info = turn.pair.prefill.info if turn.pair.prefill is not None else None
        # A prefill engine that can't read back would wait for the handle's blocks for ever.
        if reads_back and (info is None or not info.bidirectional_kv_xfer):
            turn.decision = verdicts.cold(Why.REUSE_REASON_INCOMPATIBLE)
        elif reads_back and _rests(turn, tools):
            turn.decision = verdicts.cold(Why.REUSE_REASON_READ_FAILED)


async def _pick(turn: Turn, tools: Tools, *, reads_back: bool) -> Pair:
    settings = tools.settings
    patience = settings.migration_wait_s if turn.streaming else settings.worker_wait_s
    until = tools.clock.monotonic() + min(patience, turn.time_left_s())
    ahead = _ahead(turn, tools)

    def find() -> Pair | None:
        return _find(turn, tools, ahead, reads_back=reads_back)

    while True:
        try:
            # An answer that has begun does not stand in the line, which may be full.
            if turn.streaming and (found := find()) is not None:
                return found
            return await tools.admission.place(find, turn.time_left_s(), turn.patience)
        except Failure as failure:
            # A worker that pauses or restarts is soon ready again.
            if failure.reason != Reason.ERROR_REASON_NO_WORKER or tools.clock.monotonic() >= until:
                raise
            await asyncio.sleep(_LOOK_AGAIN_S)


def _ahead(turn: Turn, tools: Tools) -> placing.Ahead:
    rates = tools.book.rates(turn.served, None, None)
    own_ms = prefill_leg(turn.to_read, turn.prompt_tokens, rates)
    return placing.Ahead(placing.prefill_ms(own_ms), decode_ahead(turn, tools))


def _find(turn: Turn, tools: Tools, ahead: placing.Ahead, *, reads_back: bool) -> Pair | None:
    try:
        return tools.pool.pick(
            turn.served,
            prefer_decode=None if turn.moves else turn.holder,
            avoid=turn.avoid,
            reads_back=reads_back,
            home=turn.home,
            reads_from=turn.holder if reads_back else None,
            # An answer that has begun does not wait behind those that have not.
            limit=None if turn.streaming else tools.settings.max_turns_per_worker,
            ahead=ahead,
        )
    except Failure as failure:
        if failure.reason == Reason.ERROR_REASON_OVERLOADED:
            return None
        raise


def _rests(turn: Turn, tools: Tools) -> bool:
    pair, holder = turn.pair, turn.holder
    if pair is None or pair.prefill is None or holder is None:
        return False
    return tools.pool.pairs.rests(pair.prefill, holder)


def _take_places(turn: Turn) -> None:
    assert turn.pair is not None
    for worker in (turn.pair.prefill, turn.pair.decode):
        if worker is not None:
            worker.places += 1
            turn.places.append(worker)
