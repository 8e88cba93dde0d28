"""The table of holds: which blocks of the pool are kept beyond their turn, for whom, and until when.

It knows block numbers, not blocks: whoever owns the pool hands blocks in with `hold` and fetches those to
be freed with `take_freeable`. Everything else may come from any thread. A hold is live until it is
released, expires, or is evicted or revoked; when a read is in progress (a pin) it is doomed instead: no new
pins, and its blocks leave with the last pin or at that pin's own deadline. A hold never comes back to life.

Deadlines are readings of the injected clock, in seconds.
"""

import heapq
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from kvloop.connector import eviction
from kvloop.connector.eviction import Shares
from kvloop.connector.hold import Hold, Kind

_LATE_S = 60.0
"""How long a reader that missed its deadline may still be waiting for its transfer to end."""

_UNSEEN_S = 5.0
"""The same of one whose read was ended for it while no notice of its own had come."""

_ADMITTED_S = 0.005
"""For how long nothing can come from a reader that was just let in: it has a prompt to schedule first."""

_FUTILE_S = 0.05
"""For how long as many blocks are not looked for again that no eviction would free: a request that waits for
them asks in every step."""

Reason = Literal["expired", "evicted", "revoked"]


class NotHeld(LookupError):
    """There is no such hold; `expired` tells that its deadline has just passed."""

    def __init__(self, lease_id: str, expired: bool = False) -> None:
        super().__init__(lease_id)
        self.expired = expired


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A hold as seen at one moment."""

    lease_id: str
    kind: Kind
    num_tokens: int
    num_blocks: int
    remaining_s: float
    pins: int
    doomed: bool


class HoldTable:
    """Holds by lease id, with deadlines, pins, a budget in unique blocks, and eviction.

    Decode holds count against the budget and can be evicted while unpinned; kvloop.connector.eviction says
    which go first. Prefill holds are one reader's, short, and never evicted.
    """

    def __init__(self, budget: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """budget: most unique blocks that decode holds may keep; None is without limit."""
        self.budget = budget
        self.clock = clock
        self._lock = threading.RLock()
        self._live: dict[str, Hold] = {}
        self._doomed: set[Hold] = set()
        self._pins: dict[str, Hold] = {}
        # Names, not holds: an ended hold must not keep its payload until its deadline.
        self._due: list[tuple[float, int, str, str | None]] = []
        self._shares = Shares()
        self._freeable: deque[tuple[int, ...]] = deque()
        self._events: deque[tuple[str, Reason]] = deque(maxlen=65536)
        self._ticks = 0
        self._late_until = float("-inf")
        self._reads_from = float("-inf")
        """When the first of the pins' readers may begin."""
        self._futile = (0, float("-inf"))
        """How many blocks were looked for in vain, and until when that stands."""
        self.on_change: Callable[[], None] = lambda: None
        """Called, under the lock, when a hold comes in or leaves unasked."""

    # -- what the owner of the pool calls -------------------------------------------------------------

    def hold(
        self,
        lease_id: str,
        *,
        kind: Kind,
        blocks: Sequence[int],
        num_tokens: int,
        ttl_s: float,
        tenant: str = "",
        payload: object = None,
    ) -> Hold | None:
        """Take over one reference to each of the blocks; None when the budget has no room for them.

        With None the references stay the caller's, and nobody was evicted. A live hold of the same id ends.
        """
        with self._lock:
            if ttl_s <= 0 or not blocks:
                return None
            entry = Hold(
                lease_id,
                kind,
                tenant,
                tuple(blocks),
                num_tokens,
                self.clock() + ttl_s,
                payload,
                last_used=self._tick(),
            )
            if (old := self._live.get(lease_id)) is not None:
                self._end(old, None)
            self._shares.add(entry)
            if kind == "decode" and self.budget is not None:
                victims = eviction.for_budget(self._evictable(), self._shares, self.budget, entry)
                if victims is None:
                    self._shares.remove(entry)
                    return None
                for victim in victims:
                    self._end(victim, "evicted")
            self._live[lease_id] = entry
            self._push(entry.deadline, lease_id, None)
            self._changed()
            self.on_change()
            return entry

    def make_room(
        self,
        shortage: int,
        references: Callable[[int], int],
        spoken_for: Collection[int] = (),
        *,
        or_less: bool = False,
    ) -> None:
        """Evict decode holds so that so many blocks come free; see kvloop.connector.eviction.for_room."""
        with self._lock:
            if not or_less and self.is_futile(shortage):
                return
            victims = eviction.for_room(
                self._evictable(), self._shares, shortage, references, spoken_for, or_less=or_less
            )
            for victim in victims:
                self._end(victim, "evicted")
            if not victims and not or_less:
                self._futile = (shortage, self.clock() + _FUTILE_S)

    def is_futile(self, shortage: int) -> bool:
        """Whether `make_room` looked for as much a moment ago, in vain."""
        with self._lock:
            least, until = self._futile
            return shortage >= least and self.clock() < until

    def evict(self, lease_id: str) -> bool:
        """Evict a certain decode hold; False when there is none or a read is in progress."""
        with self._lock:
            entry = self._live.get(lease_id)
            if entry is None or entry not in self._evictable():
                return False
            self._end(entry, "evicted")
            return True

    def take_freeable(self) -> list[tuple[int, ...]]:
        """Return, once, the block lists whose references are to be given back."""
        with self._lock:
            taken = list(self._freeable)
            self._freeable.clear()
            return taken

    # -- what anybody may call ------------------------------------------------------------------------

    def pin(self, lease_id: str, pin_s: float) -> tuple[str, float, Hold]:
        """Begin a read: (read id, its deadline, hold). Raises NotHeld."""
        with self._lock:
            entry = self._get(lease_id)
            if entry.kind != "decode":
                raise NotHeld(lease_id)
            read_id, deadline = secrets.token_hex(6), self.clock() + pin_s
            if not self._pins:
                self._reads_from = self.clock() + _ADMITTED_S
            entry.pins[read_id] = deadline
            entry.last_used = self._tick()
            self._pins[read_id] = entry
            self._push(deadline, lease_id, read_id)
            return read_id, deadline, entry

    def unpin(self, lease_id: str, read_id: str) -> bool:
        """End a read on somebody's word; False when it is unknown or over."""
        with self._lock:
            now = self.clock()
            may_be_reading = now >= self._reads_from
            if not self._end_read(lease_id, read_id):
                return False
            if may_be_reading:
                self._late_until = max(self._late_until, now + _UNSEEN_S)
            return True

    def read_done(self, lease_id: str, token: str) -> bool:
        """Take a reader's notice: its pin's, or that of a prefill hold, which ends. Late ones are ignored."""
        with self._lock:
            if self._end_read(lease_id, token):
                return True
            entry = self._live.get(lease_id)
            if entry is None or entry.kind != "prefill" or entry.token != token:
                return False
            self._end(entry, None)
            return True

    def release(self, lease_id: str) -> bool:
        """End a hold as its keeper wishes: no event. False when there is none."""
        with self._lock:
            entry = self._live.get(lease_id)
            if entry is None:
                return False
            self._end(entry, None)
            return True

    def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a live hold's deadline to ttl_s from now, never earlier."""
        with self._lock:
            try:
                entry = self._get(lease_id)
            except NotHeld:
                return False
            deadline = self.clock() + ttl_s
            if deadline > entry.deadline:
                entry.deadline = deadline
                self._push(deadline, lease_id, None)
            return True

    def expire(self) -> None:
        """Let go of everything whose deadline has passed."""
        with self._lock:
            now = self.clock()
            while self._due and self._due[0][0] <= now:
                _, _, lease_id, read_id = heapq.heappop(self._due)
                if read_id is not None:
                    if (entry := self._pins.get(read_id)) is not None:
                        self._unpin(entry, read_id)
                        self._late_until = now + _LATE_S
                elif (entry := self._live.get(lease_id)) is not None and entry.deadline <= now:
                    self._end(entry, "expired")
                    if entry.kind == "prefill":
                        self._late_until = now + _LATE_S

    def revoke_all(self) -> int:
        """End all decode holds; return how many."""
        with self._lock:
            entries = [e for e in self._live.values() if e.kind == "decode"]
            for entry in entries:
                self._end(entry, "revoked")
            return len(entries)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next, at the earliest."""
        with self._lock:
            return self._due[0][0] if self._due else None

    def take_events(self) -> list[tuple[str, Reason]]:
        """Return, once, the decode holds that ended without a release."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
            return taken

    def snapshot(self, lease_id: str) -> Snapshot | None:
        """Return a live hold."""
        with self._lock:
            entry = self._live.get(lease_id)
            return None if entry is None or entry.deadline <= self.clock() else self._snapshot(entry)

    def snapshots(self) -> list[Snapshot]:
        """Return all holds, soonest deadline first; expired ones only while pinned."""
        with self._lock:
            now = self.clock()
            live = [e for e in self._live.values() if e.deadline > now or e.pins]
            return [self._snapshot(e) for e in sorted([*live, *self._doomed], key=lambda e: e.deadline)]

    @property
    def held_blocks(self) -> int:
        """Unique blocks kept by all holds."""
        return len(self._shares.all)

    @property
    def leases(self) -> int:
        """Live decode holds."""
        with self._lock:
            return sum(e.kind == "decode" for e in self._live.values())

    @property
    def has_freeable(self) -> bool:
        """Whether `take_freeable` would return something."""
        return bool(self._freeable)

    @property
    def has_readers(self) -> bool:
        """Whether another engine may be reading now: a pin, or a prefill hold waiting for its reader."""
        return self._read_from() <= self.clock()

    @property
    def has_late_readers(self) -> bool:
        """Whether a read that missed its deadline may still be in flight, keeping blocks of its engine."""
        return self.clock() < self._late_until

    @property
    def readers_in_s(self) -> float | None:
        """Seconds until another engine may be reading, zero if one may be or is late; None for nobody."""
        if self.has_late_readers:
            return 0.0
        left = self._read_from() - self.clock()
        return None if left == float("inf") else max(0.0, left)

    def _read_from(self) -> float:
        with self._lock:
            if any(entry.kind == "prefill" for entry in self._live.values()):
                return float("-inf")
            return self._reads_from if self._pins else float("inf")

    # -- inside, under the lock -----------------------------------------------------------------------

    def _changed(self) -> None:
        """Have what was looked for in vain be looked for again."""
        self._futile = (0, float("-inf"))

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _push(self, deadline: float, lease_id: str, read_id: str | None) -> None:
        heapq.heappush(self._due, (deadline, self._tick(), lease_id, read_id))

    def _get(self, lease_id: str) -> Hold:
        entry = self._live.get(lease_id)
        if entry is None:
            raise NotHeld(lease_id)
        if entry.deadline <= self.clock():
            raise NotHeld(lease_id, expired=True)
        return entry

    def _snapshot(self, entry: Hold) -> Snapshot:
        remaining = max(0.0, entry.deadline - self.clock())
        return Snapshot(
            entry.lease_id,
            entry.kind,
            entry.num_tokens,
            len(entry.blocks),
            remaining,
            len(entry.pins),
            entry.doomed,
        )

    def _evictable(self) -> list[Hold]:
        return [entry for entry in self._live.values() if entry.kind == "decode" and not entry.pins]

    def _end(self, entry: Hold, reason: Reason | None) -> None:
        del self._live[entry.lease_id]
        if reason is not None and entry.kind == "decode":
            self._events.append((entry.lease_id, reason))
            self.on_change()
        if entry.pins:
            entry.doomed = True
            self._doomed.add(entry)
        else:
            self._drop(entry)

    def _end_read(self, lease_id: str, read_id: str) -> bool:
        entry = self._pins.get(read_id)
        if entry is None or entry.lease_id != lease_id:
            return False
        self._unpin(entry, read_id)
        return True

    def _unpin(self, entry: Hold, read_id: str) -> None:
        del entry.pins[read_id]
        del self._pins[read_id]
        self._changed()
        if entry.doomed and not entry.pins:
            self._doomed.discard(entry)
            self._drop(entry)

    def _drop(self, entry: Hold) -> None:
        entry.gone = True
        self._changed()
        self._shares.remove(entry)
        self._freeable.append(entry.blocks)
