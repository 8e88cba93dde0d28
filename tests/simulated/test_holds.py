"""The table of holds."""

import pytest

from kvloop.engine.simulated.holds import Held, HoldTable
from kvloop.engine.simulated.pool import BlockPool


class Table:
    """A table over a pool of 20 blocks with a budget of 10."""

    def __init__(self) -> None:
        self.pool = BlockPool(20, caching=True)
        self.ended: list[tuple[str, str]] = []
        self.table = HoldTable(self.pool, budget=10, ended=lambda *event: self.ended.append(event))

    def keep(self, lease_id: str, blocks: int = 2, deadline: float = 100.0, tenant: str = "") -> Held:
        held = Held(lease_id, tenant, self.pool.allocate(blocks) or [], b"", [], 4 * blocks, deadline)
        assert self.table.keep(held)
        return held

    def names(self) -> list[str]:
        return [held.lease_id for held in self.table.all]


@pytest.fixture
def holds() -> Table:
    return Table()


def test_release_gives_the_blocks_back_and_tells_nobody(holds: Table) -> None:
    holds.keep("a")
    assert holds.table.release("a")
    assert not holds.table.release("a")
    assert holds.pool.free == 20
    assert holds.ended == []


def test_reaped_in_order_of_deadlines_not_of_arrival(holds: Table) -> None:
    for lease_id, deadline in (("late", 30.0), ("soon", 10.0), ("mid", 20.0)):
        holds.keep(lease_id, deadline=deadline)
    holds.table.reap(9.9)
    assert holds.ended == []
    holds.table.reap(20.0)
    assert holds.ended == [("soon", "expired"), ("mid", "expired")]
    assert holds.names() == ["late"]
    assert holds.pool.held == 2


def test_a_pinned_hold_is_doomed_and_goes_with_its_last_pin(holds: Table) -> None:
    held = holds.keep("a")
    holds.table.pin(held, "r1", 50.0)
    holds.table.pin(held, "r2", 50.0)
    assert holds.table.release("a")
    assert held.doomed
    assert holds.table.live("a", 0.0) is None
    holds.table.unpin("a", "r1")
    holds.table.unpin("a", "unknown")
    assert holds.pool.held == 2
    holds.table.unpin("a", "r2")
    assert holds.pool.free == 20


def test_a_lapsed_pin_no_longer_holds(holds: Table) -> None:
    held = holds.keep("a", deadline=10.0)
    holds.table.pin(held, "r1", 30.0)
    holds.table.reap(10.0)
    assert holds.ended == [("a", "expired")]
    assert holds.pool.held == 2
    holds.table.reap(29.9)
    assert holds.pool.held == 2
    holds.table.reap(30.0)
    assert holds.pool.free == 20
    assert holds.ended == [("a", "expired")]


def test_an_extended_deadline_holds_and_never_moves_back(holds: Table) -> None:
    held = holds.keep("a", deadline=10.0)
    holds.table.extend(held, 40.0)
    holds.table.extend(held, 20.0)
    holds.table.reap(39.9)
    assert holds.names() == ["a"]
    holds.table.reap(40.0)
    assert holds.names() == []


def test_an_extended_hold_is_evicted_no_later(holds: Table) -> None:
    held = [holds.keep(str(i)) for i in range(5)]
    holds.table.extend(held[0], 40.0)
    holds.keep("new")
    assert holds.ended == [("0", "evicted")]


def test_an_expired_hold_is_not_live(holds: Table) -> None:
    holds.keep("a", deadline=10.0)
    assert holds.table.live("a", 9.9) is not None
    assert holds.table.live("a", 10.0) is None


def test_beyond_the_budget_the_least_recently_used_goes(holds: Table) -> None:
    held = [holds.keep(str(i)) for i in range(5)]
    holds.table.pin(held[0], "r", 50.0)
    holds.table.unpin("0", "r")
    holds.keep("new")
    assert holds.ended == [("1", "evicted")]
    assert holds.pool.held == 10


def test_pinned_holds_are_not_evicted(holds: Table) -> None:
    for i in range(5):
        holds.table.pin(holds.keep(str(i)), "r", 50.0)
    assert not holds.table.evict_one()
    assert len(holds.names()) == 5


def test_the_tenant_with_most_blocks_pays(holds: Table) -> None:
    holds.keep("old-small", tenant="small")
    for i in range(4):
        holds.keep(f"big{i}", tenant="big")
    holds.keep("new", tenant="small")
    assert holds.ended == [("big0", "evicted")]


def test_a_hold_larger_than_the_budget_is_refused(holds: Table) -> None:
    blocks = holds.pool.allocate(11) or []
    assert not holds.table.keep(Held("a", "", blocks, b"", [], 44, 10.0))
    assert holds.pool.held == 0
    assert holds.ended == []


def test_shared_blocks_count_once_against_the_budget(holds: Table) -> None:
    first = holds.keep("a", blocks=8)
    holds.pool.touch(first.blocks)
    assert holds.table.keep(Held("b", "", list(first.blocks), b"", [], 32, 100.0))
    assert holds.pool.held == 8
    assert holds.names() == ["a", "b"]


def test_a_lease_id_used_again_replaces_the_hold(holds: Table) -> None:
    holds.keep("a", blocks=2)
    holds.keep("a", blocks=3)
    assert holds.pool.held == 3
    assert holds.names() == ["a"]
