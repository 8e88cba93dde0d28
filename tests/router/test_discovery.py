"""Workers from the registry: found, preferred, drained, forgotten; and where a conversation's prompts go."""

import random
from collections import Counter
from typing import Any

import pytest
from router_fakes import make_info
from router_sim import ids, sim_fleet, until_async

from kvloop.metastore.registry import TTL_S
from kvloop.metastore.registry import Worker as Announced
from kvloop.router.discovery import Discovery
from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime.clock import SystemClock
from kvloop.v1alpha1 import worker_pb2

ROLES = {"prefill": worker_pb2.WORKER_ROLE_PREFILL, "decode": worker_pb2.WORKER_ROLE_DECODE}
NOWHERE = "127.0.0.1:9"


class ManualClock:
    """Time that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def told(role: str, endpoint: str, epoch: str = "e", **fields: Any) -> Announced:
    return Announced(worker_id=f"{role}@{endpoint}", role=role, endpoint=endpoint, epoch=epoch, **fields)


def registry(*workers: Announced) -> dict[str, Announced]:
    return {worker.worker_id: worker for worker in workers}


def meet(worker: AnyWorker, role: str, epoch: str = "e") -> None:
    info = make_info(ROLES[role], worker.endpoint)
    info.epoch = epoch
    worker.learned(info)


def empty_pool(**settings: Any) -> WorkerPool:
    values = {"discover": True, "info_timeout_s": 0.2, "info_interval_s": 60.0} | settings
    return WorkerPool(RouterSettings(**values), SystemClock(), rng=random.Random(3))


async def test_announced_workers_come_and_go() -> None:
    pool = empty_pool()
    discovery = Discovery(pool)
    await discovery.apply(registry(told("prefill", NOWHERE), told("decode", "127.0.0.1:10")))
    assert [w.endpoint for w in pool.prefill] == [NOWHERE]
    assert [w.endpoint for w in pool.decode] == ["127.0.0.1:10"]
    meet(pool.decode[0], "decode")
    # A store that restarts empty: who answers stays.
    await discovery.apply({})
    assert (len(pool.prefill), len(pool.decode)) == (0, 1)
    pool.decode[0].not_answered(slow=False)
    await discovery.apply({})
    assert pool.decode == []
    await pool.stop()


async def test_named_workers_are_never_forgotten_nor_doubled() -> None:
    pool = empty_pool(prefill_endpoints=(NOWHERE,))
    discovery = Discovery(pool)
    await discovery.apply(registry(told("prefill", NOWHERE)))
    await discovery.apply({})
    assert [w.endpoint for w in pool.prefill] == [NOWHERE]
    await pool.stop()


async def test_nonsense_in_the_registry_is_left_out() -> None:
    pool = empty_pool()
    bad = (told("prefill", "nowhere"), told("decode", "h:0"), told("gateway", NOWHERE), told("decode", ""))
    await Discovery(pool).apply(registry(*bad))
    assert not pool.prefill
    assert not pool.decode
    await pool.stop()


async def test_a_draining_worker_gets_no_turns_but_is_read_from() -> None:
    pool = empty_pool()
    discovery = Discovery(pool)
    await discovery.apply(registry(told("decode", NOWHERE)))
    worker = pool.decode[0]
    meet(worker, "decode")
    assert worker.ready
    await discovery.apply(registry(told("decode", NOWHERE, draining=True)))
    assert worker.reachable
    assert not worker.ready
    # What a former life said does not concern the new one.
    meet(worker, "decode", epoch="next")
    assert worker.ready
    await discovery.apply(registry(told("decode", NOWHERE, draining=True)))
    assert worker.ready
    await pool.stop()


@pytest.mark.parametrize("busy", [0, 1])
async def test_load_that_other_routers_cause_counts(busy: int) -> None:
    pool = empty_pool(prefill_endpoints=("p:1",), decode_endpoints=("d0:1", "d1:1"))
    meet(pool.prefill[0], "prefill")
    for worker in pool.decode:
        meet(worker, "decode")
    pool.decode[busy].announced("e", 40.0, draining=False)
    served = pool.resolve("", "")
    assert {pool.pick(served).decode for _ in range(20)} == {pool.decode[1 - busy]}
    assert pool.pick(served, prefer_decode=pool.decode[busy]).decode is pool.decode[1 - busy]
    await pool.stop()


async def test_a_load_counts_no_longer_than_it_is_announced() -> None:
    clock = ManualClock()
    pool = WorkerPool(RouterSettings(prefill_endpoints=("p:1",), decode_endpoints=("d:1",)), clock)
    discovery, worker = Discovery(pool), pool.decode[0]
    meet(worker, "decode")
    busy = registry(told("decode", "d:1", load=40.0, capacity=64))
    await discovery.apply(busy)
    assert worker.capacity == 64
    clock.now += TTL_S
    assert worker.load == 40.0
    await discovery.apply(busy)
    clock.now += TTL_S
    # The store is away, or the entry is gone and the worker is not.
    await discovery.apply({})
    assert worker.load == 40.0
    clock.now += 0.1
    assert worker.load == 0.0
    worker.in_flight = 3
    assert worker.load == 3.0
    await pool.stop()


async def test_a_conversation_has_one_home_and_few_move() -> None:
    names = [f"p{n}:1" for n in range(5)]
    homes = []
    for present in (names, list(reversed(names)), names[:4]):
        pool = empty_pool(prefill_endpoints=tuple(present), decode_endpoints=("d:1",))
        for worker in pool.prefill:
            meet(worker, "prefill")
        meet(pool.decode[0], "decode")
        served = pool.resolve("", "")
        picks = [pool.pick(served, home=bytes([n, 1])).prefill for n in range(200)]
        homes.append([worker.endpoint for worker in picks if worker is not None])
        await pool.stop()
    assert homes[0] == homes[1]
    assert min(Counter(homes[0]).values()) > 20
    moved = [(a, b) for a, b in zip(homes[0], homes[2], strict=True) if a != b]
    assert {a for a, _ in moved} == {names[4]}


@pytest.mark.parametrize(("in_flight", "stays"), [(0, True), (2, True), (3, False)])
async def test_an_overloaded_home_is_left(in_flight: int, stays: bool) -> None:
    pool = empty_pool(prefill_endpoints=("p0:1", "p1:1"), decode_endpoints=("d:1",))
    for worker in pool.prefill:
        meet(worker, "prefill")
    meet(pool.decode[0], "decode")
    served = pool.resolve("", "")
    home = pool.pick(served, home=b"c").prefill
    assert home is not None
    home.in_flight = in_flight
    assert (pool.pick(served, home=b"c").prefill is home) == stays
    await pool.stop()


async def test_a_router_that_is_told_no_workers_serves() -> None:
    async with sim_fleet(prefills=2, decodes=2, engine={"enable_prefix_caching": True}) as fleet:
        app = await fleet.router(store=fleet.store, discover=True, prefill_endpoints=(), decode_endpoints=())

        async def met() -> bool:
            return (len(app.pool.prefill), len(app.pool.decode)) == (2, 2)

        await until_async(met, "all workers")
        client = await fleet.client(app)
        history, places = ids(300), set()
        for turn in range(3):
            answer = await client.say(history, max_tokens=64)
            assert answer.summary is not None
            assert answer.token_ids == await client.cold(history, max_tokens=64)
            assert (answer.way[0] == "READBACK") == (turn > 0)
            # The prompt's own blocks are found where the last prompt was computed.
            assert turn == 0 or answer.reuse.tokens.p_local > 0
            places.add(answer.summary.prefill_worker)
            history += [*answer.token_ids, *ids(40, turn)]
        assert len(places) == 1
        await fleet.add_decode()

        async def third() -> bool:
            return len(app.pool.decode) == 3

        await until_async(third, "a worker that came later")
        await client.end()
        await fleet.whole()
