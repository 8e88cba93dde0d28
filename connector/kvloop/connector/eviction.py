"""Whose hold goes when room is needed: the least recently used one of the tenant that holds most.

What is chosen is enough, and no more: nobody goes in vain, and of those in turn, ones whose going makes no
difference stay. A block that others use too makes none.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from kvloop.connector.hold import Hold


class Shares:
    """Who holds how many unique blocks."""

    def __init__(self) -> None:
        self.all: Counter[int] = Counter()
        """Holds by block."""
        self.budgeted: Counter[int] = Counter()
        """Decode holds by block."""
        self._tenants: dict[str, Counter[int]] = {}

    def of(self, tenant: str) -> int:
        """Return how many blocks a tenant's decode holds keep."""
        return len(self._tenants.get(tenant, ()))

    def add(self, hold: Hold) -> None:
        """Count a hold in."""
        self._count(hold, +1)

    def remove(self, hold: Hold) -> None:
        """Count a hold out again."""
        self._count(hold, -1)

    def _count(self, hold: Hold, step: int) -> None:
        counters = [self.all]
        if hold.kind == "decode":
            counters += [self.budgeted, self._tenants.setdefault(hold.tenant, Counter())]
        for counter in counters:
            for block in hold.blocks:
                counter[block] += step
                if not counter[block]:
                    del counter[block]
        if hold.kind == "decode" and not self._tenants[hold.tenant]:
            del self._tenants[hold.tenant]


def for_budget(candidates: Sequence[Hold], shares: Shares, budget: int, new: Hold) -> list[Hold] | None:
    """Return who makes room in the budget for a new hold that is counted in; None when it must not stay.

    A tenant that would hold more than any other has room made by its own holds only: its first large one
    must not cost all others theirs.
    """
    left, gone = list(candidates), []
    fits = True
    while len(shares.budgeted) > budget:
        victim = _next(left, shares)
        if victim is None or (
            victim.tenant != new.tenant and shares.of(new.tenant) > shares.of(victim.tenant)
        ):
            fits = False
            break
        left.remove(victim)
        gone.append(victim)
        shares.remove(victim)
    chosen = []
    for victim in reversed(gone):
        shares.add(victim)
        if fits and len(shares.budgeted) > budget:
            shares.remove(victim)
            chosen.append(victim)
    for victim in chosen:
        shares.add(victim)
    return chosen[::-1] if fits else None


def for_room(
    candidates: Sequence[Hold],
    shares: Shares,
    shortage: int,
    references: Callable[[int], int],
    spoken_for: Collection[int] = (),
    *,
    or_less: bool = False,
) -> list[Hold]:
    """Return whose going lets `shortage` blocks come free; nobody when so many can't.

    references: how often a block is in use, holds included. spoken_for: blocks that are no room when free.
    or_less: as many as can come free are of use, too.
    """
    held = Counter(block for hold in candidates for block in hold.blocks)
    attainable = sum(references(block) <= count for block, count in held.items() if block not in spoken_for)
    if attainable < shortage and not or_less:
        return []
    shortage = min(shortage, attainable)
    left, gone = list(candidates), []
    users = {block: references(block) for block in held}
    free = 0
    while free < shortage and (victim := _next(left, shares)) is not None:
        left.remove(victim)
        gone.append(victim)
        shares.remove(victim)
        for block in victim.blocks:
            users[block] -= 1
        free += _freed(victim, users, spoken_for)
    chosen = []
    for victim in reversed(gone):
        shares.add(victim)
        freed = _freed(victim, users, spoken_for)
        if free - freed >= shortage:
            free -= freed
            for block in victim.blocks:
                users[block] += 1
        else:
            chosen.append(victim)
    return chosen[::-1]


def _next(candidates: Sequence[Hold], shares: Shares) -> Hold | None:
    return min(candidates, key=lambda hold: (-shares.of(hold.tenant), hold.last_used), default=None)


def _freed(hold: Hold, users: dict[int, int], spoken_for: Collection[int]) -> int:
    return sum(users[block] <= 0 and block not in spoken_for for block in hold.blocks)
