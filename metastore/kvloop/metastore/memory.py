"""The directory in this process: for one replica, and for tests. Same codec, same rules, no network.

Values are kept encoded, so that nobody shares a mutable entry and the size limit is the same.
"""

import heapq
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvloop.metastore import codec, keys
from kvloop.metastore.port import (
    DirectoryUnavailable,
    FitnessReport,
    Found,
    Outage,
    PrefixFound,
    Published,
    Renewal,
    Standing,
)
from kvloop.metastore.scripts import MAX_HINT_SCOPES
from kvloop.metastore.ttl import milliseconds, positive_milliseconds
from kvloop.runtime.clock import Clock, SystemClock
from kvloop.v1alpha1 import lease_pb2

EXPIRIES_PER_OPERATION = 16
_NOWHERE = -1

V = TypeVar("V")


class ExpiringTable(Generic[V]):
    """Values with deadlines. Every access forgets a few that are over, so that none needs a task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[bytes, tuple[V, float]] = {}
        self._deadlines: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> tuple[V, int] | None:
        """Return a value and its remaining milliseconds."""
        self._forget()
        held = self._values.get(key)
        if held is None:
            return None
        value, deadline = held
        left_ms = int((deadline - self._clock.monotonic()) * 1000)
        return (value, left_ms) if left_ms > 0 else None

    def set(self, key: bytes, value: V, ttl_ms: int) -> None:
        """Keep a value for ttl_ms milliseconds."""
        self._forget()
        deadline = self._clock.monotonic() + ttl_ms / 1000
        self._values[key] = (value, deadline)
        heapq.heappush(self._deadlines, (deadline, key))

    def remove(self, key: bytes) -> None:
        """Forget a value."""
        self._values.pop(key, None)

    def live(self) -> dict[bytes, V]:
        """Return the values that have time left."""
        now = self._clock.monotonic()
        return {key: value for key, (value, deadline) in self._values.items() if deadline > now}

    def _forget(self) -> None:
        now = self._clock.monotonic()
        for _ in range(EXPIRIES_PER_OPERATION):
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            deadline, key = heapq.heappop(self._deadlines)
            held = self._values.get(key)
            # A value written again since has a later deadline, and its own place in the heap.
            if held is not None and held[1] <= deadline:
                del self._values[key]


class MemoryDirectory:
    """A LeaseDirectory with PrefixHints in this process."""

    def __init__(self, clock: Clock | None = None, *, shared: bool = False) -> None:
        """Take the clock, and whether others in this process use it too: then close() leaves it open."""
        self._shared = shared
        self._clock = clock or SystemClock()
        # Wall time once, monotonic from there: turn starts never go back.
        self._origin = self._clock.wall() - self._clock.monotonic()
        self._leases: ExpiringTable[bytes] = ExpiringTable(self._clock)
        self._alive: ExpiringTable[bool] = ExpiringTable(self._clock)
        self._hints: ExpiringTable[tuple[bytes, ...]] = ExpiringTable(self._clock)
        self._closed = False

    def _now_us(self) -> int:
        return int((self._origin + self._clock.monotonic()) * 1e6)

    def opened(self) -> None:
        """Raise DirectoryUnavailable once closed."""
        if self._closed:
            raise DirectoryUnavailable(Outage.CLOSED)

    async def lookup(self, scope: bytes) -> Found:
        """See LeaseDirectory."""
        self.opened()
        return self._found(keys.lease_key(scope))

    def _found(self, key: bytes) -> Found:
        held = self._leases.get(key)
        entry = codec.decode(held[0]) if held is not None else None
        left_ms = held[1] if held is not None and entry is not None else 0
        return Found(entry, left_ms / 1000, self._now_us())

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        """See LeaseDirectory."""
        self.opened()
        key, value, ttl_ms = keys.lease_key(scope), codec.encode(entry), milliseconds(ttl_s)
        if ttl_ms < 1:
            return Published(won=False, displaced=None)
        held = self._leases.get(key)
        standing = codec.decode(held[0]) if held is not None else None
        displaced = None
        if standing is not None and standing.lease_id != entry.lease_id:
            if entry.turn_start_us < standing.turn_start_us <= self._now_us():
                return Published(won=False, displaced=None)
            displaced = standing
        self._leases.set(key, value, ttl_ms)
        return Published(won=True, displaced=displaced)

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        """See LeaseDirectory."""
        self.opened()
        key = keys.lease_key(scope)
        standing = self._found(key).entry
        if standing is None or standing.lease_id != lease_id:
            return False
        self._leases.remove(key)
        return True

    async def set_alive(self, scope: bytes, ttl_s: float) -> None:
        """See LeaseDirectory."""
        self.opened()
        self._alive.set(keys.alive_key(scope), True, positive_milliseconds(ttl_s))

    async def is_alive(self, scope: bytes) -> bool:
        """See LeaseDirectory."""
        self.opened()
        return self._alive.get(keys.alive_key(scope)) is not None

    async def renew(self, renewals: Sequence[Renewal]) -> list[Standing]:
        """See LeaseDirectory."""
        return [Standing.UNKNOWN if self._closed else self._renew(renewal) for renewal in renewals]

    def _renew(self, renewal: Renewal) -> Standing:
        if self._alive.get(keys.alive_key(renewal.scope)) is None:
            return Standing.IDLE
        key = keys.lease_key(renewal.scope)
        held = self._leases.get(key)
        standing = codec.decode(held[0]) if held is not None else None
        if held is None or standing is None:
            return Standing.MISSING
        if standing.lease_id != renewal.lease_id:
            return Standing.REPLACED
        value, left_ms = held
        self._leases.set(key, value, max(left_ms, milliseconds(renewal.ttl_s)))
        return Standing.RENEWED

    async def publish_hints(self, group: bytes, digests: Sequence[bytes], scope: bytes, ttl_s: float) -> None:
        """See PrefixHints."""
        self.opened()
        keys.tag(scope)
        ttl_ms = milliseconds(ttl_s)
        for key in [keys.hint_key(group, digest) for digest in digests]:
            if ttl_ms < 1:
                return
            scopes, left_ms = self._hints.get(key) or ((), 0)
            kept = (scope, *(other for other in scopes if other != scope))
            self._hints.set(key, kept[:MAX_HINT_SCOPES], max(ttl_ms, left_ms))

    async def find_by_prefix(
        self, group: bytes, digests: Sequence[bytes], scopes: Sequence[bytes] = ()
    ) -> PrefixFound:
        """See PrefixHints."""
        self.opened()
        if not digests and not scopes:
            raise ValueError("a search needs a digest or a scope")
        for scope in scopes:
            found = self._found(keys.lease_key(scope))
            if found.entry is not None:
                return PrefixFound(scope, _NOWHERE, found)
        for position in reversed(range(len(digests))):
            hinted, _ = self._hints.get(keys.hint_key(group, digests[position])) or ((), 0)
            for scope in hinted:
                found = self._found(keys.lease_key(scope))
                if found.entry is not None:
                    return PrefixFound(scope, position, found)
        return PrefixFound(b"", _NOWHERE, Found(None, 0.0, self._now_us()))

    async def check(self) -> FitnessReport:
        """See LeaseDirectory."""
        self.opened()
        return FitnessReport("memory", 1, "none", 0, ())

    async def close(self) -> None:
        """See LeaseDirectory."""
        self._closed = not self._shared
