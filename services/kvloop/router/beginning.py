"""The answer's first token, from where its prompt was computed.

A prefill engine samples a token in any case. Passed on at once, it spares the first token the hand-over and
a step of the decode engine, which goes on with prompt and token as in a migration, and computes as many
positions as otherwise: the answer's first token instead of the prompt's last one. So it is done where an
answer could be continued (migration.py), and that is also how the turn survives a decode leg that fails.

A client may leave as soon as it has a token. The decode leg then goes on to its first event all the same:
from then on the decode engine has something to hold, if it is to, and the prefill engine has its blocks back,
which nobody but a reader of them can tell it to let go of.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from kvloop.router.migration import is_greedy, keeps_state
from kvloop.router.turn import Tools, Turn, leave
from kvloop.router.worker import AnyWorker
from kvloop.v1alpha1 import router_service_pb2

_LONGEST_S = 3.0
"""How long a decode leg may go on without its client; also, how long a router that stops may wait for it."""


def asks(turn: Turn, tools: Tools) -> bool:
    """Tell whether the prefill leg is to bring the next token of the answer."""
    settings, sampling = tools.settings, turn.leg_sampling
    return (
        settings.first_token_from_prefill
        and settings.max_migrations > 0
        # A hand-over that failed may fail again, and each would add a token to what then breaks off.
        and turn.migrations == 0
        and not keeps_state(sampling)
        and sampling.max_tokens > 1
        and not sampling.HasField("prompt_logprobs")
        # Logprobs tell half a character's text by tokens of the same leg. A greedy answer that begins with
        # one begins in the decode leg.
        and (is_greedy(sampling) or not (sampling.HasField("logprobs") or sampling.logprob_token_ids))
    )


def begin(turn: Turn, tools: Tools) -> bytes | None:
    """Take the token that the prefill leg brought; return a serialized chunk, if it is to be passed on."""
    assert turn.prefilled is not None
    first = turn.prefilled.first
    if not first.token_ids:
        return None
    if first.finish_reason:
        # The decode leg tells the end, and holds the prompt. A sampled answer does not get a second chance.
        turn.ending = b"" if is_greedy(turn.sampling) else first.token_ids
        return None
    turn.begun = True
    turn.carried += first.token_ids
    if turn.first_event_at is None:
        turn.first_event_at = tools.clock.monotonic()
        turn.timings["first_chunk"] = (turn.first_event_at - turn.started) * 1000
    raw = router_service_pb2.GenerateResponse(chunk=first).SerializeToString()
    turn.sent.append(raw)
    return raw


async def to_first_event(turn: Turn, tools: Tools, leg: Coroutine[Any, Any, None]) -> None:
    """Run a decode leg; cancelled before its first event, it ends with that, in the background.

    It keeps its places at workers for as long.
    """
    heard, task = turn.heard, asyncio.ensure_future(leg)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        places: list[AnyWorker] = []
        if turn.heard > heard:
            task.cancel()
        else:
            places, turn.places = turn.places, places
            turn.on_first_event = partial(_cancel, task)
        tools.background.tell(_ended(turn, tools, task, places))
        raise


def _cancel(task: "asyncio.Future[None]") -> None:
    task.cancel()


async def _ended(turn: Turn, tools: Tools, task: "asyncio.Future[None]", places: list[AnyWorker]) -> None:
    try:
        _, late = await asyncio.wait([task], timeout=_LONGEST_S)
        for one in late:
            one.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        turn.places = places
        leave(turn, tools)
