"""Leases of live conversations outlive their own TTL.

While an agent holds a session open, a router keeps its conversation's alive key in the directory. Shortly
before such a lease's entry would end, it is prolonged by its own TTL, by a minute at most: hold, entry and
hints; so it never outlives the last sign of life by more than that. Nothing is prolonged past the longest
hold, and a prolonged hold is evicted like any other when room is needed.

Leases wait in a heap for the time at which they are looked at. Those due together cost one call of the
directory; a lease that is far from its end costs nothing. One whose conversation shows no life is looked at
again, each time after two thirds of what it has left: a session opened late, or a store that was away for a
moment, still saves it.
"""

import asyncio
import contextlib
import heapq
import itertools
from dataclasses import dataclass

from kvloop.decode.keeper import Keeper
from kvloop.decode.lease import Lease
from kvloop.decode.publishing import Publisher
from kvloop.engine.port import Engine
from kvloop.metastore.port import Standing
from kvloop.runtime import logs
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure

MOST_AT_ONCE = 256
PAUSE_S = 0.1
"""Between two looks at the heap: what falls due meanwhile is asked about together."""
_AHEAD = 4
_AGAIN = 2 / 3

_log = logs.get("decode")


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """Seconds."""

    longest_step_s: float = 60.0
    """Longest time by which a lease is prolonged at once."""
    max_ttl_s: float = 3600.0
    """Longest time after its turn for which a lease is held."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    lease: Lease
    step_s: float
    latest: float
    """Monotonic second past which the lease is not prolonged."""


class Prolonger:
    """Looks at leases before they end."""

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        publisher: Publisher,
        clock: Clock,
        policy: LivePolicy = LivePolicy(),
    ) -> None:
        self.prolonged = 0
        self._engine = engine
        self._keeper = keeper
        self._publisher = publisher
        self._clock = clock
        self._policy = policy
        self._due: list[tuple[float, int, _Waiting]] = []
        self._serial = itertools.count()
        self._stir = asyncio.Event()

    def add(self, lease: Lease) -> None:
        """Look after a lease that has just become one."""
        now = self._clock.monotonic()
        step_s = min(lease.remaining_s(now), self._policy.longest_step_s)
        self._wait_for_end(_Waiting(lease, step_s, now + self._policy.max_ttl_s), now)

    async def run(self) -> None:
        """Prolong what is to be prolonged, for ever."""
        while True:
            self._stir.clear()
            wait_s = self._due[0][0] - self._clock.monotonic() if self._due else None
            if wait_s is None or wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stir.wait(), wait_s)
                continue
            try:
                await self.sweep()
            except Exception as error:  # noqa: BLE001 - other leases are still to be looked at
                _log.error("prolonging_failed", error=type(error).__name__, exc_info=error)
            await asyncio.sleep(PAUSE_S)

    async def sweep(self) -> None:
        """Look at the leases that are due, MOST_AT_ONCE at most."""
        now = self._clock.monotonic()
        due: list[_Waiting] = []
        while self._due and self._due[0][0] <= now and len(due) < MOST_AT_ONCE:
            waiting = heapq.heappop(self._due)[2]
            if waiting.lease.is_live() and _until(waiting, now) > waiting.lease.deadline:
                due.append(waiting)
        if not due:
            return
        try:
            standings = await self._publisher.renew([(one.lease, _until(one, now) - now) for one in due])
        except BaseException:
            for one in due:
                self._look_again(one)
            raise
        results = await asyncio.gather(
            *(self._settle(one, standing, now) for one, standing in zip(due, standings, strict=True)),
            return_exceptions=True,
        )
        for error in results:
            if error is not None:
                raise error

    async def _settle(self, waiting: _Waiting, standing: Standing, now: float) -> None:
        lease, until = waiting.lease, _until(waiting, now)
        if standing not in {Standing.RENEWED, Standing.MISSING}:
            self._look_again(waiting)
            return
        try:
            held = await self._engine.extend(lease.lease_id, until - now)
        except Failure:
            self._look_again(waiting)
            return
        if not held:
            await self._keeper.lost(lease)
            return
        # Counted from before the hold's own: it never ends first.
        lease.deadline = max(lease.deadline, until)
        self.prolonged += 1
        if standing is Standing.MISSING:
            # The store has lost it; a session that is alive brings it back.
            await self._keeper.publish_again(lease)
        else:
            await self._publisher.hint_again(lease, until - now)
        self._wait_for_end(waiting, now)

    def _wait_for_end(self, waiting: _Waiting, now: float) -> None:
        # The entry ends before the lease does, and a turn that finds none goes cold.
        entry_s = self._publisher.entry_ttl_s(waiting.lease.remaining_s(now))
        ahead_s = self._publisher.entry_ttl_s(waiting.step_s) / _AHEAD
        self._wait(waiting, now + entry_s - ahead_s)

    def _look_again(self, waiting: _Waiting) -> None:
        now = self._clock.monotonic()
        left = waiting.lease.remaining_s(now)
        if left > PAUSE_S:
            self._wait(waiting, now + left * _AGAIN)

    def _wait(self, waiting: _Waiting, when: float) -> None:
        heapq.heappush(self._due, (when, next(self._serial), waiting))
        if self._due[0][2] is waiting:
            self._stir.set()


def _until(waiting: _Waiting, now: float) -> float:
    return min(now + waiting.step_s, waiting.latest)
