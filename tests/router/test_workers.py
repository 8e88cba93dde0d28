"""Which workers make a pair, which are left alone, and who is chosen."""

import random
from collections import Counter
from typing import Any

import pytest
from router_fakes import make_info

from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import worker_pb2

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE


class ManualClock:
    """Time that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


CLOCK = ManualClock()


async def pool_of(prefills: list[dict[str, Any]], decodes: list[dict[str, Any]]) -> WorkerPool:
    settings = RouterSettings(
        prefill_endpoints=tuple(f"p{n}:1" for n in range(len(prefills))),
        decode_endpoints=tuple(f"d{n}:1" for n in range(len(decodes))),
    )
    pool = WorkerPool(settings, CLOCK, rng=random.Random(5))
    for prefill, changes in zip(pool.prefill, prefills, strict=True):
        learn(prefill, PREFILL, **changes)
    for decode, changes in zip(pool.decode, decodes, strict=True):
        learn(decode, DECODE, **changes)
    return pool


def learn(worker: AnyWorker, role: "worker_pb2.WorkerRole.ValueType", **changes: Any) -> bool:
    info = make_info(role, worker.endpoint)
    info.model.name = changes.pop("name", info.model.name)
    info.model.revision = changes.pop("revision", info.model.revision)
    adapters = changes.pop("adapters", None)
    if adapters is not None:
        info.adapters[:] = adapters
    for field, value in changes.items():
        setattr(info, field, value)
    return worker.learned(info)


def refusal(call: Any) -> tuple[str, str | None]:
    with pytest.raises(Failure) as failure:
        call()
    return failure.value.reason_name, failure.value.field


async def test_models_are_found_by_name_or_by_being_the_only_one() -> None:
    pool = await pool_of([{}], [{"max_model_len": 100, "kv_recompute_threshold": 99}])
    for name in ("", "m"):
        served = pool.resolve(name, "")
        assert (served.name, served.revision) == ("m", "r1")
        assert (served.max_model_len, served.kv_recompute_threshold) == (100, 99)
    assert pool.resolve("m", "lora").adapter == "lora"
    assert refusal(lambda: pool.resolve("x", "")) == ("MODEL_NOT_FOUND", "model")
    assert refusal(lambda: pool.resolve("m", "x")) == ("MODEL_NOT_FOUND", "adapter")
    await pool.stop()


async def test_one_of_several_models_must_be_named() -> None:
    pool = await pool_of([{}, {"name": "n"}], [{}, {"name": "n"}])
    assert refusal(lambda: pool.resolve("", "")) == ("INVALID_FIELD", "model")
    served = pool.resolve("n", "")
    pair = pool.pick(served)
    assert (pair.prefill.endpoint, pair.decode.endpoint) == ("p1:1", "d1:1")
    await pool.stop()


async def test_before_anybody_answered_there_is_no_worker() -> None:
    settings = RouterSettings(prefill_endpoints=("p:1",), decode_endpoints=("d:1",))
    pool = WorkerPool(settings, CLOCK)
    assert refusal(lambda: pool.resolve("m", "")) == ("NO_WORKER", None)
    assert not pool.can_serve()
    await pool.stop()


async def test_pairs_stay_within_a_group() -> None:
    pool = await pool_of(
        [{"compatibility": "a"}, {"compatibility": "b"}],
        [{"compatibility": "b"}, {"compatibility": "c"}, {"compatibility": "b"}],
    )
    served = pool.resolve("m", "")
    assert served.compatibility == "b"
    for _ in range(20):
        pair = pool.pick(served)
        assert pair.prefill.endpoint == "p1:1"
        assert pair.decode.endpoint in {"d0:1", "d2:1"}
    assert pool.can_serve()
    learn(pool.prefill[1], PREFILL, compatibility="z")
    assert not pool.can_serve()
    await pool.stop()


async def test_the_revision_with_ready_workers_is_served() -> None:
    pool = await pool_of([{}, {"revision": "r2"}], [{"revision": "r2"}])
    assert pool.resolve("m", "").revision == "r2"
    assert {served.revision for served in pool.versions("m", "")} == {"r1", "r2"}
    await pool.stop()


async def test_the_less_loaded_of_two_is_chosen_and_equals_share() -> None:
    pool = await pool_of([{}, {}], [{}, {}])
    served = pool.resolve("m", "")
    pool.prefill[0].in_flight = 1
    assert {pool.pick(served).prefill.endpoint for _ in range(20)} == {"p1:1"}
    assert {pool.pick(served).decode.endpoint for _ in range(50)} == {"d0:1", "d1:1"}
    await pool.stop()


async def test_the_most_loaded_of_many_is_rarely_chosen() -> None:
    pool = await pool_of([{}], [{}] * 5)
    pool.decode[0].in_flight = 50
    served = pool.resolve("m", "")
    places = Counter(pool.pick(served).decode.endpoint for _ in range(1000))
    # Only when both of the two drawn at random are this one.
    assert places["d0:1"] < 100
    assert len(places) == 5
    await pool.stop()


async def test_the_holder_is_preferred_unless_overloaded_or_avoided() -> None:
    pool = await pool_of([{}], [{}, {}, {}])
    served = pool.resolve("m", "")
    holder = pool.decode[1]
    holder.in_flight = 8
    assert pool.pick(served, prefer_decode=holder).decode is holder
    holder.in_flight = 9
    assert pool.pick(served, prefer_decode=holder).decode is not holder
    holder.in_flight = 0
    assert pool.pick(served, prefer_decode=holder, avoid={holder}).decode is not holder
    await pool.stop()


async def test_a_worker_to_avoid_serves_when_it_is_the_only_one() -> None:
    pool = await pool_of([{}], [{}])
    pair = pool.pick(pool.resolve("m", ""), avoid={pool.prefill[0], pool.decode[0]})
    assert pair.prefill is pool.prefill[0]
    await pool.stop()


async def test_reads_go_to_workers_that_can_read() -> None:
    pool = await pool_of([{"bidirectional_kv_xfer": False}, {}], [{}])
    served = pool.resolve("m", "")
    assert {pool.pick(served, reads_back=True).prefill.endpoint for _ in range(20)} == {"p1:1"}
    assert len({pool.pick(served).prefill.endpoint for _ in range(50)}) == 2
    await pool.stop()


async def test_a_failed_worker_pauses_longer_each_time() -> None:
    pool = await pool_of([{}], [{}])
    worker = pool.prefill[0]
    pauses = []
    for _ in range(10):
        worker.failed()
        assert not worker.ready
        before = CLOCK.now
        while not worker.ready:
            CLOCK.now += 0.05
        pauses.append(CLOCK.now - before)
    assert pauses[0] == pytest.approx(0.25, abs=0.06)
    assert pauses[1] == pytest.approx(0.5, abs=0.06)
    assert pauses[-1] == pytest.approx(10.0, abs=0.06)
    worker.succeeded()
    worker.failed()
    CLOCK.now += 0.3
    assert worker.ready
    await pool.stop()


async def test_legs_of_one_broken_connection_are_one_failure() -> None:
    pool = await pool_of([{}], [{}])
    worker = pool.prefill[0]
    for pause in (0.25, 0.5):
        for _ in range(8):
            worker.failed()
            CLOCK.now += pause / 10
        assert not worker.ready
        CLOCK.now += pause / 4
        assert worker.ready
    await pool.stop()


async def test_a_new_epoch_wipes_the_slate() -> None:
    pool = await pool_of([{}], [{"epoch": "one"}])
    worker = pool.decode[0]
    worker.failed()
    assert not worker.ready
    assert learn(worker, DECODE, epoch="two")
    assert worker.ready
    assert pool.holder("elsewhere:1", "two") is worker
    assert pool.holder("d0:1", "one") is worker
    assert pool.holder("elsewhere:1", "one") is None
    await pool.stop()


async def test_a_slow_worker_is_forgiven_a_few_times_a_refusing_one_never() -> None:
    pool = await pool_of([{}], [{}])
    worker = pool.prefill[0]
    assert not worker.not_answered(slow=True)
    assert not worker.not_answered(slow=True)
    assert worker.ready
    assert worker.not_answered(slow=True)
    assert not worker.ready
    assert not worker.not_answered(slow=True)
    assert learn(worker, PREFILL, epoch="same")
    assert worker.not_answered(slow=False)
    assert refusal(lambda: pool.pick(pool.resolve("m", ""))) == ("NO_WORKER", None)
    await pool.stop()


async def test_unchanged_facts_change_nothing() -> None:
    pool = await pool_of([{"epoch": "e"}], [{}])
    assert not learn(pool.prefill[0], PREFILL, epoch="e")
    info = pool.prefill[0].info
    assert info is not None
    info.pool.free_blocks = 3
    assert not learn(pool.prefill[0], PREFILL, epoch="e")
    await pool.stop()
