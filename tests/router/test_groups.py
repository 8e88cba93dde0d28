"""Two groups of one model, as while workers are replaced: who serves which conversation."""

import random
from collections import Counter
from collections.abc import Sequence

from router_fakes import FakeFleet, fake_fleet, make_info, until

from kvloop.router.app import RouterApp
from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime.clock import SystemClock
from kvloop.v1alpha1 import worker_pb2

LONG = list(range(100))
OLD, NEW = "a", "b"
NAMES = [f"c{number}" for number in range(12)]


def pool_of(groups: Sequence[tuple[str, int]]) -> WorkerPool:
    """Return a pool of groups, each of so many P and as many D, in the order given."""
    numbers = [(group, number) for group, count in groups for number in range(count)]
    settings = RouterSettings(
        prefill_endpoints=tuple(f"p{group}{number}:1" for group, number in numbers),
        decode_endpoints=tuple(f"d{group}{number}:1" for group, number in numbers),
    )
    pool = WorkerPool(settings, SystemClock(), rng=random.Random(5))
    workers: list[AnyWorker] = [*pool.prefill, *pool.decode]
    for worker, (group, _) in zip(workers, numbers * 2, strict=True):
        decodes = worker.endpoint.startswith("d")
        info = make_info(
            worker_pb2.WORKER_ROLE_DECODE if decodes else worker_pb2.WORKER_ROLE_PREFILL, worker.endpoint
        )
        info.compatibility = group
        worker.learned(info)
    return pool


def groups_of(pool: WorkerPool, count: int = 400) -> list[str]:
    return [pool.resolve("m", "", lambda n=n: bytes([n % 256, n // 256])).compatibility for n in range(count)]


async def test_routers_that_met_workers_in_another_order_agree() -> None:
    one, other = pool_of([(OLD, 2), (NEW, 2)]), pool_of([(NEW, 2), (OLD, 2)])
    assert groups_of(one) == groups_of(other)
    # Whose legs fail differs between routers, and moves nobody as long as somebody is there.
    one.prefill[0].failed()
    assert groups_of(one) == groups_of(other)
    for pool in (one, other):
        await pool.stop()


async def test_groups_have_their_shares_and_growth_moves_no_more_than_it_must() -> None:
    few, more = pool_of([(OLD, 6), (NEW, 2)]), pool_of([(OLD, 6), (NEW, 4)])
    before, after = groups_of(few), groups_of(more)
    assert 60 < Counter(before)[NEW] < 140
    moved = {(a, b) for a, b in zip(before, after, strict=True) if a != b}
    assert moved == {(OLD, NEW)}
    for worker in (w for w in (*more.prefill, *more.decode) if OLD in w.endpoint[1]):
        worker.draining = True
    assert set(groups_of(more)) == {NEW}
    for pool in (few, more):
        await pool.stop()


async def replaced(fleet: FakeFleet, **changes: str) -> tuple[RouterApp, RouterApp]:
    """Return a router that knows the former workers alone, and one that knows those after them, too."""
    prefill, decode = fleet.prefills[0].host.endpoint, fleet.decodes[0].host.endpoint
    before = await fleet.router(prefill_endpoints=(prefill,), decode_endpoints=(decode,))
    for worker in (fleet.prefills[1], fleet.decodes[1]):
        worker.info.compatibility = changes.get("compatibility", worker.info.compatibility)
        worker.info.model.revision = changes.get("revision", worker.info.model.revision)
    return before, await fleet.router()


async def stays_with_who_holds_it(**changes: str) -> None:
    async with fake_fleet(prefills=2, decodes=2) as fleet:
        before, after = await replaced(fleet, **changes)
        first, client = await fleet.client(before), await fleet.client(after)
        for name in NAMES:
            await first.say(LONG, name)
        for name in NAMES:
            # One leg that failed there does not change it.
            after.pool.prefill[0].failed()
            answer = await client.say(LONG, name)
            assert answer.way == ("READBACK", "PROVEN")
            assert answer.summary is not None
            assert (answer.summary.prefill_worker, answer.summary.decode_worker) == ("p0", "d0")
            assert (await client.say(LONG, f"of {name}", parent_conversation_id=name)).way[0] == "READBACK"
        for name in NAMES:
            await client.say(LONG[:20], f"new {name}")
        assert fleet.decodes[1].requests


async def test_a_conversation_stays_with_the_engines_that_can_be_read() -> None:
    await stays_with_who_holds_it(compatibility="c2")


async def test_a_conversation_stays_with_the_revision_that_holds_it() -> None:
    await stays_with_who_holds_it(revision="r2")


async def test_a_conversation_leaves_a_revision_that_can_t_go_on() -> None:
    async with fake_fleet(prefills=2, decodes=2) as fleet:
        before, after = await replaced(fleet, revision="r2")
        first, client = await fleet.client(before), await fleet.client(after)
        await first.say(LONG)
        await fleet.prefills[0].host.kill()
        await until(lambda: not after.pool.prefill[0].present, "the end of the only prefill worker")
        assert (await client.say(LONG)).way == ("RECOMPUTE", "NOT_FOUND")
        old, new = fleet.decodes[0].requests[0], fleet.decodes[1].requests[0]
        assert (old.model.revision, new.model.revision) == ("r1", "r2")
        assert old.scope.scope != new.scope.scope
        assert (await client.say(LONG)).way == ("READBACK", "PROVEN")
