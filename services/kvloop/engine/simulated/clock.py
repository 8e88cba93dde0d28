"""Clocks with timers: the loop's own, a virtual one, and the shiftable one that each engine looks at."""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from kvloop.runtime.clock import Clock, SystemClock

T = TypeVar("T")

SETTLE_TURNS = 50
"""Turns of the event loop that a virtual clock grants before it moves on."""


class Timer(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """Call it off. Idempotent."""
        ...


class TimerClock(Clock, Protocol):
    """A clock that can be waited on."""

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Call back once, delay_s from now."""
        ...


class LoopClock(SystemClock):
    """The machine's clock and the running loop's timers."""

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Call back once, delay_s from now."""
        return asyncio.get_running_loop().call_later(delay_s, callback)


class _VirtualTimer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], Any]) -> None:
        self.callback: Callable[[], Any] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that passes only when told, or as fast as nobody has anything left to do before it does."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Return the virtual seconds."""
        return self._now

    def wall(self) -> float:
        """Return the virtual seconds, as a date long ago."""
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Call back once, delay_s of virtual time from now."""
        timer = _VirtualTimer(callback)
        heapq.heappush(self._timers, (self._now + max(delay_s, 0.0), next(self._order), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Let so much time pass; whatever falls due meanwhile happens in order."""
        end = self._now + seconds
        await _settle()
        while self._next_due(end):
            await _settle()
        self._now = end
        await _settle()

    async def run(self, awaitable: Awaitable[T], *, quiet: int = SETTLE_TURNS) -> T:
        """Return what the awaitable gives; time jumps to the next timer whenever all is quiet.

        quiet: turns of the event loop after which it is; more than the longest run of work that takes no
        time.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                await _settle(task, quiet)
                if not task.done():
                    self._next_due(float("inf"))
        finally:
            task.cancel()
        return await task

    def _next_due(self, end: float) -> bool:
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            callback = timer.callback
            if callback is not None:
                self._now = max(self._now, when)
                timer.cancel()
                callback()
                return True
        return False


async def _settle(task: "asyncio.Future[Any] | None" = None, turns: int = SETTLE_TURNS) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
        if task is not None and task.done():
            return


class ShiftedClock:
    """A base clock whose time can jump."""

    def __init__(self, base: TimerClock) -> None:
        self._base = base
        self._shift = 0.0

    def monotonic(self) -> float:
        """Return the base's seconds and the shift."""
        return self._base.monotonic() + self._shift

    def wall(self) -> float:
        """Return the base's wall time and the shift."""
        return self._base.wall() + self._shift

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Call back once, delay_s from now; jumps leave running timers alone."""
        return self._base.call_later(delay_s, callback)

    def jump(self, seconds: float) -> None:
        """Move the time."""
        self._shift += seconds


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def sleep(clock: TimerClock, seconds: float) -> None:
    """Wait for so many seconds of the clock; not at all for none."""
    if seconds <= 0:
        return
    future = asyncio.get_running_loop().create_future()
    timer = clock.call_later(seconds, lambda: _wake(future))
    try:
        await future
    finally:
        timer.cancel()
