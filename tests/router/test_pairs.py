"""Pairs between which reads fail are avoided for a while, and only as long as there are others."""

import random

import pytest
from router_fakes import make_info
from router_sim import ids, sim_fleet

from kvloop.router.pairs import FIRST_REST_S, LONGEST_REST_S, Pairs
from kvloop.router.settings import RouterSettings
from kvloop.router.workers import WorkerPool
from kvloop.v1alpha1 import worker_pb2


class ManualClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@pytest.fixture
async def pool() -> WorkerPool:
    settings = RouterSettings.load(flags={"prefill_endpoints": "p0:1,p1:1", "decode_endpoints": "d0:1,d1:1"})
    made = WorkerPool(settings, ManualClock(), rng=random.Random(5))
    for number, worker in enumerate(made.prefill):
        worker.learned(make_info(worker_pb2.WORKER_ROLE_PREFILL, f"p{number}"))
    for number, worker in enumerate(made.decode):
        worker.learned(make_info(worker_pb2.WORKER_ROLE_DECODE, f"d{number}"))
    return made


async def test_a_pair_rests_longer_each_time_and_a_new_life_is_a_new_pair(pool: WorkerPool) -> None:
    clock = ManualClock()
    pairs, (p, _), (d, other) = Pairs(clock), pool.prefill, pool.decode
    for times in range(8):
        rest = min(FIRST_REST_S * 2**times, LONGEST_REST_S)
        pairs.failed(p, d)
        clock.now += rest - 0.01
        assert pairs.rests(p, d)
        clock.now += 0.02
        assert not pairs.rests(p, d)
    pairs.failed(p, d)
    assert not pairs.rests(p, other)
    info = make_info(worker_pb2.WORKER_ROLE_DECODE, "d0")
    d.learned(info)
    assert not pairs.rests(p, d)
    pairs.failed(p, d)
    pairs.succeeded(p, d)
    assert not pairs.rests(p, d)


async def test_reads_that_fail_together_are_one_failure(pool: WorkerPool) -> None:
    clock = ManualClock()
    pairs, p, d = Pairs(clock), pool.prefill[0], pool.decode[0]
    for rest in (FIRST_REST_S, 2 * FIRST_REST_S):
        for _ in range(8):
            pairs.failed(p, d)
            clock.now += rest / 10
        assert pairs.rests(p, d)
        clock.now += rest / 4
        assert not pairs.rests(p, d)


async def test_another_decode_worker_is_taken_while_there_is_one(
    pool: WorkerPool,
) -> None:
    served = pool.resolve("m", "")
    d0, d1 = pool.decode
    for prefill in pool.prefill:
        pool.pairs.failed(d0, prefill)
    assert {pool.pick(served, prefer_decode=d0).decode for _ in range(20)} == {d1}
    for prefill in pool.prefill:
        pool.pairs.failed(d1, prefill)
    assert {pool.pick(served, prefer_decode=d0).decode for _ in range(20)} == {d0}


async def test_a_prefill_worker_that_some_decode_worker_can_read_from_is_taken(pool: WorkerPool) -> None:
    served = pool.resolve("m", "")
    p0, p1 = pool.prefill
    pool.pairs.failed(pool.decode[0], p0)
    homes = [bytes([n]) for n in range(20)]
    assert {pool.pick(served, home=home).prefill for home in homes} == {p0, p1}
    # The other decode worker has failed this turn.
    avoid = {pool.decode[1]}
    assert {pool.pick(served, home=home, avoid=avoid).prefill for home in homes} == {p1}
    pool.pairs.failed(pool.decode[1], p0)
    assert {pool.pick(served, home=home).prefill for home in homes} == {p1}
    for decode in pool.decode:
        pool.pairs.failed(decode, p1)
    assert {pool.pick(served, home=home).prefill for home in homes} == {p0, p1}


async def test_another_prefill_worker_reads_back(pool: WorkerPool) -> None:
    served = pool.resolve("m", "")
    p0, p1 = pool.prefill
    pool.pairs.failed(p0, pool.decode[0])
    picks = {pool.pick(served, reads_from=pool.decode[0], home=bytes([n])).prefill for n in range(20)}
    assert picks == {p1}
    assert {pool.pick(served, home=bytes([n])).prefill for n in range(20)} == {p0, p1}


async def test_a_read_that_fails_in_a_turn_is_remembered() -> None:
    async with sim_fleet(decodes=2) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(ids(400))
        fleet.prefills[0].engine.faults.fail_reads = 1
        prompt = [*ids(400), *first.token_ids]
        second = await client.same_as_cold(prompt)
        assert second.way == ("RECOMPUTE", "READ_FAILED")
        # What P read from D failed; what D read from P did not.
        assert len(app.pool.pairs) == 1
        [holder] = [w for w in app.pool.decode if second.summary and w.name == second.summary.decode_worker]
        app.pool.pairs.succeeded(app.pool.prefill[0], holder)
        assert len(app.pool.pairs) == 0
        third = await client.same_as_cold([*prompt, *second.token_ids])
        assert third.way == ("READBACK", "PROVEN")
        assert await client.end()
        await fleet.whole()
