"""Who is let in, and who waits: a bounded line before the first leg, and never one between the legs.

A router serves so many turns at a time, and gives each worker so many. A turn for which there is no room
waits, first come first served, as long as the line and its patience allow; then it is told when to come back.
The places at both workers of a turn are taken together, before its first leg.

The line for the router has a bound of its own. Turns that were let in may all wait for places: those that
came later take nothing from them. A turn has one patience, wherever it waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvloop.router.settings import RouterSettings
from kvloop.runtime.errors import Failure, Reason

_LOOK_AGAIN_S = 0.1
"""How often those who wait for places look: that a worker is ready, or its pause over, nobody says."""

V = TypeVar("V")


class Patience:
    """How much longer a turn waits in lines."""

    __slots__ = ("left_s",)

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s


class Admission:
    """The room that a router has, and the line for it."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.running = 0
        """Turns let in that have not ended."""
        self._doors: deque[asyncio.Future[None]] = deque()
        self._places: deque[asyncio.Future[None]] = deque()
        self._look_again: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Return how many turns wait, for room here or at workers."""
        return len(self._doors) + len(self._places)

    def close(self) -> None:
        """Let nobody in any more; those who wait to be let in are told."""
        self._closed = True
        for door in self._doors:
            if not door.done():
                door.set_result(None)

    def patience(self) -> Patience:
        """Return a new turn's."""
        return Patience(self._settings.queue_timeout_ms / 1000)

    async def enter(self, time_left_s: float, patience: Patience | None = None) -> None:
        """Take room for a turn, for leave to give back. Failures: OVERLOADED, DRAINING."""
        limit = self._settings.max_concurrent_turns

        def room() -> bool:
            if self._closed:
                raise draining()
            if self.running >= limit:
                return False
            self.running += 1
            return True

        # Nobody overtakes those who wait.
        if not (self._doors and not self._closed) and room():
            return
        refusal = partial(self._overloaded, "too many turns at once", limit)
        if len(self._doors) >= self._settings.max_queued_turns:
            raise refusal()
        patience = patience or self.patience()
        await self._wait(self._doors, lambda: room() or None, time_left_s, patience, refusal)

    def leave(self) -> None:
        """Give a turn's room back."""
        self.running -= 1
        _wake(self._doors)

    async def place(
        self, find: Callable[[], V | None], time_left_s: float, patience: Patience | None = None
    ) -> V:
        """Return what find returns as soon as it finds places at workers. Failure OVERLOADED."""
        if not self._places and (found := find()) is not None:
            return found
        limit = self._settings.max_turns_per_worker or 0
        # Those ahead look first; what fits none of them may fit this one.
        asyncio.get_running_loop().call_soon(self._look)
        refusal = partial(self._overloaded, "every worker has its turns", limit)
        return await self._wait(self._places, find, time_left_s, patience or self.patience(), refusal)

    def freed(self) -> None:
        """Say that a place at a worker is free."""
        _wake(self._places)

    def _look(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if self._places:
            _wake(self._places)
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    async def _wait(
        self,
        line: "deque[asyncio.Future[None]]",
        attempt: Callable[[], V | None],
        time_left_s: float,
        patience: Patience,
        refusal: Callable[[], Failure],
    ) -> V:
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        line.append(mine)
        begun = loop.time()
        try:
            async with asyncio.timeout(max(0.0, min(patience.left_s, time_left_s))):
                while True:
                    await mine
                    if (found := attempt()) is not None:
                        return found
                    # What is free now does not fit this one; perhaps it fits the next.
                    at = line.index(mine)
                    line[at] = mine = loop.create_future()
                    _wake(line, at + 1)
        except TimeoutError:
            raise refusal() from None
        finally:
            patience.left_s -= loop.time() - begun
            woken = mine.done() and not mine.cancelled()
            line.remove(mine)
            if woken:
                # Whoever leaves the line passes on what it was woken for; there may be more room.
                _wake(line)

    def _overloaded(self, why: str, limit: int) -> Failure:
        return Failure(
            Reason.ERROR_REASON_OVERLOADED,
            why,
            metadata={"limit": str(limit), "queued": str(self.waiting)},
            retry_after_s=self._settings.retry_after_ms / 1000,
        )


def draining() -> Failure:
    """Return the failure of a turn that comes to a router that is going away."""
    return Failure(Reason.ERROR_REASON_DRAINING, "this router is going away; use another", retry_after_s=0.1)


def _wake(line: "deque[asyncio.Future[None]]", first: int = 0) -> None:
    for waiting in list(line)[first:]:
        if not waiting.done():
            waiting.set_result(None)
            return
