"""The answer's first token, from where its prompt was computed.

A prefill engine samples a token in any case. Passed on at once, it spares the first token the hand-over and
a step of the decode engine, which goes on with prompt and token as in a migration, and computes as many
positions as otherwise: the answer's first token instead of the prompt's last one. So it is done where an
answer could be continued (migration.py), and that is also how the turn survives a decode leg that fails.

A client may leave as soon as it has a token. The decode leg then goes on to its first event all the same:
from then on what a cancelled turn is to leave behind is with the decode engine, and the prefill engine has
its blocks back.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from kvloop.router.migration import is_greedy, keeps_state
from kvloop.router.turn import Tools, Turn
from kvloop.v1alpha1 import router_service_pb2

_LONGEST_S = 10.0
"""How long a decode leg may go on without its client."""


def asks(turn: Turn, tools: Tools) -> bool:
    """Tell whether the prefill leg is to bring the next token of the answer."""
    settings, sampling = tools.settings, turn.leg_sampling
    return (
        settings.first_token_from_prefill
        and settings.max_migrations > 0
        and turn.replay is None
        and not keeps_state(sampling)
        and sampling.max_tokens > 1
        and not sampling.HasField("prompt_logprobs")
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
    """Run a decode leg; cancelled before its first event, it ends with that, in the background."""
    heard, task = turn.heard, asyncio.ensure_future(leg)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if turn.heard > heard:
            task.cancel()
        else:
            turn.on_first_event = partial(_cancel, task)
        tools.background.tell(_ended(task))
        raise


def _cancel(task: "asyncio.Future[None]") -> None:
    task.cancel()


async def _ended(task: "asyncio.Future[None]") -> None:
    _, late = await asyncio.wait([task], timeout=_LONGEST_S)
    for one in late:
        one.cancel()
    await asyncio.gather(task, return_exceptions=True)
