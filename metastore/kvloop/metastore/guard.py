"""What bounds the harm of a bad store, as a decorator of a link: breaker and bounded concurrency.

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

MAX_CONCURRENT = 1024
CLOSE_S = 1.0


class GuardedLink:
    """A link whose operations fail with DirectoryUnavailable only, and at once while the store is away."""

    def __init__(
        self,
        inner: Link,
        *,
        max_concurrent: int = MAX_CONCURRENT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Take the link, how many operations may be on their way, and how probing waits."""
        self._inner = inner
        self._max_concurrent = max_concurrent
        self._sleep = sleep
        self._rng = rng
        self._breakers: dict[str, Breaker] = {}
        self._on_the_way = 0
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
        self._on_the_way += 1
        try:
            return await self._inner.run(script, keys, *args)
        except Exception as error:  # noqa: BLE001 - clients of broken servers raise anything
            # The cause may quote values; it goes no further.
            raise self._failed(breaker, error) from None
        finally:
            self._on_the_way -= 1

    async def command(self, name: str, key: bytes, *args: bytes | int | str) -> Any:
        """Run a command; raises DirectoryUnavailable."""
        breaker = self._admit(key)
        self._on_the_way += 1
        try:
            return await self._inner.command(name, key, *args)
        except Exception as error:  # noqa: BLE001
            raise self._failed(breaker, error) from None
        finally:
            self._on_the_way -= 1

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
        if self._on_the_way >= self._max_concurrent:
            raise self._unavailable(Outage.POOL)
        self.attempts += 1
        return breaker

    def _failed(self, breaker: Breaker, error: Exception) -> DirectoryUnavailable:
        outage = classify(error)
        if outage in OPENING and not self._closed:
            breaker.trip()
        return self._unavailable(outage)

    async def _probe(self, route: str) -> None:
        if not await self._inner.probe(route):
            # The store has no such node any more, and no key leads to it.
            self._breakers.pop(route, None)

    async def facts(self) -> list[dict[str, str]]:
        """Return INFO of every primary; raises DirectoryUnavailable."""
        if self._closed:
            raise self._unavailable(Outage.CLOSED)
        try:
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
        for breaker in list(self._breakers.values()):
            await breaker.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._inner.close()
        except Exception as error:  # noqa: BLE001
            self.outages[classify(error)] += 1
