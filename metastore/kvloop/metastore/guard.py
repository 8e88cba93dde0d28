"""What bounds the harm of a bad store, as a decorator of a link: deadline, bounded concurrency, breaker.

Each node of a cluster has its own breaker, so that a lost node costs the turns of its slots only.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvloop.metastore.breaker import Breaker
from kvloop.metastore.classify import OPENING, classify
from kvloop.metastore.link import Link
from kvloop.metastore.port import DirectoryUnavailable, Outage
from kvloop.metastore.scripts import Script

DEADLINE_S = 0.025
CONNECT_S = 1.0
MAX_CONCURRENT = 1024


class GuardedLink:
    """A link whose every operation ends within its deadline, and in DirectoryUnavailable if at all."""

    def __init__(
        self,
        inner: Link,
        *,
        deadline_s: float = DEADLINE_S,
        connect_s: float = CONNECT_S,
        max_concurrent: int = MAX_CONCURRENT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Take the link, the time of one operation, and of one probe or check."""
        self._inner = inner
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._sleep = sleep
        self._rng = rng
        self._breakers: dict[str, Breaker] = {}
        self._closed = False
        self.outages: Counter[Outage] = Counter()
        self.attempts = 0

    @property
    def clustered(self) -> bool:
        """Tell whether keys are spread over nodes."""
        return self._inner.clustered

    @property
    def degraded(self) -> bool:
        """Tell whether the breaker of any node is open."""
        return any(breaker.open for breaker in self._breakers.values())

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a script; raises DirectoryUnavailable."""
        breaker = self._admit(keys[0])
        return await self._bounded(breaker, self._inner.run(script, keys, *args))

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command; raises DirectoryUnavailable."""
        breaker = self._admit(key)
        return await self._bounded(breaker, self._inner.command(name, key, *args))

    def _admit(self, key: bytes) -> Breaker:
        if self._closed:
            raise self._unavailable(Outage.CLOSED)
        route = self._inner.route(key)
        breaker = self._breakers.get(route)
        if breaker is None:
            breaker = Breaker(lambda: self._probe(route), sleep=self._sleep, rng=self._rng)
            self._breakers[route] = breaker
        if breaker.open:
            raise self._unavailable(Outage.BREAKER)
        return breaker

    async def _bounded(self, breaker: Breaker, operation: Awaitable[Any]) -> Any:
        started = False
        self.attempts += 1
        try:
            async with asyncio.timeout(self._deadline_s), self._slots:
                started = True
                return await operation
        except Exception as error:  # noqa: BLE001 - clients of broken servers raise anything
            outage = classify(error) if started else Outage.POOL
            if outage in OPENING and not self._closed:
                breaker.trip()
            # The cause may quote values; it goes no further.
            raise self._unavailable(outage) from None
        finally:
            if not started:
                operation.close()  # type: ignore[attr-defined]

    async def _probe(self, route: str) -> None:
        async with asyncio.timeout(self._connect_s):
            present = await self._inner.probe(route, anew=True)
        if present:
            # Connected; now as fast as operations need it.
            async with asyncio.timeout(self._deadline_s):
                await self._inner.probe(route, anew=False)

    async def facts(self) -> list[dict[str, str]]:
        """Return INFO of every primary within the time of a connection; raises DirectoryUnavailable."""
        if self._closed:
            raise self._unavailable(Outage.CLOSED)
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._inner.facts()
        except Exception as error:  # noqa: BLE001
            raise self._unavailable(classify(error)) from None

    def _unavailable(self, outage: Outage) -> DirectoryUnavailable:
        self.outages[outage] += 1
        return DirectoryUnavailable(outage)

    async def close(self) -> None:
        """End probing and close connections; what fails while closing is no news."""
        if self._closed:
            return
        self._closed = True
        for breaker in self._breakers.values():
            await breaker.close()
        try:
            async with asyncio.timeout(self._connect_s):
                await self._inner.close()
        except Exception as error:  # noqa: BLE001
            self.outages[classify(error)] += 1
