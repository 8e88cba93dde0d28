"""Workers that announce themselves in the store.

The registry is a hint like everything in the store: a worker that is named there is asked for its own facts
before it gets a turn, and one that is named no more is forgotten only once it does not answer either, so
that a store that restarts empty takes nobody's workers away. Workers named in the settings are never
forgotten; where no others are to be used, the registry still tells how busy the named ones are.
"""

import asyncio
from collections.abc import Collection, Mapping
from functools import lru_cache

from kvloop.metastore.registry import Worker as Announced
from kvloop.metastore.registry import WorkerRegistry
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime import endpoints, logs

_ROLES = ("prefill", "decode")

_log = logs.get("router")


class Discovery:
    """Keeps a pool in step with a registry."""

    def __init__(
        self, pool: WorkerPool, named: Collection[AnyWorker] | None = None, *, finds: bool = True
    ) -> None:
        """Take the pool, and those that the settings name at any time; absent: those that it has now.

        finds: whether workers that are not in the pool are taken in; otherwise the registry only tells how
        busy those are that are, under whatever name.
        """
        self._pool = pool
        self._finds = finds
        self._named = frozenset((*pool.prefill, *pool.decode)) if named is None else named

    async def follow(self, registry: WorkerRegistry) -> None:
        """Take in what the registry says, for ever."""
        async for announced in registry.watch():
            await self.apply(announced)

    async def apply(self, announced: Mapping[str, Announced]) -> None:
        """Take in one reading of the registry."""
        found = {
            (worker.role, at): worker
            for worker in announced.values()
            if worker.role in _ROLES and (at := usable_endpoint(worker.endpoint)) is not None
        }
        if not self._finds:
            self._hear(found)
            return
        gone: list[AnyWorker] = []
        for role, worker in self._known():
            says = found.pop((role, worker.endpoint), None)
            if says is not None:
                worker.announced(says.epoch, says.load, draining=says.draining, capacity=says.capacity)
            elif worker not in self._named and not worker.present:
                gone.append(worker)
        for worker in gone:
            _log.info("worker_forgotten", worker=worker.name, endpoint=worker.endpoint)
            await self._pool.remove(worker)
        await asyncio.gather(*(self._take_in(role, at, says) for (role, at), says in found.items()))

    def _hear(self, found: Mapping[tuple[str, str], Announced]) -> None:
        by_epoch = {(role, says.epoch): says for (role, _), says in found.items()}
        for role, worker in self._known():
            epoch = worker.info.epoch if worker.info is not None else ""
            says = found.get((role, worker.endpoint)) or by_epoch.get((role, epoch))
            if says is not None:
                worker.announced(says.epoch, says.load, draining=says.draining, capacity=says.capacity)

    async def _take_in(self, role: str, endpoint: str, says: Announced) -> None:
        worker = await self._pool.add(role, endpoint)
        worker.announced(says.epoch, says.load, draining=says.draining, capacity=says.capacity)
        _log.info("worker_found", role=role, endpoint=endpoint)

    def _known(self) -> list[tuple[str, AnyWorker]]:
        return [
            *(("prefill", worker) for worker in self._pool.prefill),
            *(("decode", worker) for worker in self._pool.decode),
        ]


@lru_cache(maxsize=8192)
def usable_endpoint(text: str) -> str | None:
    """Return what the registry says of where a worker is, as host:port; None when it says nothing usable."""
    try:
        endpoint = endpoints.parse(text)
    except ValueError:
        return None
    return str(endpoint) if endpoint.port else None
