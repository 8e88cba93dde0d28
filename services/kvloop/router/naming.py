"""Workers behind one name of the settings.

A name may have several addresses (a headless service, a container that is scaled): each is a worker of its
own, and who is behind a name is looked up again and again. As long as there is one, the name is the worker.
An address that goes gets no new turns; what it holds can still be read, and it is forgotten once it does not
answer. A name that can't be resolved changes nothing.
"""

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime import endpoints, logs
from kvloop.runtime.resolving import RESOLVE_EVERY_S, behind

_log = logs.get("router")


@dataclass(slots=True)
class _Name:
    role: str
    endpoint: str
    itself: AnyWorker | None
    """The worker that stands for the name; None once the addresses have taken its place."""
    split: bool = False
    """Whether several addresses were seen behind it."""
    members: dict[str, AnyWorker] = field(default_factory=dict)
    """By address."""


class Names:
    """Keeps a pool in step with who is behind the names that the settings give."""

    def __init__(self, pool: WorkerPool) -> None:
        """Take a pool that has the workers of the settings and no others yet."""
        self._pool = pool
        self.workers: set[AnyWorker] = {*pool.prefill, *pool.decode}
        """Those that the settings name now; nobody else forgets them."""
        self._names = [
            _Name(role, worker.endpoint, worker)
            for role in ("prefill", "decode")
            for worker in self._of(role)
            if not _is_address(endpoints.parse(worker.endpoint).host)
        ]

    async def follow(self) -> None:
        """Look up the names, for ever."""
        while self._names:
            await self.look()
            await asyncio.sleep(RESOLVE_EVERY_S)

    async def look(self) -> None:
        """Look up the names once."""
        looked_up = await asyncio.gather(*(behind(name.endpoint) for name in self._names))
        for name, found in zip(self._names, looked_up, strict=True):
            name.split = name.split or len(found) > 1
            if name.split and found:
                await self._meet(name, found)
                self._part(name, found)
            await self._forget(name)

    async def _meet(self, name: _Name, found: Sequence[str]) -> None:
        there = {worker.endpoint for worker in self._of(name.role)}
        host = endpoints.parse(name.endpoint).host
        new = [address for address in found if address not in there]
        # Each is asked for its facts first.
        met = await asyncio.gather(*(self._pool.add(name.role, address, host) for address in new))
        for address, worker in zip(new, met, strict=True):
            name.members[address] = worker
            _log.info("worker_found", role=name.role, endpoint=address)
        for address in found:
            # One that the registry led to, or another name, is not this name's.
            back = name.members.get(address)
            if back is not None and back not in self.workers:
                self.workers.add(back)
                back.unlisted = False

    def _part(self, name: _Name, found: Sequence[str]) -> None:
        for address, worker in name.members.items():
            if address not in found and worker in self.workers:
                self.workers.discard(worker)
                worker.unlisted = True
        if name.itself is not None:
            self.workers.discard(name.itself)
            name.itself.unlisted = True

    async def _forget(self, name: _Name) -> None:
        if name.split and name.itself is not None and _is_idle(name.itself):
            itself, name.itself = name.itself, None
            await self._pool.remove(itself)
        for address, worker in list(name.members.items()):
            if worker not in self.workers and not worker.present and _is_idle(worker):
                del name.members[address]
                _log.info("worker_forgotten", worker=worker.name, endpoint=address)
                if worker in self._of(name.role):
                    await self._pool.remove(worker)

    def _of(self, role: str) -> Sequence[AnyWorker]:
        return self._pool.prefill if role == "prefill" else self._pool.decode


def _is_idle(worker: AnyWorker) -> bool:
    return not worker.in_flight and not worker.places


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
