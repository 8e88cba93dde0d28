"""The worker registry: who serves which leg, where, since when, and how busy.

A worker announces itself several times per TTL; one that stops is gone when its TTL is over. Removal
compares the epoch: the late farewell of a dead life doesn't remove the new one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields

from kvloop.metastore import codec
from kvloop.metastore.fields import Fields
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.metastore.ttl import ANNOUNCEMENTS_PER_TTL, WORKER_TTL_S
from kvloop.runtime import logs

TTL_S = WORKER_TTL_S
WATCH_S = 0.5
_FORMAT = b"W1"
_TAG_BYTES = 16

_log = logs.get("metastore")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as routers see it."""

    worker_id: str
    role: str
    """"prefill" or "decode"."""
    endpoint: str
    """host:port, brackets around IPv6."""
    epoch: str
    """Life of the engine process."""
    dp_rank: int = 0
    capacity: int = 0
    """Turns it takes at a time; 0 when unknown."""
    load: float = 0.0
    """Turns it has now, queued ones included."""
    draining: bool = False
    """Takes no new turns."""
    info: bytes = field(default=b"", repr=False)
    """WorkerInfo, serialized; this module doesn't read it."""


_HEADER_FIELDS = tuple(item.name for item in fields(Worker) if item.name != "info")


class WorkerRegistry:
    """Workers in a shared table. Methods raise DirectoryUnavailable when the store fails."""

    def __init__(self, table: Fields) -> None:
        self._table = table
        self._decoded: dict[bytes, tuple[bytes, Worker | None]] = {}
        """What was last read, by field: of many workers few say something new between two readings."""

    async def announce(self, worker: Worker, ttl_s: float = TTL_S) -> bool:
        """Register a worker, or say that it is still there; False when the table is full.

        Raises ValueError when its info is too large.
        """
        return await self._table.put(worker.worker_id.encode(), _encode(worker), ttl_s)

    async def withdraw(self, worker_id: str, epoch: str) -> bool:
        """Remove a worker if it is that life's; False when it was not."""
        return await self._table.remove(worker_id.encode(), _FORMAT + codec.lease_tag(epoch))

    async def workers(self) -> dict[str, Worker]:
        """Return all live workers by id."""
        values = await self._table.all()
        before, self._decoded = self._decoded, {}
        for field_name, value in values.items():
            known = before.get(field_name)
            same = known is not None and known[0] == value
            self._decoded[field_name] = known if known is not None and same else (value, _decode(value))
        return {worker.worker_id: worker for _, worker in self._decoded.values() if worker is not None}

    async def watch(
        self,
        interval_s: float = WATCH_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> AsyncIterator[dict[str, Worker]]:
        """Yield the workers, and again whenever anything about them has changed; while nothing has, as often
        as they announce themselves, since what they said is still true.

        While the store is away nothing is yielded: the last known workers may still serve, and only calling
        them tells.
        """
        known: dict[str, Worker] | None = None
        quiet_s = 0.0
        while True:
            now: dict[str, Worker] | None = None
            with contextlib.suppress(DirectoryUnavailable):
                now = await self.workers()
            if now is not None and (now != known or quiet_s >= TTL_S / ANNOUNCEMENTS_PER_TTL):
                known, quiet_s = now, 0.0
                yield now
            await sleep(interval_s)
            quiet_s += interval_s

    async def keep_announcing(
        self,
        worker: Callable[[], Worker],
        ttl_s: float = TTL_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Announce what worker() returns until cancelled; a store that is away is tried again next time."""
        while True:
            try:
                await self.announce(worker(), ttl_s)
            except DirectoryUnavailable:
                pass
            except Exception as error:  # noqa: BLE001 - a worker that falls silent is taken for dead
                _log.error("announcement_failed", error=type(error).__name__, exc_info=error)
            await sleep(ttl_s / ANNOUNCEMENTS_PER_TTL)


def _encode(worker: Worker) -> bytes:
    header = {name: value for name, value in asdict(worker).items() if name != "info"}
    text = json.dumps(header, separators=(",", ":")).encode()
    return _FORMAT + codec.lease_tag(worker.epoch) + text + b"\n" + worker.info


def _decode(value: bytes) -> Worker | None:
    if not value.startswith(_FORMAT):
        return None
    text, newline, info = value[len(_FORMAT) + _TAG_BYTES :].partition(b"\n")
    try:
        header = json.loads(text)
        worker = Worker(**{name: header[name] for name in _HEADER_FIELDS}, info=info)
    except (ValueError, KeyError, TypeError):
        return None
    texts = (worker.worker_id, worker.role, worker.endpoint, worker.epoch)
    numbers = (worker.dp_rank, worker.capacity, worker.load)
    sound = (
        bool(newline)
        and all(isinstance(item, str) for item in texts)
        and all(isinstance(item, int | float) for item in numbers)
    )
    return worker if sound else None
