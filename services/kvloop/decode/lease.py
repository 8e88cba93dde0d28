"""Leases as the keeper remembers them, and the table they are in. No I/O, no clock of its own.

LIVE     held; new reads may begin.
DOOMED   let go while reads are in progress; no new ones. Left with the last read's end or its deadline.
SOFT     no longer held. Remembered for a while, without tokens, so that a reader that comes late is sent to
         the conversation's newer lease or learns why there is none.
"""

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvloop.runtime.tokens import count

REMEMBERED = 4096
UNTOLD_S = 5.0
"""The engine tells of a hold's end well within this after its deadline, unless it has told already."""


class State(enum.Enum):
    """Life of a lease."""

    LIVE = enum.auto()
    DOOMED = enum.auto()
    SOFT = enum.auto()


class Ended(enum.StrEnum):
    """Why a lease is not LIVE any more."""

    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    EVICTED = "evicted"
    RELEASED = "released"
    REVOKED = "revoked"
    LOST = "lost"
    UNPUBLISHED = "unpublished"


@dataclass(slots=True)
class Lease:
    """One held turn."""

    lease_id: str
    scope: bytes
    """The conversation; the directory's key."""
    digest_key: bytes
    """Key of its prefix digests: readers with another one are strangers."""
    conversation_id: str
    tenant: str
    turn_start_us: int
    """Start of the turn that left it, by the directory's clock."""
    tokens: bytes
    """The tokens held, packed: the prompt and the answer as far as their KV is there."""
    num_tokens: int
    num_blocks: int
    deadline: float
    """Monotonic seconds."""
    publish_wall: float
    """Wall clock, for display."""
    state: State = State.LIVE
    ended: Ended | None = None
    begun: float = 0.0
    """Monotonic second at which its turn ended."""
    was_read: bool = False
    pins: dict[str, float] = field(default_factory=dict)
    """Reads in progress: read_id -> monotonic second at which the engine forgets it."""

    def is_live(self) -> bool:
        """Tell whether new reads may begin."""
        return self.state is State.LIVE

    def remaining_s(self, now: float) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self.deadline - now)


class LeaseTable:
    """Leases by id, live ones by scope."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._by_id: dict[str, Lease] = {}
        self._live: dict[bytes, list[Lease]] = {}
        self._soft: OrderedDict[str, Lease] = OrderedDict()
        self._reads: dict[str, Lease] = {}
        self.endings: Counter[Ended] = Counter()
        """Leases that ended, since the start."""
        self.tell_gap: Callable[[float], None] = lambda _: None
        """Told the seconds from a turn's end to the first read of what it left."""

    def add(self, lease: Lease) -> None:
        """Add a new live lease. Raises ValueError when its id is taken or its tokens don't match."""
        if lease.lease_id in self._by_id or lease.lease_id in self._soft:
            raise ValueError("the lease id is taken")
        if count(lease.tokens) != lease.num_tokens:
            raise ValueError("tokens and their number differ")
        self._by_id[lease.lease_id] = lease
        self._live.setdefault(lease.scope, []).append(lease)

    def get(self, lease_id: str) -> Lease | None:
        """Return a lease in any state."""
        return self._by_id.get(lease_id) or self._soft.get(lease_id)

    def live(self, scope: bytes) -> list[Lease]:
        """Return the live leases of a conversation, in the order of their adding."""
        return list(self._live.get(scope, ()))

    def newest(self, scope: bytes) -> Lease | None:
        """Return the live lease of the latest-started turn; of two with one start, the later added."""
        leases = self._live.get(scope)
        return max(reversed(leases), key=lambda lease: lease.turn_start_us) if leases else None

    def held(self) -> Iterator[Lease]:
        """Yield the leases that are LIVE or DOOMED."""
        return iter(list(self._by_id.values()))

    @property
    def pins(self) -> int:
        """Return how many reads are in progress."""
        return len(self._reads)

    def __len__(self) -> int:
        """Return how many leases are LIVE or DOOMED."""
        return len(self._by_id)

    def end(self, lease: Lease, why: Ended, now: float) -> bool:
        """Make a live lease DOOMED or SOFT; False when it was not live."""
        if not lease.is_live():
            return False
        lease.ended = why
        self.endings[why] += 1
        lease.state = State.DOOMED
        lease.tokens = b""
        siblings = self._live[lease.scope]
        siblings.remove(lease)
        if not siblings:
            del self._live[lease.scope]
        self._settle(lease, now)
        return True

    def forget_hold(self, lease: Lease, now: float) -> None:
        """Take note that the engine holds nothing of a lease any more, whatever was pinned."""
        for read_id in lease.pins:
            self._reads.pop(read_id, None)
        lease.pins.clear()
        self._settle(lease, now)

    def pin(self, lease: Lease, read_id: str, now: float, pin_s: float) -> None:
        """Note a read in progress; also of a lease that ended while its engine was asked."""
        if lease.state is State.SOFT:
            lease.state = State.DOOMED
            self._soft.pop(lease.lease_id, None)
            self._by_id[lease.lease_id] = lease
        if not lease.was_read:
            lease.was_read = True
            self.tell_gap(max(0.0, now - lease.begun))
        lease.pins[read_id] = now + pin_s
        self._reads[read_id] = lease

    def unpin(self, read_id: str, now: float) -> Lease | None:
        """Note the end of a read; return its lease, or None when the read is unknown."""
        lease = self._reads.pop(read_id, None)
        if lease is not None:
            lease.pins.pop(read_id, None)
            self._settle(lease, now)
        return lease

    def sweep(self, now: float) -> None:
        """Forget reads whose time is over, and doomed leases that nothing pins any more.

        A hold can end before its lease is here; then nobody tells again, and the lease ends by its deadline.
        """
        for lease in list(self._by_id.values()):
            if lease.deadline + UNTOLD_S <= now:
                self.end(lease, Ended.EXPIRED, now)
            self._settle(lease, now)

    def _settle(self, lease: Lease, now: float) -> None:
        for read_id, until in list(lease.pins.items()):
            if until <= now:
                del lease.pins[read_id]
                self._reads.pop(read_id, None)
        if lease.state is State.DOOMED and not lease.pins:
            lease.state = State.SOFT
            del self._by_id[lease.lease_id]
            self._soft[lease.lease_id] = lease
            while len(self._soft) > self._remembered:
                self._soft.popitem(last=False)
