"""A circuit breaker that recovers by itself.

One failure opens it; from then on callers fail at once. It is half open only to a probe of its own, off
every caller's path: no turn pays for finding out whether the store is back. Libraries known for this let a
caller's request be the probe, which costs that caller the full timeout again and again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Breaker:
    """Open or closed, with one probing task while open."""

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Take a probe that returns when the store is well and raises when not, and bounds its own time."""
        self._probe = probe
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._task: asyncio.Task[None] | None = None
        self.probes = 0
        self.openings = 0

    @property
    def open(self) -> bool:
        """Tell whether callers fail at once."""
        return self._task is not None

    def trip(self) -> None:
        """Open, and begin to probe."""
        if self._task is None:
            self.openings += 1
            self._task = asyncio.create_task(self._recover(), name="store-probe")

    async def close(self) -> None:
        """End probing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _recover(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            self.probes += 1
            try:
                await self._probe()
            except Exception:  # noqa: BLE001
                # Whatever it is, it isn't well yet. Full jitter: replicas don't come back in step.
                await self._sleep(self._rng.uniform(0.2, 1.0) * pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._task = None
                return
