"""The table of holds: deadlines, pins, budget, and who has to go under pressure.

A hold owns one reference of each of its blocks from `keep` until its end. While pinned it can be doomed
but not ended: no new pins then, and the blocks go when the last pin does.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloop.engine.port import Hold
from kvloop.engine.simulated.pool import Block, BlockPool


@dataclass(slots=True, eq=False)
class Held:
    """One hold, from the inside."""

    lease_id: str
    tenant: str
    blocks: list[Block]
    ids: bytes
    """Packed ids of the tokens whose KV is held."""
    keys: list[bytes]
    """Hashes of the full blocks."""
    num_tokens: int
    deadline: float
    pins: dict[str, float] = field(default_factory=dict)
    """read_id -> deadline."""
    doomed: bool = False

    def view(self, now: float) -> Hold:
        """Return the hold as the port tells it."""
        return Hold(
            lease_id=self.lease_id,
            num_tokens=self.num_tokens,
            num_blocks=len(self.blocks),
            remaining_s=max(0.0, self.deadline - now),
            pins=len(self.pins),
            doomed=self.doomed,
        )


class HoldTable:
    """All holds of one engine, least recently used first."""

    def __init__(self, pool: BlockPool, *, budget: int, ended: Callable[[str, str], None]) -> None:
        self._pool = pool
        self._budget = budget
        self._ended = ended
        """Told (lease_id, reason) of every hold that nobody asked to end."""
        self._table: OrderedDict[str, Held] = OrderedDict()
        self._shares: dict[str, int] = {}
        self._due: list[tuple[float, int, str]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def all(self) -> list[Held]:
        """Return every hold, doomed ones included."""
        return list(self._table.values())

    @property
    def next_due(self) -> float | None:
        """When the next hold or pin may end by itself."""
        return self._due[0][0] if self._due else None

    def live(self, lease_id: str, now: float) -> Held | None:
        """Return a hold that can be read and extended."""
        held = self._table.get(lease_id)
        if held is None or held.doomed or held.deadline <= now:
            return None
        return held

    def keep(self, held: Held) -> bool:
        """Take a hold in; False, and nothing taken, when it alone is more than the budget.

        A hold of the same lease makes room for it.
        """
        if len(held.blocks) > self._budget:
            return False
        self.release(held.lease_id)
        if held.lease_id in self._table:
            return False
        self._table[held.lease_id] = held
        self._shares[held.tenant] = self._shares.get(held.tenant, 0) + len(held.blocks)
        self._pool.hold(held.blocks)
        self._expect(held.deadline, held.lease_id)
        while self._pool.held > self._budget and self.evict_one(spare=held):
            pass
        return True

    def pin(self, held: Held, read_id: str, deadline: float) -> None:
        """Keep the blocks for one read until a deadline."""
        held.pins[read_id] = deadline
        self._table.move_to_end(held.lease_id)
        self._expect(deadline, held.lease_id)

    def unpin(self, lease_id: str, read_id: str) -> None:
        """Take a pin off; unknown ones are ignored."""
        held = self._table.get(lease_id)
        if held is not None and held.pins.pop(read_id, None) is not None and held.doomed and not held.pins:
            self._drop(held)

    def extend(self, held: Held, deadline: float) -> None:
        """Move a deadline, never earlier."""
        if deadline > held.deadline:
            held.deadline = deadline
            self._expect(deadline, held.lease_id)

    def release(self, lease_id: str) -> bool:
        """End a hold as asked; while pinned it is doomed instead. False when there is none."""
        held = self._table.get(lease_id)
        if held is None or held.doomed:
            return False
        self._end(held)
        return True

    def evict(self, lease_id: str) -> bool:
        """End a hold unasked; while pinned it is doomed instead. False when there is none."""
        if not self.release(lease_id):
            return False
        self._ended(lease_id, "evicted")
        return True

    def evict_one(self, spare: Held | None = None) -> bool:
        """End the least recently used unpinned hold of the tenant that holds most; False without one."""
        candidates: dict[str, Held] = {}
        for held in self._table.values():
            if not held.pins and held is not spare and held.tenant not in candidates:
                candidates[held.tenant] = held
                if len(candidates) == len(self._shares):
                    break
        if not candidates:
            return False
        victim = candidates[max(candidates, key=lambda tenant: self._shares[tenant])]
        return self.evict(victim.lease_id)

    def revoke_all(self) -> None:
        """End all holds unasked."""
        for held in self.all:
            if self.release(held.lease_id):
                self._ended(held.lease_id, "revoked")

    def reap(self, now: float) -> None:
        """End what is due, in order of deadlines."""
        while self._due and self._due[0][0] <= now:
            lease_id = heapq.heappop(self._due)[2]
            held = self._table.get(lease_id)
            if held is None:
                continue
            for read_id in [read_id for read_id, deadline in held.pins.items() if deadline <= now]:
                del held.pins[read_id]
            if held.doomed:
                if not held.pins:
                    self._drop(held)
            elif held.deadline <= now:
                self._end(held)
                self._ended(lease_id, "expired")

    def _end(self, held: Held) -> None:
        held.doomed = True
        if not held.pins:
            self._drop(held)

    def _drop(self, held: Held) -> None:
        del self._table[held.lease_id]
        share = self._shares[held.tenant] - len(held.blocks)
        if share:
            self._shares[held.tenant] = share
        else:
            del self._shares[held.tenant]
        self._pool.unhold(held.blocks)
        self._pool.release(held.blocks)

    def _expect(self, when: float, lease_id: str) -> None:
        heapq.heappush(self._due, (when, next(self._order), lease_id))
