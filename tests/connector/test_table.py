"""The table of holds alone, with a clock of its own."""

import gc
import threading
import weakref

import pytest

from kvloop.connector.table import HoldTable, NotHeld


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> HoldTable:
    return HoldTable(clock=clock)


def keep(table: HoldTable, lease_id: str, blocks: list[int], ttl_s: float = 60.0, tenant: str = "t") -> bool:
    hold = table.hold(
        lease_id, kind="decode", blocks=blocks, num_tokens=len(blocks) * 16, ttl_s=ttl_s, tenant=tenant
    )
    return hold is not None


def freed(table: HoldTable) -> list[tuple[int, ...]]:
    return table.take_freeable()


def test_release_gives_blocks_back_once_and_without_event(table: HoldTable) -> None:
    keep(table, "a", [1, 2])
    assert table.release("a")
    assert not table.release("a")
    assert freed(table) == [(1, 2)]
    assert freed(table) == []
    assert table.take_events() == []
    assert table.held_blocks == 0


@pytest.mark.parametrize(("after", "gone"), [(59.9, False), (60.0, True), (61.0, True)])
def test_holds_end_at_their_deadline(table: HoldTable, clock: Clock, after: float, gone: bool) -> None:
    keep(table, "a", [1], ttl_s=60.0)
    clock.now += after
    table.expire()
    assert (freed(table) == [(1,)]) == gone
    assert table.take_events() == ([("a", "expired")] if gone else [])


def test_many_deadlines_are_reaped_in_order_and_hidden_before(table: HoldTable, clock: Clock) -> None:
    for n in range(50):
        keep(table, f"l{n}", [n + 1], ttl_s=1.0 + (n * 7) % 50)
    clock.now += 25.5
    assert [s.remaining_s for s in table.snapshots()] == sorted(s.remaining_s for s in table.snapshots())
    assert len(table.snapshots()) == 25
    table.expire()
    assert len(freed(table)) == 25
    order = [lease for lease, _ in table.take_events()]
    assert order == sorted(order, key=lambda lease: 1.0 + (int(lease[1:]) * 7) % 50)
    assert table.next_deadline() == 100.0 + 26.0


def test_expired_is_told_from_unknown(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=1.0)
    clock.now += 2.0
    with pytest.raises(NotHeld) as late:
        table.pin("a", 5.0)
    with pytest.raises(NotHeld) as unknown:
        table.pin("b", 5.0)
    assert late.value.expired
    assert not unknown.value.expired
    assert not table.extend("a", 60.0)


def test_extend_never_shortens(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=60.0)
    assert table.extend("a", 10.0)
    clock.now += 59.0
    assert table.extend("a", 60.0)
    clock.now += 59.0
    table.expire()
    assert freed(table) == []
    clock.now += 1.0
    table.expire()
    assert freed(table) == [(1,)]


@pytest.mark.parametrize("how", ["release", "expire", "revoke"])
def test_a_pin_outlives_the_hold(table: HoldTable, clock: Clock, how: str) -> None:
    keep(table, "a", [1, 2], ttl_s=10.0)
    first, _, _ = table.pin("a", 100.0)
    second, _, _ = table.pin("a", 100.0)
    if how == "release":
        table.release("a")
    elif how == "revoke":
        table.revoke_all()
    else:
        clock.now += 10.0
        table.expire()
    assert freed(table) == []
    assert [s.doomed for s in table.snapshots()] == [True]
    with pytest.raises(NotHeld):
        table.pin("a", 5.0)
    assert table.unpin("a", first)
    assert freed(table) == []
    assert table.unpin("a", second)
    assert freed(table) == [(1, 2)]
    assert not table.unpin("a", second)


def test_a_pin_ends_at_its_own_deadline(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=60.0)
    read_id, deadline, _ = table.pin("a", 5.0)
    assert deadline == clock.now + 5.0
    clock.now += 5.0
    table.expire()
    assert not table.unpin("a", read_id)
    assert freed(table) == []
    table.release("a")
    assert freed(table) == [(1,)]


def test_late_readers_are_remembered_for_a_while(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    read_id, _, _ = table.pin("a", 5.0)
    table.unpin("a", read_id)
    clock.now += 6.0
    table.expire()
    assert not table.has_late_readers
    table.pin("a", 5.0)
    clock.now += 5.0
    table.expire()
    assert table.has_late_readers
    clock.now += 61.0
    assert not table.has_late_readers


def test_a_reader_that_was_let_in_has_yet_to_begin(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    assert table.readers_in_s is None
    first, _, _ = table.pin("a", 60.0)
    assert not table.has_readers
    assert table.readers_in_s is not None
    assert 0 < table.readers_in_s < 0.01
    clock.now += table.readers_in_s
    assert table.has_readers
    # One more does not stop the steps for the first.
    second, _, _ = table.pin("a", 60.0)
    assert table.readers_in_s == 0
    table.unpin("a", first)
    assert table.has_readers
    table.unpin("a", second)
    assert not table.has_readers


def test_a_late_reader_is_stepped_for(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    table.pin("a", 5.0)
    clock.now += 5.0
    table.expire()
    assert table.readers_in_s == 0
    assert not table.has_readers


def test_a_read_that_was_ended_unseen_may_still_be_in_flight(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    read_id, _, _ = table.pin("a", 60.0)
    clock.now += 1.0
    table.unpin("a", read_id)
    assert table.readers_in_s == 0
    clock.now += 5.0
    assert table.readers_in_s is None


def test_a_read_is_over_with_its_readers_notice(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    read_id, _, _ = table.pin("a", 60.0)
    clock.now += 1.0
    assert table.read_done("a", read_id)
    assert table.readers_in_s is None
    assert not table.unpin("a", read_id)


def test_who_never_began_is_not_waited_for(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=600.0)
    read_id, _, _ = table.pin("a", 60.0)
    table.unpin("a", read_id)
    assert table.readers_in_s is None


def test_a_pin_belongs_to_its_lease(table: HoldTable) -> None:
    keep(table, "a", [1])
    keep(table, "b", [2])
    read_id, _, _ = table.pin("a", 5.0)
    assert not table.unpin("b", read_id)
    assert table.unpin("a", read_id)


def test_the_same_id_again_replaces(table: HoldTable) -> None:
    keep(table, "a", [1, 2])
    read_id, _, _ = table.pin("a", 5.0)
    keep(table, "a", [2, 3])
    assert freed(table) == []
    table.unpin("a", read_id)
    assert freed(table) == [(1, 2)]
    assert table.snapshot("a") is not None
    assert table.take_events() == []


def test_prefill_holds_end_with_their_readers_notice(table: HoldTable) -> None:
    hold = table.hold("p", kind="prefill", blocks=[1], num_tokens=9, ttl_s=30.0)
    assert hold is not None
    assert table.has_readers
    with pytest.raises(NotHeld):
        table.pin("p", 5.0)
    assert not table.read_done("p", "other")
    assert table.read_done("p", hold.token)
    assert not table.read_done("p", hold.token)
    assert freed(table) == [(1,)]
    assert not table.has_readers


def test_unique_blocks_are_counted_and_forks_share(table: HoldTable) -> None:
    keep(table, "a", [1, 2, 3])
    keep(table, "b", [1, 2, 4])
    assert table.held_blocks == 4
    table.release("a")
    assert table.held_blocks == 3


def test_budget_evicts_the_least_recently_used(table: HoldTable) -> None:
    table.budget = 4
    keep(table, "a", [1, 2])
    keep(table, "b", [3, 4])
    read_id, _, _ = table.pin("a", 5.0)
    table.unpin("a", read_id)
    assert keep(table, "c", [5, 6])
    assert table.take_events() == [("b", "evicted")]
    assert table.held_blocks == 4


def test_budget_spares_the_pinned_and_refuses_what_has_no_room(table: HoldTable) -> None:
    table.budget = 4
    keep(table, "a", [1, 2, 3])
    table.pin("a", 5.0)
    assert not keep(table, "b", [4, 5])
    assert not keep(table, "c", [1, 2, 3, 4, 5])
    assert table.take_events() == []
    assert freed(table) == []
    assert keep(table, "d", [3, 4])


@pytest.mark.parametrize(("budget", "events"), [(5, 0), (4, 0), (3, 1)])
def test_budget_at_its_border(table: HoldTable, budget: int, events: int) -> None:
    table.budget = budget
    keep(table, "a", [1, 2])
    keep(table, "b", [3, 4]) if budget >= 4 else keep(table, "b", [2, 3, 4])
    assert len(table.take_events()) == events


def test_prefill_holds_are_outside_the_budget_and_never_evicted(table: HoldTable) -> None:
    table.budget = 1
    assert table.hold("p", kind="prefill", blocks=[1, 2, 3], num_tokens=9, ttl_s=30.0) is not None
    table.make_room(1, lambda _block: 1)
    assert not table.evict("p")
    assert freed(table) == []
    assert table.revoke_all() == 0


def test_eviction_takes_from_the_tenant_that_holds_most(table: HoldTable) -> None:
    table.budget = 8
    keep(table, "small", [1, 2], tenant="x")
    for n in range(3):
        keep(table, f"big{n}", [10 + 2 * n, 11 + 2 * n], tenant="y")
    keep(table, "new", [30, 31], tenant="x")
    assert table.take_events() == [("big0", "evicted")]


def test_a_hold_that_has_no_room_costs_nobody_theirs(table: HoldTable) -> None:
    table.budget = 6
    keep(table, "a", [1, 2, 3])
    keep(table, "b", [4, 5])
    table.pin("a", 5.0)
    assert not keep(table, "c", [7, 8, 9, 10])
    assert table.take_events() == []
    assert table.snapshot("b") is not None
    assert table.held_blocks == 5
    assert keep(table, "d", [7, 8, 9])
    assert table.take_events() == [("b", "evicted")]


@pytest.mark.parametrize(("blocks", "held", "evicted"), [(10, True, 1), (11, False, 0), (90, False, 0)])
def test_a_tenants_first_hold_takes_no_more_than_others_have(
    table: HoldTable, blocks: int, held: bool, evicted: int
) -> None:
    table.budget = 100
    for n in range(10):
        keep(table, f"l{n}", list(range(10 * n, 10 * n + 10)), tenant=f"t{n}")
    assert keep(table, "new", list(range(1000, 1000 + blocks)), tenant="x") == held
    assert len(table.take_events()) == evicted


def test_the_tenant_that_holds_most_makes_room_itself(table: HoldTable) -> None:
    table.budget = 10
    keep(table, "other", [1, 2, 3], tenant="y")
    keep(table, "old", [11, 12, 13, 14, 15], tenant="x")
    assert keep(table, "new", [21, 22, 23, 24, 25, 26, 27], tenant="x")
    assert table.take_events() == [("old", "evicted")]


def test_nobody_goes_for_the_budget_whose_blocks_stay_held(table: HoldTable) -> None:
    table.budget = 4
    keep(table, "shared", [1, 2])
    keep(table, "reader", [1, 2])
    keep(table, "old", [3, 4])
    table.pin("reader", 5.0)
    assert keep(table, "new", [5, 6])
    assert table.take_events() == [("old", "evicted")]


@pytest.mark.parametrize("how", ["release", "evict", "replace"])
def test_an_ended_hold_keeps_nothing_alive(table: HoldTable, how: str) -> None:
    class Payload:
        pass

    payload = Payload()
    seen = weakref.ref(payload)
    table.hold("a", kind="decode", blocks=[1], num_tokens=9, ttl_s=600.0, payload=payload)
    table.unpin("a", table.pin("a", 100.0)[0])
    del payload
    gc.collect()
    assert seen() is not None
    if how == "release":
        table.release("a")
    elif how == "evict":
        table.evict("a")
    else:
        keep(table, "a", [2])
    gc.collect()
    assert seen() is None


def test_a_hold_that_replaced_another_ends_at_its_own_deadline(table: HoldTable, clock: Clock) -> None:
    keep(table, "a", [1], ttl_s=10.0)
    keep(table, "a", [2], ttl_s=20.0)
    freed(table)
    clock.now += 10.0
    table.expire()
    assert freed(table) == []
    clock.now += 10.0
    table.expire()
    assert freed(table) == [(2,)]


def test_threads_leave_the_counts_right(table: HoldTable) -> None:
    def work(name: int) -> None:
        for n in range(200):
            lease = f"{name}-{n}"
            keep(table, lease, [n % 7, 100 + n % 5])
            read_id, _, _ = table.pin(lease, 5.0)
            table.release(lease)
            table.unpin(lease, read_id)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.held_blocks == 0
    assert len(freed(table)) == 800
    assert table.snapshots() == []


def test_what_no_eviction_would_free_is_looked_for_again_when_something_changes_or_soon(
    table: HoldTable, clock: Clock
) -> None:
    asked: list[int] = []
    busy = 2

    def references(block: int) -> int:
        asked.append(block)
        return busy

    def looked(shortage: int = 2) -> bool:
        before = len(asked)
        table.make_room(shortage, references)
        return len(asked) > before

    keep(table, "a", [1, 2])
    keep(table, "b", [3])
    assert looked()
    assert not looked()
    assert not looked(3)
    # Less may be had.
    assert looked(1)
    keep(table, "c", [4])
    assert looked()
    lease, _, _ = table.pin("b", 5.0)
    table.unpin("b", lease)
    assert looked()
    assert not looked()
    busy = 1
    clock.now += 0.1
    assert looked()
    assert [event for event, _ in table.take_events()] == ["a"]
