"""Leases of live conversations: prolonged in time, by little, together, and never past the longest hold."""

import asyncio
from typing import Any

import pytest
from keeper_kit import Bench, scope

from kvloop.decode.lease import Ended
from kvloop.decode.prolonging import MOST_AT_ONCE
from kvloop.runtime.tokens import pack

TOKENS = pack(range(1, 10))
TTL_S = 480.0


async def kept(bench: Bench, conversation: str = "c", ttl_s: float = TTL_S) -> None:
    hold = bench.engine.hold(conversation, 8, ttl_s)
    assert (await bench.keeper.keep(scope(conversation), TOKENS, hold)).lease is not None


async def alive(bench: Bench, conversation: str = "c", for_s: float = 1e5) -> None:
    await bench.directory.set_alive(scope(conversation).scope, for_s)


async def at(bench: Bench, second: float) -> None:
    """Look at the leases at a time after the start."""
    bench.clock.now = 1000.0 + second
    await bench.prolonger.sweep()


def left(bench: Bench, conversation: str = "c") -> float:
    (lease,) = bench.keeper.table.live(scope(conversation).scope)
    assert lease.deadline == bench.engine.held[conversation]
    return lease.remaining_s(bench.clock.now)


@pytest.mark.parametrize(("second", "expected"), [(461.2, 18.8), (461.3, 60.0), (474.9, 60.0)])
async def test_a_live_lease_is_prolonged_shortly_before_its_end(second: float, expected: float) -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    await at(bench, second)
    assert left(bench) == pytest.approx(expected)
    # Readers need time too: the entry ends earlier, and is there all along.
    found = await bench.directory.lookup(scope().scope)
    assert found.entry is not None
    assert found.remaining_s == pytest.approx(expected - 5.0, abs=0.01)


async def test_a_lease_lives_on_while_its_session_is_open_and_no_longer() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench, for_s=600.0)
    for second in range(0, 600, 5):
        await at(bench, second)
    assert left(bench) > 0
    assert bench.prolonger.prolonged >= 3
    until = bench.engine.held["c"]
    for second in range(600, 800, 1):
        await at(bench, second)
    assert bench.engine.held["c"] == until <= 1000.0 + 660.0


async def test_nothing_is_asked_about_before_it_is_due() -> None:
    bench = Bench()
    for number in range(20):
        await kept(bench, f"c{number}")
    for second in range(0, 461, 15):
        await at(bench, second)
    assert bench.directory.renewals == []


async def test_what_is_due_together_is_asked_about_in_one_call() -> None:
    bench = Bench()
    for number in range(MOST_AT_ONCE + 10):
        await kept(bench, f"c{number}")
        await alive(bench, f"c{number}")
    await at(bench, 470.0)
    await at(bench, 470.0)
    assert [len(call) for call in bench.directory.renewals] == [MOST_AT_ONCE, 10]
    assert bench.prolonger.prolonged == MOST_AT_ONCE + 10


async def test_short_leases_are_prolonged_by_no_more_than_their_own_time() -> None:
    bench = Bench()
    await kept(bench, ttl_s=4.0)
    await alive(bench)
    await at(bench, 1.4)
    assert bench.directory.renewals == []
    for tenth in range(15, 100):
        await at(bench, tenth / 10)
        assert 0 < left(bench) <= 4.0
        assert await bench.standing(scope()) == "c"


async def test_nothing_is_held_past_the_longest_hold() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    for second in range(0, 3700, 5):
        await at(bench, second)
    assert bench.engine.held["c"] == 1000.0 + 3600.0


async def test_a_session_opened_late_still_saves_the_lease() -> None:
    bench = Bench()
    await kept(bench)
    await at(bench, 466.0)
    await at(bench, 471.0)
    await alive(bench)
    await at(bench, 478.0)
    assert left(bench) == pytest.approx(60.0)


async def test_a_lease_without_session_is_asked_about_a_few_times_and_ends() -> None:
    bench = Bench()
    await kept(bench)
    for tenth in range(4600, 4900):
        await at(bench, tenth / 10)
    assert 2 <= len(bench.directory.renewals) <= 6
    assert bench.engine.held["c"] == 1000.0 + TTL_S


async def test_a_store_that_is_away_for_a_moment_costs_no_lease() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    bench.directory.down = True
    await at(bench, 466.0)
    assert left(bench) == pytest.approx(14.0)
    bench.directory.down = False
    await at(bench, 476.0)
    assert left(bench) == pytest.approx(60.0)


async def test_an_entry_that_the_store_lost_comes_back() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    await bench.directory.remove(scope().scope, "c")
    await at(bench, 466.0)
    assert await bench.standing(scope()) == "c"


async def test_another_worker_s_lease_lets_this_one_lapse() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    found = await bench.directory.lookup(scope().scope)
    assert found.entry is not None
    found.entry.lease_id, found.entry.turn_start_us = "elsewhere", 2
    await bench.directory.publish(scope().scope, found.entry, 900.0)
    await at(bench, 466.0)
    assert left(bench) == pytest.approx(14.0)


async def test_a_hold_that_is_gone_already_takes_its_entry_along() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    del bench.engine.held["c"]
    await at(bench, 466.0)
    assert bench.keeper.table.endings[Ended.EVICTED] == 1
    assert await bench.standing(scope()) is None


async def test_an_engine_in_trouble_is_asked_again() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    bench.engine.gone = True
    await at(bench, 466.0)
    bench.engine.gone = False
    await at(bench, 476.0)
    assert left(bench) == pytest.approx(60.0)


async def test_what_nobody_expected_costs_neither_this_lease_nor_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    for conversation in "cd":
        await kept(bench, conversation)
        await alive(bench, conversation)
    renew, failures = bench.directory.renew, iter([KeyError("surprise")])

    async def failing(renewals: Any) -> Any:
        for failure in failures:
            raise failure
        return await renew(renewals)

    monkeypatch.setattr(bench.directory, "renew", failing)
    running = asyncio.create_task(bench.prolonger.run())
    bench.clock.now = 1466.0
    await kept(bench, "e", ttl_s=0.01)  # stirs it
    async with asyncio.timeout(5):
        while bench.prolonger.prolonged < 2 and not running.done():
            await asyncio.sleep(0.001)
            bench.clock.now += 0.1
    assert bench.prolonger.prolonged >= 2
    running.cancel()


async def test_what_is_over_is_not_asked_about() -> None:
    bench = Bench()
    await kept(bench)
    await alive(bench)
    assert await bench.keeper.release("c")
    await at(bench, 466.0)
    assert bench.directory.renewals == []


async def test_it_wakes_for_a_lease_that_is_due_first() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.prolonger.run())
    await kept(bench)
    await alive(bench, "soon")
    hold = bench.engine.hold("soon", 8, 0.01)
    await bench.keeper.keep(scope("soon"), TOKENS, hold)
    bench.clock.now += 0.0049
    async with asyncio.timeout(5):
        while not bench.prolonger.prolonged:  # noqa: ASYNC110 - a counter without waiters
            await asyncio.sleep(0.001)
    running.cancel()
