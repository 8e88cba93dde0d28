"""The LeaseDirectory port.

The directory holds hints. A lost, stale, forged or duplicated entry costs a cold turn, never a wrong one,
so every backend may forget at any time. Only the decode worker that holds a lease writes its entry.
Remaining time travels as a relative TTL; hosts' clocks are never compared.
"""

from dataclasses import dataclass
from typing import Protocol

from kvloop.v1alpha1 import lease_pb2


class DirectoryUnavailable(Exception):
    """The directory did not answer in time, or not sensibly. The turn goes on cold."""


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


class LeaseDirectory(Protocol):
    """Leases by scope. Methods raise DirectoryUnavailable, and nothing else, when the store fails."""

    async def lookup(self, scope: bytes) -> Found:
        """Return the newest lease of a scope and the directory's time, in one round trip."""
        ...

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        """Write the entry unless a later-started turn's entry stands; value and TTL in one step."""
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

    async def check(self) -> None:
        """Return when the store answers and is fit for leases."""
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...
