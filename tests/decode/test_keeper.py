"""The keeper alone: order of publication, and races with eviction."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from keeper_kit import TOKENS, Bench, begin, scope

from kvloop.decode.keeper import PATIENCE_S
from kvloop.decode.lease import UNTOLD_S, Ended, Lease, LeaseTable, State
from kvloop.engine.port import Hold, ReadGrant
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import lease_pb2, turn_pb2


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a table without waiters
            await asyncio.sleep(0)


async def test_entry_ends_before_its_lease() -> None:
    bench = Bench()
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    found = await bench.directory.lookup(scope().scope)
    assert found.remaining_s == pytest.approx(55.0)
    bench.clock.now += 55.5
    assert await bench.standing(scope()) is None
    # Whoever found it in time can still read.
    assert (await bench.reading.begin(begin("a"))).num_tokens == 8
    bench.clock.now += 4.4
    with pytest.raises(Failure, match="time is over"):
        await bench.reading.begin(begin("a"))


async def test_short_leases_keep_half_of_their_time() -> None:
    bench = Bench()
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 4.0))
    assert (await bench.directory.lookup(scope().scope)).remaining_s == pytest.approx(2.0)


async def test_tokens_nobody_was_told_are_not_offered() -> None:
    bench = Bench()
    kept = await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 12, 60.0))
    assert kept.lease is not None
    assert kept.lease.num_tokens == 9
    assert kept.lease.tokens == TOKENS


async def test_a_lease_evicted_while_it_is_published_leaves_no_entry() -> None:
    bench = Bench()
    bench.directory.after = asyncio.Event()
    watching = asyncio.create_task(bench.keeper.watch())
    keeping = asyncio.create_task(bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0)))
    await bench.directory.publishing.wait()
    bench.engine.end("a", "evicted")
    await until(lambda: not bench.keeper.table.live(scope().scope))
    bench.directory.after.set()
    assert (await keeping).lease is None
    assert await bench.standing(scope()) is None
    watching.cancel()


async def test_a_lease_whose_hold_ended_before_it_was_kept_ends_by_its_deadline() -> None:
    bench = Bench()
    watching = asyncio.create_task(bench.keeper.watch())
    hold = bench.engine.hold("a", 8, 60.0)
    bench.engine.end("a", "evicted")
    await until(bench.engine.events.empty)
    kept = await bench.keeper.keep(scope(), TOKENS, hold)
    bench.clock.now += 60.0 + UNTOLD_S - 0.1
    bench.keeper.table.sweep(bench.clock.now)
    assert list(bench.keeper.table.held()) == [kept.lease]
    bench.clock.now += 0.1
    bench.keeper.table.sweep(bench.clock.now)
    assert len(bench.keeper.table) == 0
    assert bench.keeper.table.live(scope().scope) == []
    assert kept.lease is not None
    assert kept.lease.ended is Ended.EXPIRED
    watching.cancel()


async def test_g5_a_late_eviction_leaves_the_newer_entry() -> None:
    bench = Bench()
    await bench.keeper.keep(scope(start=1), TOKENS, bench.engine.hold("a", 8, 60.0))
    watching = asyncio.create_task(bench.keeper.watch())
    bench.directory.before = asyncio.Event()
    bench.directory.publishing.clear()
    keeping = asyncio.create_task(bench.keeper.keep(scope(start=2), TOKENS, bench.engine.hold("b", 8, 60.0)))
    await bench.directory.publishing.wait()
    bench.engine.end("a", "evicted")
    await until(lambda: len(bench.keeper.table) == 1)
    bench.directory.before.set()
    assert (await keeping).lease is not None
    await bench.keeper.settled()
    assert await bench.standing(scope()) == "b"
    watching.cancel()


async def test_an_earlier_turn_that_ends_later_loses_even_after_the_directory_forgot() -> None:
    bench = Bench()
    await bench.keeper.keep(scope(start=2), TOKENS, bench.engine.hold("later", 8, 60.0))
    await bench.directory.remove(scope().scope, "later")
    kept = await bench.keeper.keep(scope(start=1), TOKENS, bench.engine.hold("earlier", 8, 60.0))
    assert kept.lease is None
    assert set(bench.engine.held) == {"later"}


async def test_of_two_turns_with_one_start_one_is_held_and_found() -> None:
    bench = Bench()
    # The first answer comes after the second publication was written, if nothing keeps them apart.
    bench.directory.lags = [5, 0]
    await asyncio.gather(
        bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0)),
        bench.keeper.keep(scope(), TOKENS, bench.engine.hold("b", 8, 60.0)),
    )
    assert [await bench.standing(scope())] == list(bench.engine.held)


async def test_publication_is_tried_again_until_it_succeeds() -> None:
    bench = Bench()
    bench.directory.down = True
    kept = await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    assert kept.lease is not None
    bench.directory.publishing.clear()
    await bench.directory.publishing.wait()
    bench.directory.down = False
    await bench.keeper.settled()
    assert await bench.standing(scope()) == "a"


async def test_publication_is_given_up_in_time() -> None:
    bench = Bench(publish_bound_s=30.0)
    bench.directory.down = True
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    bench.clock.now += 31
    await bench.keeper.settled()
    assert bench.engine.held == {}
    assert len(bench.keeper.table) == 0


async def test_a_release_ends_the_attempts_to_publish() -> None:
    bench = Bench()
    bench.directory.down = True
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    assert await bench.keeper.release("a")
    bench.directory.down = False
    await bench.keeper.settled()
    assert await bench.standing(scope()) is None
    assert bench.engine.held == {}


async def test_a_keep_that_is_cancelled_holds_nothing() -> None:
    bench = Bench()
    bench.directory.before = asyncio.Event()
    keeping = asyncio.create_task(bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0)))
    await bench.directory.publishing.wait()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert bench.engine.held == {}


async def test_a_turn_that_ended_as_it_was_cancelled_holds_nothing() -> None:
    bench = Bench()
    bench.keeper.discard_later("a")
    await bench.engine.settling.wait()
    bench.engine.hold("a", 8, 60.0)
    await bench.keeper.settled()
    assert bench.engine.held == {}


async def test_a_cancelled_turn_that_ends_late_is_let_go_of_then() -> None:
    bench = Bench()
    kept = await bench.keeper.keep_cancelled(scope(), lambda: TOKENS, "a")
    assert kept.lease is None
    bench.engine.settling.clear()
    await bench.engine.settling.wait()
    bench.engine.hold("a", 8, 60.0)
    await bench.keeper.settled()
    assert bench.engine.held == {}
    assert bench.engine.patience == [None, PATIENCE_S]


async def test_a_cancelled_attempt_does_not_replace_the_one_that_was_completed() -> None:
    """Elsewhere or here: both are of one turn, so they began at the same time."""
    bench, turn = Bench(), scope(start=1000)
    bench.engine.hold("partial", 8, 60.0)
    await bench.directory.publish(
        turn.scope,
        lease_pb2.DirectoryEntry(
            lease_id="whole", decode_endpoint="127.0.0.1:8", num_tokens=8, turn_start_us=turn.turn_start_us
        ),
        60.0,
    )
    kept = await bench.keeper.keep_cancelled(turn, lambda: TOKENS, "partial")
    assert kept.lease is None
    assert bench.engine.held == {}
    assert await bench.standing(turn) == "whole"


@pytest.mark.parametrize("by", ["lease", "scope"])
async def test_a_release_whose_call_ends_is_carried_out(by: str) -> None:
    bench = Bench()
    for name, start in (("a", 2), ("b", 1)):
        bench.keeper.table.add(lease(name, start))
        bench.engine.hold(name, 8, 60.0)
    bench.engine.releasing = asyncio.Event()
    call = asyncio.ensure_future(
        bench.keeper.release("a") if by == "lease" else bench.keeper.release_scope(b"s")
    )
    await until(lambda: not bench.keeper.table.live(b"s") if by == "scope" else len(bench.keeper.table) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    bench.engine.releasing.set()
    await bench.keeper.settled()
    assert list(bench.engine.held) == (["b"] if by == "lease" else [])


async def test_a_publication_that_comes_too_late_still_names_the_lease_it_displaced() -> None:
    bench = Bench()
    entry = lease_pb2.DirectoryEntry(
        version=1, lease_id="other", decode_endpoint="127.0.0.1:8", turn_start_us=1, held=True
    )
    await bench.directory.publish(scope().scope, entry, 60.0)
    bench.directory.after = asyncio.Event()
    bench.directory.publishing.clear()
    keeping = asyncio.create_task(bench.keeper.keep(scope(start=2), TOKENS, bench.engine.hold("a", 8, 60.0)))
    await bench.directory.publishing.wait()
    releasing = asyncio.create_task(bench.keeper.release("a"))
    await until(lambda: not bench.keeper.table.live(scope().scope))
    bench.directory.after.set()
    kept = await keeping
    assert kept.lease is None
    assert kept.displaced is not None
    assert kept.displaced.lease_id == "other"
    assert await releasing


async def test_the_end_of_a_conversation_takes_what_is_named_but_not_held_along() -> None:
    bench = Bench(soft_hints=True)
    watching = asyncio.create_task(bench.keeper.watch())
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    bench.engine.end("a", "evicted")
    await until(lambda: not bench.keeper.table.live(scope().scope))
    assert await bench.standing(scope()) == "a"
    assert not await bench.keeper.release_scope(scope().scope)
    assert await bench.standing(scope()) is None
    watching.cancel()


async def test_a_pin_on_a_lease_that_ended_meanwhile_is_forgotten_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    table = bench.keeper.table
    one = table.get("a")
    assert one is not None
    begin_read = bench.engine.begin_read

    async def granted(*arguments: Any) -> ReadGrant:
        grant = await begin_read(*arguments)
        table.end(one, Ended.EVICTED, bench.clock.now)
        return grant

    monkeypatch.setattr(bench.engine, "begin_read", granted)
    await bench.reading.begin(begin("a"))
    assert (table.pins, len(table), one.is_live()) == (1, 1, False)
    bench.clock.now += 31.0
    table.sweep(bench.clock.now)
    assert (table.pins, len(table)) == (0, 0)
    assert table.get("a") is one


async def test_the_watch_goes_on_after_what_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    failures = iter([KeyError("surprise"), ValueError("another")])
    holds = bench.engine.holds

    async def failing() -> list[Hold]:
        for failure in failures:
            raise failure
        return await holds()

    monkeypatch.setattr(bench.engine, "holds", failing)
    watching = asyncio.create_task(bench.keeper.watch())
    bench.engine.end("a", "evicted")
    async with asyncio.timeout(5):
        while len(bench.keeper.table) and not watching.done():  # noqa: ASYNC110 - a table without waiters
            await asyncio.sleep(0.001)
    assert len(bench.keeper.table) == 0
    watching.cancel()


async def test_missed_events_are_made_up_for() -> None:
    bench = Bench()
    await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    del bench.engine.held["a"]
    await bench.keeper.reconcile()
    assert await bench.standing(scope()) is None
    assert len(bench.keeper.table) == 0


async def test_revoking_leaves_nothing() -> None:
    bench = Bench()
    for name in "abc":
        await bench.keeper.keep(scope(name), TOKENS, bench.engine.hold(name, 8, 60.0))
    await bench.keeper.revoke_all()
    assert bench.engine.held == {}
    assert [await bench.standing(scope(name)) for name in "abc"] == [None] * 3


async def test_revoking_ends_holds_that_are_nobody_s_too() -> None:
    bench = Bench()
    bench.engine.hold("stray", 8, 60.0)
    await bench.keeper.revoke_all()
    assert bench.engine.held == {}


async def test_ttl_as_asked_up_to_the_cap() -> None:
    bench = Bench(ttl_s=480.0, max_ttl_s=600.0)
    retention = turn_pb2.Retention()
    assert bench.keeper.ttl_s(retention) == 480.0
    for asked, given_ in ((599, 599.0), (600, 600.0), (601, 600.0)):
        retention.ttl.FromSeconds(asked)
        assert bench.keeper.ttl_s(retention) == given_


def lease(lease_id: str, start: int = 1) -> Lease:
    return Lease(
        lease_id=lease_id,
        scope=b"s",
        digest_key=b"k",
        conversation_id="c",
        tenant="t",
        turn_start_us=start,
        tokens=TOKENS,
        num_tokens=9,
        num_blocks=3,
        deadline=60.0,
        publish_wall=0.0,
    )


def test_doomed_leases_are_left_with_the_last_pin() -> None:
    table = LeaseTable()
    one = lease("a")
    table.add(one)
    table.pin(one, "r1", now=0.0, pin_s=30.0)
    table.pin(one, "r2", now=0.0, pin_s=10.0)
    assert table.end(one, Ended.RELEASED, now=0.0)
    assert not table.end(one, Ended.EXPIRED, now=0.0)
    assert (one.state, one.ended, one.tokens) == (State.DOOMED, Ended.RELEASED, b"")
    assert table.newest(b"s") is None
    table.sweep(now=10.0)
    assert table.unpin("r2", now=10.0) is None
    assert [left.state for left in table.held()] == [State.DOOMED]
    assert table.unpin("r1", now=11.0) is one
    assert [left.state for left in (one,)] == [State.SOFT]
    assert len(table) == 0
    assert table.get("a") is one


def test_few_ended_leases_are_remembered() -> None:
    table = LeaseTable(remembered=2)
    for name in "abc":
        one = lease(name)
        table.add(one)
        table.end(one, Ended.RELEASED, now=0.0)
    assert [table.get(name) is not None for name in "abc"] == [False, True, True]


def test_of_two_leases_with_one_start_the_later_added_is_newest() -> None:
    table = LeaseTable()
    for name, start in (("a", 2), ("b", 2), ("c", 1)):
        table.add(lease(name, start))
    newest = table.newest(b"s")
    assert newest is not None
    assert newest.lease_id == "b"
