"""Workers compared by the milliseconds that are ahead of a turn there, few of them and many."""

import asyncio
from collections import Counter

import pytest
from router_fakes import fake_fleet, until
from test_workers import CLOCK, DECODE, learn, pool_of

from kvloop.metastore.registry import TTL_S
from kvloop.metastore.ttl import ANNOUNCEMENTS_PER_TTL
from kvloop.router import placing
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool

OWN_MS, STEP_MS = 100.0, 25.0
AHEAD = placing.Ahead(placing.prefill_ms(OWN_MS), placing.decode_ms(STEP_MS))
SIZES = pytest.mark.parametrize("count", [4, 2 * placing.FEW])


async def fleet_of(count: int) -> WorkerPool:
    return await pool_of([{}] * count, [{}] * count)


@SIZES
@pytest.mark.parametrize(("turns", "ms", "stays"), [(1, 201.0, False), (1, 200.0, True), (50, 200.0, True)])
async def test_a_home_is_left_for_what_its_turns_take_not_for_their_number(
    count: int, turns: int, ms: float, stays: bool
) -> None:
    pool = await fleet_of(count)
    served = pool.resolve("m", "")
    home = pool.pick(served, home=b"c", ahead=AHEAD).prefill
    assert home is not None
    home.in_flight, home.pending_ms = turns, ms
    for _ in range(20):
        assert (pool.pick(served, home=b"c", ahead=AHEAD).prefill is home) == stays
    # The verdict counts the time at the same worker.
    assert (pool.likely_prefill(served, b"c", AHEAD.prefill) is home) == stays
    # Where all have as much to do, nobody is better off elsewhere.
    for worker in pool.prefill:
        worker.pending_ms = 5000.0
    assert pool.pick(served, home=b"c", ahead=AHEAD).prefill is home
    await pool.stop()


@SIZES
@pytest.mark.parametrize(("others", "stays"), [(2, True), (3, False)])
async def test_turns_of_other_routers_count_like_this_one(count: int, others: int, stays: bool) -> None:
    pool = await fleet_of(count)
    served = pool.resolve("m", "")
    home = pool.pick(served, home=b"c", ahead=AHEAD).prefill
    assert home is not None
    # Its load has five of this router's own, which take no time to speak of.
    home.in_flight = 5
    assert home.info is not None
    home.announced(home.info.epoch, 5.0 + others, draining=False)
    assert (pool.pick(served, home=b"c", ahead=AHEAD).prefill is home) == stays
    await pool.stop()


@SIZES
@pytest.mark.parametrize(
    ("load", "ms", "stays"), [(0, 200.0, True), (0, 201.0, False), (8, 0.0, True), (8, 1, False)]
)
async def test_a_holder_is_left_for_its_turns_and_the_prompts_that_it_computes(
    count: int, load: int, ms: float, stays: bool
) -> None:
    pool = await fleet_of(count)
    served, holder = pool.resolve("m", ""), pool.decode[1]
    holder.in_flight, holder.pending_ms = load, ms
    assert (pool.pick(served, prefer_decode=holder, ahead=AHEAD).decode is holder) == stays
    await pool.stop()


@SIZES
async def test_the_worker_with_less_ahead_is_taken_and_the_load_decides_between_equals(count: int) -> None:
    pool = await fleet_of(count)
    served = pool.resolve("m", "")
    idle, *others = pool.prefill
    for worker in others:
        worker.in_flight, worker.pending_ms = 1, 900.0
    # Many, but short ones.
    idle.in_flight, idle.pending_ms = 9, 90.0
    picks = Counter(pool.pick(served, ahead=AHEAD).prefill is idle for _ in range(2000))
    assert picks[True] > 1.5 * 2000 / count
    for worker in others:
        worker.pending_ms = 90.2
    picks = Counter(pool.pick(served, ahead=AHEAD).prefill is idle for _ in range(2000))
    assert picks[True] < 0.5 * 2000 / count
    await pool.stop()


def say(worker: AnyWorker, load: float, capacity: int = 0) -> None:
    assert worker.info is not None
    worker.announced(worker.info.epoch, load, draining=False, capacity=capacity)


async def test_own_turns_that_have_ended_are_not_taken_for_others() -> None:
    pool = await fleet_of(2)
    for worker in (pool.prefill[0], pool.decode[0]):
        worker.in_flight = 6
        say(worker, 6.0)
        worker.in_flight = 0
        assert AHEAD.prefill.of(worker) == AHEAD.decode.of(worker) == worker.load == 0
    await pool.stop()


async def test_own_turns_come_on_top_of_the_others() -> None:
    pool = await fleet_of(2)
    for worker, measure, each_ms in (
        (pool.prefill[0], AHEAD.prefill, OWN_MS),
        (pool.decode[0], AHEAD.decode, STEP_MS),
    ):
        say(worker, 10.0)
        before = measure.of(worker)
        worker.in_flight = 3
        if worker is pool.prefill[0]:
            worker.pending_ms = 3 * OWN_MS
        assert measure.of(worker) == before + 3 * each_ms == 13 * each_ms
        assert worker.load == 13
    await pool.stop()


async def test_what_others_gave_to_p_is_done_as_time_goes_by_and_d_keeps_it() -> None:
    pool = await fleet_of(2)
    prefill, decode = pool.prefill[0], pool.decode[0]
    for left_ms in (1000.0, 300.0, 0.0):
        for worker in (prefill, decode):
            # The same reading again: it was said once.
            say(worker, 10.0)
        assert AHEAD.prefill.of(prefill) == pytest.approx(left_ms)
        assert AHEAD.decode.of(decode) == 10 * STEP_MS
        CLOCK.now += 0.7
    say(prefill, 4.0)
    assert AHEAD.prefill.of(prefill) == 4 * OWN_MS
    # By now it has said so anew.
    CLOCK.now += TTL_S / ANNOUNCEMENTS_PER_TTL
    say(prefill, 4.0)
    assert AHEAD.prefill.of(prefill) == 4 * OWN_MS
    await pool.stop()


@pytest.mark.parametrize(("here", "there", "both"), [(8.0, 9.0, True), (0.0, 1.0, False), (6.0, 9.0, False)])
async def test_not_every_router_runs_to_the_one_that_said_a_little_less(
    here: float, there: float, both: bool
) -> None:
    pool = await fleet_of(2)
    served = pool.resolve("m", "")
    for workers in (pool.prefill, pool.decode):
        say(workers[0], here)
        say(workers[1], there)
    pairs = [pool.pick(served, ahead=AHEAD) for _ in range(100)]
    assert (len({pair.prefill for pair in pairs}) == 2) == both
    assert (len({pair.decode for pair in pairs}) == 2) == both
    assert both or (pairs[0].prefill, pairs[0].decode) == (pool.prefill[0], pool.decode[0])
    await pool.stop()


async def test_nothing_known_of_a_turn_leaves_the_number_of_turns() -> None:
    assert placing.prefill_ms(0.0) is placing.decode_ms(0.0) is placing.TURNS


async def test_a_short_turn_does_not_wait_behind_a_long_one_at_home() -> None:
    async with fake_fleet(prefills=2) as fleet:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        for prefill in fleet.prefills:
            prefill.on_prefill = wait
        app = await fleet.router()
        client = await fleet.client(app)
        long = asyncio.create_task(client.say([1] * 4000))
        await until(lambda: any(p.requests for p in fleet.prefills), "the long turn's leg")
        [home] = [p for p in fleet.prefills if p.requests]
        # A fork is at home where its parent is.
        short = asyncio.create_task(client.say([2] * 40, "fork", parent_conversation_id="c"))
        await until(lambda: sum(len(p.requests) for p in fleet.prefills) == 2, "the short turn's leg")
        assert len(home.requests) == 1
        # As long a one would gain nothing elsewhere.
        other = asyncio.create_task(client.say([3] * 4000, "twin", parent_conversation_id="c"))
        await until(lambda: sum(len(p.requests) for p in fleet.prefills) == 3, "the other long turn's leg")
        assert len(home.requests) == 2
        gate.set()
        await asyncio.gather(long, short, other)
        assert all(worker.pending_ms == 0 for worker in app.pool.prefill)


@SIZES
@pytest.mark.parametrize(("load", "ms", "stays"), [(8, 0.0, True), (8, 1.0, False), (9, 0.0, False)])
async def test_a_verdict_calls_a_holder_overloaded_where_placing_leaves_it(
    count: int, load: int, ms: float, stays: bool
) -> None:
    pool = await fleet_of(count)
    served, holder = pool.resolve("m", ""), pool.decode[1]
    holder.in_flight, holder.pending_ms = load, ms
    assert pool.is_overloaded(served, holder, AHEAD.decode) != stays
    for worker in pool.decode:
        worker.in_flight = load
    assert not pool.is_overloaded(served, holder, AHEAD.decode)
    # Nobody else is there.
    for worker in pool.decode:
        worker.in_flight, worker.draining = 0, worker is not holder
    holder.in_flight = 100
    assert not pool.is_overloaded(served, holder, AHEAD.decode)
    await pool.stop()


@SIZES
async def test_of_two_with_as_many_turns_the_larger_one_has_less_to_do(count: int) -> None:
    pool = await fleet_of(count)
    served, (small, large, *others) = pool.resolve("m", ""), pool.decode
    for worker in (large, *others):
        say(worker, 30.0, capacity=256)
    # Not all have said how much they take.
    assert pool.least_capacity(served) == 0
    say(small, 30.0, capacity=32)
    assert pool.least_capacity(served) == 32
    measure = placing.decode_ms(STEP_MS, pool.least_capacity(served))
    assert measure.of(small) == 8 * measure.of(large) == 30 * STEP_MS
    ahead = placing.Ahead(AHEAD.prefill, measure)
    decodes = [pool.pick(served, ahead=ahead).decode for _ in range(200)]
    assert decodes.count(small) <= 200 // count
    assert pool.pick(served, prefer_decode=small, ahead=ahead).decode is not small
    assert pool.pick(served, prefer_decode=large, ahead=ahead).decode is large
    # What its next life takes it has not said yet.
    learn(small, DECODE, epoch="next")
    assert pool.least_capacity(served) == 0
    assert measure.of(small) == 0
    await pool.stop()
