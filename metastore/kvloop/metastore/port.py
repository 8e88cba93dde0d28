"""The LeaseDirectory port.

The directory holds hints. A lost, stale, forged or duplicated entry costs a cold turn, never a wrong one,
so every backend may forget at any time. Only the decode worker that holds a lease writes its entry.
Remaining time travels as a relative TTL; hosts' clocks are never compared.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloop.v1alpha1 import lease_pb2


class Outage(enum.StrEnum):
    """Why the store could not be used; the value is a metric's label."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    LOADING = "loading"
    READONLY = "readonly"
    MOVED = "moved"
    CLUSTER_DOWN = "cluster_down"
    OUT_OF_MEMORY = "out_of_memory"
    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    POOL = "pool"
    BREAKER = "breaker"
    CLOSED = "closed"
    UNFIT = "unfit"
    OTHER = "other"


class DirectoryUnavailable(Exception):
    """The directory did not answer in time, or not sensibly. The turn goes on cold."""

    def __init__(self, outage: Outage = Outage.OTHER) -> None:
        super().__init__(f"directory unavailable: {outage.value}")
        self.outage = outage


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of a lookup."""

    entry: lease_pb2.DirectoryEntry | None
    """The newest lease, or None."""
    remaining_s: float
    """Time left of the entry's key; 0 without one."""
    turn_start_us: int
    """Now, by the directory's clock, in microseconds: the start of the turn that looks up."""


@dataclass(frozen=True, slots=True)
class Published:
    """Answer of a publication."""

    won: bool
    """False when a later-started turn's entry stands; the caller lets its lease go."""
    displaced: lease_pb2.DirectoryEntry | None
    """The entry that was replaced, when it was another lease's."""


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """Answer of a search by prefix."""

    scope: bytes
    """Scope of the lease found; empty without one."""
    position: int
    """Which of the digests asked for led to it; -1 when none did."""
    found: Found
    """The lease, as from a lookup of its scope."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease whose entry is to stand for longer, if its conversation is alive."""

    scope: bytes
    lease_id: str
    ttl_s: float
    """From now; an entry that has longer keeps it."""


class Standing(enum.Enum):
    """What a renewal found."""

    IDLE = enum.auto()
    """No session is open; nothing was changed."""
    RENEWED = enum.auto()
    """A session is open, and the entry stands for longer."""
    MISSING = enum.auto()
    """A session is open, but there is no entry."""
    REPLACED = enum.auto()
    """A session is open, but the entry is another lease's."""
    UNKNOWN = enum.auto()
    """The store did not answer."""


class Level(enum.StrEnum):
    """Weight of a finding."""

    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark about a store's settings, as a sentence that says what to change."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class FitnessReport:
    """What a store is and how fit it is for leases."""

    server: str
    """Product and version, for example "valkey 9.1.2"; several nodes share one report."""
    nodes: int
    eviction_policy: str
    maxmemory_bytes: int
    """Smallest limit of any node; 0 when a node has none."""
    findings: tuple[Finding, ...]

    @property
    def fit(self) -> bool:
        """Tell whether no finding is a failure."""
        return all(finding.level is not Level.FAILURE for finding in self.findings)


class PrefixHints(Protocol):
    """Leases by prefix digest, for conversations without an id, forks, and those that come back renamed.

    A group is the keyed tag of (tenant, model, adapter, salt): hints never cross it. Hints are as
    forgettable as leases and are written after the entry they point at.
    """

    async def publish_hints(self, group: bytes, digests: Sequence[bytes], scope: bytes, ttl_s: float) -> None:
        """Let prefix digests lead to a scope; a digest keeps the few latest scopes that named it."""
        ...

    async def find_by_prefix(
        self, group: bytes, digests: Sequence[bytes], scopes: Sequence[bytes] = ()
    ) -> PrefixFound:
        """Return the live lease of the first of the scopes that has one, else of the longest known prefix.

        digests: by ascending length. One round trip, two at most on a cluster. Raises ValueError when there
        is neither a digest nor a scope to look for.
        """
        ...


class LeaseDirectory(PrefixHints, Protocol):
    """Leases by scope. Methods raise DirectoryUnavailable, and nothing else, when the store fails."""

    async def lookup(self, scope: bytes) -> Found:
        """Return the newest lease of a scope and the directory's time, in one round trip."""
        ...

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        """Write the entry unless a later-started turn's entry stands; value and TTL in one step.

        Without time left nothing is written and the publication is lost. Raises ValueError for an entry
        without lease or endpoint, or of more than codec.MAX_BYTES.
        """
        ...

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        """Remove the entry if it is this lease's; False when it was not."""
        ...

    async def set_alive(self, scope: bytes, ttl_s: float) -> None:
        """Say that an agent holds a session of this conversation open."""
        ...

    async def is_alive(self, scope: bytes) -> bool:
        """Tell whether a session is open."""
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> list[Standing]:
        """Prolong the entries of those leases whose conversations have a session open; answers in order.

        Nodes are asked in few writes, whatever the number. Never raises DirectoryUnavailable: a node that is
        away makes its own answers UNKNOWN.
        """
        ...

    async def check(self) -> FitnessReport:
        """Return a report when the store answers, reads and writes; connects ahead of the first turn.

        Raises DirectoryUnavailable when it doesn't.
        """
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...
