"""Choices among many workers: the same promises as among few, without looking at all of them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import make_info
from test_workers import CLOCK, DECODE, PREFILL, learn, pool_of

from kvloop.router import placing
from kvloop.router.worker import AnyWorker, Worker
from kvloop.router.workers import WorkerPool

MANY = 2 * placing.FEW


class Counted(Worker[Any]):
    """A worker that counts how often it was looked at."""

    looks = 0

    @property
    def ready(self) -> bool:
        Counted.looks += 1
        return super().ready


def homes(count: int) -> list[bytes]:
    dice = random.Random(7)
    return [dice.randbytes(32) for _ in range(count)]


def everybody(pool: WorkerPool) -> list[AnyWorker]:
    return [*pool.prefill, *pool.decode]


async def many(prefills: int = MANY, decodes: int = MANY) -> WorkerPool:
    return await pool_of([{}] * prefills, [{}] * decodes)


@pytest.mark.parametrize("count", [4, 400])
async def test_a_turn_looks_at_no_more_workers_of_many_than_of_some(count: int) -> None:
    pool = await many(count, count)
    for worker in everybody(pool):
        worker.__class__ = Counted
    served, holder = pool.resolve("m", ""), pool.decode[1]
    Counted.looks = 0
    for home in homes(50):
        pool.pick(served, home=home, prefer_decode=holder, reads_back=True, reads_from=holder)
        pool.likely_prefill(served, home)
        pool.pick(served)
    assert 0 < Counted.looks / 50 <= 20
    await pool.stop()


async def test_conversations_keep_their_homes_among_many_and_few_move() -> None:
    picked: list[list[str]] = []
    for count in (MANY, MANY - 1):
        pool = await many(count)
        served = pool.resolve("m", "")
        first = [pool.pick(served, home=home).prefill for home in homes(3000)]
        assert first == [pool.pick(served, home=home).prefill for home in homes(3000)]
        # One that looks at all of them finds the same.
        assert first == [placing.at_home(pool.prefill, home) for home in homes(3000)]
        picked.append([worker.endpoint for worker in first if worker is not None])
        await pool.stop()
    shares = Counter(picked[0])
    assert len(shares) == MANY
    assert max(shares.values()) < 3 * 3000 / MANY
    moved = {a for a, b in zip(*picked, strict=True) if a != b}
    assert moved == {f"p{MANY - 1}:1"}


async def test_whoever_stands_in_for_a_home_is_the_same_for_all_routers() -> None:
    pool = await many()
    served, home = pool.resolve("m", ""), homes(1)[0]
    for _ in range(6):
        ready = [worker for worker in pool.prefill if worker.ready]
        chosen = pool.pick(served, home=home).prefill
        assert chosen is not None
        assert chosen is placing.at_home(ready, home)
        chosen.draining = True
    await pool.stop()


@pytest.mark.parametrize("count", [3, placing.FEW, MANY])
async def test_homes_are_worked_out_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await many(count, count)
    served, home = pool.resolve("m", ""), homes(1)[0]
    chosen = pool.pick(served, home=home).prefill
    hashed: list[bytes] = []
    monkeypatch.setattr(placing, "_number", hashed.append)
    assert pool.pick(served, home=home).prefill is pool.likely_prefill(served, home) is chosen
    assert not hashed
    await pool.stop()


async def test_whoever_stands_in_for_many_homes_is_the_same_for_all_routers() -> None:
    pool = await many(placing.FEW, placing.FEW)
    served = pool.resolve("m", "")
    for worker in pool.prefill[4:]:
        worker.draining = True
    ready = pool.prefill[:4]
    for home in homes(100):
        chosen = placing.at_home(ready, home)
        assert pool.pick(served, home=home).prefill is pool.likely_prefill(served, home) is chosen
    await pool.stop()


async def test_a_restart_in_place_moves_nobody_and_is_seen() -> None:
    pool = await many()
    served = pool.resolve("m", "")
    before = [pool.pick(served, home=home).prefill for home in homes(100)]
    learn(pool.prefill[0], PREFILL, epoch="next")
    learn(pool.decode[0], DECODE, epoch="next")
    assert pool.holder("elsewhere:1", "next") is pool.decode[0]
    assert [pool.pick(pool.resolve("m", ""), home=home).prefill for home in homes(100)] == before
    await pool.stop()


async def test_a_worker_that_serves_something_else_is_chosen_no_more() -> None:
    pool = await many()
    served, home = pool.resolve("m", ""), homes(1)[0]
    gone = pool.pick(served, home=home).prefill
    assert gone is not None
    learn(gone, PREFILL, revision="r2")
    holder = pool.decode[3]
    learn(holder, DECODE, revision="r2")
    assert pool.pick(served, home=home).prefill is not gone
    assert pool.pick(served, prefer_decode=holder).decode is not holder
    removed = pool.decode[5]
    await pool.remove(removed)
    assert pool.pick(served, prefer_decode=removed).decode is not removed
    assert all(pool.pick(served).decode is not removed for _ in range(500))
    await pool.stop()


async def test_of_many_the_overloaded_are_left_and_the_busy_are_rarely_chosen() -> None:
    pool = await many()
    served, home = pool.resolve("m", ""), homes(1)[0]
    at_home, holder = pool.pick(served, home=home).prefill, pool.decode[0]
    assert at_home is not None
    at_home.in_flight, holder.in_flight = 2, 8
    pair = pool.pick(served, home=home, prefer_decode=holder)
    assert (pair.prefill, pair.decode) == (at_home, holder)
    at_home.in_flight, holder.in_flight = 3, 9
    pair = pool.pick(served, home=home, prefer_decode=holder)
    assert pair.prefill is not at_home
    assert pair.decode is not holder
    # Everybody is as busy: nobody is overloaded.
    for worker in everybody(pool):
        worker.in_flight = 9
    pair = pool.pick(served, home=home, prefer_decode=holder)
    assert (pair.prefill, pair.decode) == (at_home, holder)
    holder.in_flight = 50
    places = Counter(pool.pick(served).decode.endpoint for _ in range(1000))
    assert places[holder.endpoint] < 5
    assert len(places) > MANY / 2
    await pool.stop()


async def test_the_last_ready_ones_of_many_are_found() -> None:
    pool = await many()
    served, home = pool.resolve("m", ""), homes(1)[0]
    for worker in everybody(pool):
        worker.draining = worker not in {pool.prefill[0], pool.decode[0]}
    for _ in range(20):
        pair = pool.pick(served, home=home, prefer_decode=pool.decode[4], avoid={pool.prefill[0]})
        assert (pair.prefill, pair.decode) == (pool.prefill[0], pool.decode[0])
    assert pool.likely_prefill(served, home) is pool.prefill[0]
    await pool.stop()


async def test_of_many_only_those_with_a_place_are_given_turns() -> None:
    pool = await many()
    served, home = pool.resolve("m", ""), homes(1)[0]
    for worker in everybody(pool):
        worker.places = 1 if worker in {pool.prefill[0], pool.decode[0]} else 2
    for _ in range(20):
        pair = pool.pick(served, home=home, prefer_decode=pool.decode[4], limit=2)
        assert (pair.prefill, pair.decode) == (pool.prefill[0], pool.decode[0])
    await pool.stop()


async def test_of_two_groups_of_many_the_one_that_is_ready_is_served() -> None:
    pool = await pool_of([{}] * MANY + [{"revision": "r2"}], [{}] * MANY + [{"revision": "r2"}])
    assert pool.resolve("m", "").revision == "r1"
    for worker in everybody(pool):
        worker.draining = worker.info is not None and worker.info.model.revision == "r1"
    CLOCK.now += 0.25
    assert pool.resolve("m", "").revision == "r2"
    await pool.stop()


async def test_a_worker_that_is_heard_of_is_asked_seldom_and_a_silent_one_at_once() -> None:
    worker: Worker[Any] = Worker("d:1", None, CLOCK)
    assert worker.worth_asking(10.0)
    learn(worker, DECODE)
    assert not worker.worth_asking(10.0)
    CLOCK.now += 10.0
    assert worker.worth_asking(10.0)
    learn(worker, DECODE)
    heard = 0
    async with worker.calling(None, lambda: heard):
        # It may have stopped: nothing comes.
        assert worker.worth_asking(10.0)
        heard += 1
        assert not worker.worth_asking(10.0)
        assert worker.worth_asking(10.0)
        worker.succeeded()
        assert not worker.worth_asking(10.0)
    assert not worker.worth_asking(10.0)
    worker.not_answered(slow=True)
    assert worker.worth_asking(10.0)


async def test_silence_has_a_bound_that_begins_anew_with_what_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, looks, heard = asyncio.get_running_loop(), list[Callable[[], None]](), 0

    def later(after_s: float, look: Callable[[], None]) -> asyncio.TimerHandle:
        assert after_s == 15.0
        looks.append(look)
        return loop.call_at(loop.time() + 3600, look)

    monkeypatch.setattr(loop, "call_later", later)
    worker: Worker[Any] = Worker("d:1", None, CLOCK)

    async def call() -> None:
        nonlocal heard
        async with worker.calling(3600, lambda: heard) as calling:
            calling.bound_silence(60.0)
            for at in range(8):
                heard += at == 3
                assert len(looks) == at + 1, "neither three looks nor the one that heard something end it"
                looks[-1]()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await call()
    assert len(looks) == 8


async def test_a_new_life_in_the_registry_is_asked_for_its_facts() -> None:
    worker: Worker[Any] = Worker("d:1", None, CLOCK)
    worker.learned(make_info(DECODE, "d:1"))
    assert worker.info is not None
    worker.announced(worker.info.epoch, 3.0, draining=False)
    assert not worker.ask_now.is_set()
    worker.announced("another", 4.0, draining=False)
    assert worker.ask_now.is_set()
    assert worker.load == 3.0


async def test_many_are_asked_in_turn_and_few_all_the_time() -> None:
    pool = await many(150, 150)
    assert not any(pool.is_due(worker) for worker in everybody(pool))
    CLOCK.now += 3.0
    assert all(pool.is_due(worker) for worker in everybody(pool))
    await pool.stop()
    pool = await many(3, 3)
    assert all(pool.is_due(worker) for worker in everybody(pool))
    await pool.stop()
