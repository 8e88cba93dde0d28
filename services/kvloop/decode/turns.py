"""The decode legs in progress, apart from the door through which they were asked for."""

import asyncio

from kvloop.decode.direct import Direct
from kvloop.decode.keeper import Keeper
from kvloop.decode.leg import Leg, check_request
from kvloop.engine.port import Engine
from kvloop.runtime.clock import Clock
from kvloop.runtime.metrics import Metrics
from kvloop.v1alpha1 import decode_service_pb2


class Turns:
    """Starts legs and waits for them."""

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        direct: Direct,
        clock: Clock,
        *,
        worker_id: str,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._direct = direct
        self._clock = clock
        self._worker_id = worker_id
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: decode_service_pb2.DecodeRequest) -> Leg:
        """Check a request and start its leg. Raises Failure; nothing is held then."""
        check_request(request, self._engine.facts)
        leg = Leg(
            request,
            self._engine,
            self._keeper,
            self._direct,
            clock=self._clock,
            worker_id=self._worker_id,
            metrics=self._metrics,
        )
        task = leg.start()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return leg

    def __len__(self) -> int:
        """Return how many legs are in progress, endings in the background included."""
        return len(self._tasks)

    async def finished(self) -> None:
        """Return when no leg is in progress."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Cancel what is left."""
        for task in list(self._tasks):
            task.cancel()
        await self.finished()
