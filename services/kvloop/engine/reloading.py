"""Other weights under the same name, in one worker, without a token of the old ones' KV left anywhere.

The worker admits no new turns, lets those in progress end, and lets go of all it holds; when no block is in
use the prefix cache is emptied and the weights are loaded, under a new epoch and a new compatibility. KV of
the old weights can't come back: leases are revoked, entries carry the old epoch, workers that have reloaded
are not paired with workers that have not, and engines refuse each other's handles.

Once loading has begun it is brought to its end, whatever becomes of the call that asked for it: an engine
must not serve new weights under the old ones' identity. One that failed to load serves nothing, since its
weights may be a mixture, until a later reload succeeds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvloop.engine.port import Engine
from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason, invalid

MAX_VERSION_CHARS = 64
RETRY_AFTER_S = 1.0
POLL_S = 0.02

_log = logs.get("worker")


class Reloading:
    """Reloads of one worker, one at a time."""

    def __init__(
        self,
        engine: Engine,
        let_go: Callable[[], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        """let_go: returns once no turn is in progress and nothing is held on purpose; spawn: runs what ends
        with the worker, not with a call.
        """
        self._engine = engine
        self._let_go = let_go
        self._spawn = spawn
        self._in_progress = False
        self._failed = False

    def admit(self) -> None:
        """Raise Failure DRAINING (with RetryInfo) during a reload, WORKER_FAILED after one that failed."""
        self._check_idle()
        if self._failed:
            raise Failure(
                Reason.ERROR_REASON_WORKER_FAILED, "weights were not loaded whole; they must be reloaded"
            )

    async def run(self, version: str, time_left_s: float) -> str:
        """Load the weights anew; return the new epoch.

        version: a name for them, the same on all workers that take them. Failures: INVALID_FIELD; DRAINING
        while another reload is in progress; DEADLINE_EXCEEDED when turns or readers did not end in time:
        leases are gone then, but the weights are the old ones and turns are admitted again.
        """
        if not 0 < len(version) <= MAX_VERSION_CHARS:
            raise invalid("weights_version", f"must have 1 to {MAX_VERSION_CHARS} characters")
        self._check_idle()
        self._in_progress = True
        try:
            await self._empty(time_left_s)
        except BaseException:
            self._in_progress = False
            raise
        await asyncio.shield(self._spawn(self._load(version)))
        return self._engine.facts.epoch

    async def _empty(self, time_left_s: float) -> None:
        try:
            async with asyncio.timeout(time_left_s):
                await self._let_go()
                while not await self._engine.reset_prefix_cache():  # noqa: ASYNC110 - readers end elsewhere
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Failure(
                Reason.ERROR_REASON_DEADLINE_EXCEEDED, "turns or readers did not end in time"
            ) from None

    async def _load(self, version: str) -> None:
        self._failed = True
        try:
            await self._engine.reload_weights(version)
            self._failed = False
            _log.info("weights_reloaded", epoch=self._engine.facts.epoch)
        finally:
            self._in_progress = False

    def _check_idle(self) -> None:
        if self._in_progress:
            raise Failure(
                Reason.ERROR_REASON_DRAINING, "weights are being loaded", retry_after_s=RETRY_AFTER_S
            )
