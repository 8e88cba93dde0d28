"""Other weights under the same name, in one worker, without a token of the old ones' KV left anywhere.

The worker admits no new turns, lets those in progress end, and lets go of all it holds; when no block is in
use the prefix cache is emptied and the weights are loaded, under a new epoch and a new compatibility. KV of
the old weights can't come back: leases are revoked, entries carry the old epoch, workers that have reloaded
are not paired with workers that have not, and engines refuse each other's handles.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvloop.engine.port import Engine
from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason, invalid

MAX_VERSION_CHARS = 64
RETRY_AFTER_S = 1.0
POLL_S = 0.02

_log = logs.get("worker")


class Reloading:
    """Reloads of one worker, one at a time."""

    def __init__(self, engine: Engine, let_go: Callable[[], Awaitable[None]]) -> None:
        """let_go: returns once no turn is in progress and nothing is held on purpose."""
        self._engine = engine
        self._let_go = let_go
        self._in_progress = False

    def admit(self) -> None:
        """Raise Failure DRAINING (with RetryInfo) while a reload is in progress."""
        if self._in_progress:
            raise Failure(
                Reason.ERROR_REASON_DRAINING, "weights are being loaded", retry_after_s=RETRY_AFTER_S
            )

    async def run(self, version: str, time_left_s: float) -> str:
        """Load the weights anew; return the new epoch.

        version: a name for them, the same on all workers that take them. Failures: INVALID_FIELD; DRAINING
        while another reload is in progress; DEADLINE_EXCEEDED when turns or readers did not end in time:
        leases are gone then, but the weights are the old ones and turns are admitted again.
        """
        if not 0 < len(version) <= MAX_VERSION_CHARS:
            raise invalid("weights_version", f"must have 1 to {MAX_VERSION_CHARS} characters")
        async with self._alone():
            try:
                async with asyncio.timeout(time_left_s):
                    await self._let_go()
                    while not await self._engine.reset_prefix_cache():  # noqa: ASYNC110 - readers end elsewhere
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise Failure(
                    Reason.ERROR_REASON_DEADLINE_EXCEEDED, "turns or readers did not end in time"
                ) from None
            await self._engine.reload_weights(version)
        epoch = self._engine.facts.epoch
        _log.info("weights_reloaded", epoch=epoch)
        return epoch

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self.admit()
        self._in_progress = True
        try:
            yield
        finally:
            self._in_progress = False
