"""Worker registry and shared estimates, on every store."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from store_servers import until

from kvloop.metastore import fields
from kvloop.metastore.factory import Store, open_store
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.metastore.registry import TTL_S, Worker
from kvloop.metastore.ttl import ANNOUNCEMENTS_PER_TTL

WORKER = Worker(
    worker_id="decode-0",
    role="decode",
    endpoint="[::1]:50052",
    epoch="life-1",
    dp_rank=1,
    capacity=64,
    load=3.5,
    info=b"\x00\n\xff{}",
)


async def test_a_worker_is_listed_whole(store: Store) -> None:
    assert await store.registry.workers() == {}
    other = replace(WORKER, worker_id="prefill-0", role="prefill", info=b"")
    assert await store.registry.announce(WORKER, 60)
    assert await store.registry.announce(other, 60)
    assert await store.registry.workers() == {"decode-0": WORKER, "prefill-0": other}


async def test_a_later_announcement_replaces(store: Store) -> None:
    await store.registry.announce(WORKER, 60)
    busy = replace(WORKER, load=9.0, draining=True)
    await store.registry.announce(busy, 60)
    assert await store.registry.workers() == {"decode-0": busy}


async def test_only_what_has_changed_is_decoded(store: Store) -> None:
    await store.registry.announce(WORKER, 60)
    await store.registry.announce(replace(WORKER, worker_id="busy"), 60)
    before = await store.registry.workers()
    await store.registry.announce(WORKER, 60)
    await store.registry.announce(replace(WORKER, worker_id="busy", load=7.0), 60)
    after = await store.registry.workers()
    assert after["decode-0"] is before["decode-0"]
    assert (before["busy"].load, after["busy"].load) == (3.5, 7.0)


async def test_a_silent_worker_is_gone_and_the_others_stay(store: Store) -> None:
    await store.registry.announce(replace(WORKER, worker_id="stays"), 60)
    await store.registry.announce(WORKER, 0.05)
    await until(lambda: _only(store, "stays"))


async def _only(store: Store, worker_id: str) -> bool:
    return set(await store.registry.workers()) == {worker_id}


async def test_the_farewell_of_a_former_life_is_ignored(store: Store) -> None:
    await store.registry.announce(WORKER, 60)
    await store.registry.announce(replace(WORKER, epoch="life-2"), 60)
    assert not await store.registry.withdraw("decode-0", "life-1")
    assert await _only(store, "decode-0")
    assert await store.registry.withdraw("decode-0", "life-2")
    assert await store.registry.workers() == {}
    assert not await store.registry.withdraw("decode-0", "life-2")


async def test_watching_yields_changes_only(store: Store) -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()

    async def tick(_: float) -> None:
        await ticks.get()

    await store.registry.announce(WORKER, 60)
    watch = store.registry.watch(sleep=tick)
    assert await anext(watch) == {"decode-0": WORKER}
    following = asyncio.ensure_future(anext(watch))
    ticks.put_nowait(None)
    await store.registry.announce(WORKER, 60)
    ticks.put_nowait(None)
    await until(lambda: _empty(ticks))
    busy = replace(WORKER, load=4)
    await store.registry.announce(busy, 60)
    ticks.put_nowait(None)
    assert await following == {"decode-0": busy}
    await watch.aclose()


async def test_what_is_still_announced_is_told_again(store: Store) -> None:
    slept = told = 0.0

    async def tick(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        if slept > TTL_S:
            raise asyncio.CancelledError

    await store.registry.announce(WORKER, 60)
    with contextlib.suppress(asyncio.CancelledError):
        async for workers in store.registry.watch(0.5, sleep=tick):
            assert workers == {"decode-0": WORKER}
            told += 1
    assert told == 1 + ANNOUNCEMENTS_PER_TTL


async def _empty(queue: "asyncio.Queue[None]") -> bool:
    return queue.empty()


async def test_announcing_goes_on_while_the_store_is_away(store: Store) -> None:
    pauses: list[float] = []
    loads = iter(range(100))

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            await store.close()
        if len(pauses) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await store.registry.keep_announcing(lambda: replace(WORKER, load=next(loads)), 8.0, pause)
    assert pauses == [8.0 / ANNOUNCEMENTS_PER_TTL] * 4
    with pytest.raises(DirectoryUnavailable):
        await store.registry.workers()


async def test_too_much_information_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="at most"):
        await store.registry.announce(replace(WORKER, info=b"x" * fields.MAX_VALUE_BYTES), 60)


async def test_a_full_table_refuses_more(store: Store) -> None:
    count = fields.MAX_FIELDS
    for start in range(0, count, 64):
        names = [f"w{number}" for number in range(start, start + 64)]
        assert all(
            await asyncio.gather(
                *(store.registry.announce(replace(WORKER, worker_id=name), 60) for name in names)
            )
        )
    assert not await store.registry.announce(WORKER, 60)
    assert await store.registry.announce(replace(WORKER, worker_id="w0", load=1), 60)
    assert len(await store.registry.workers()) == count


async def test_estimates_are_weighted_means_of_limited_weight(store: Store) -> None:
    assert await store.estimates.read() == {}
    first = await store.estimates.merge("rate", [10.0, -1.0])
    assert (first.values, first.count) == ((10.0, -1.0), 1.0)
    second = await store.estimates.merge("rate", [20.0, 1.0], weight=3.0)
    assert second.values == pytest.approx((17.5, 0.5))
    assert second.count == 4.0
    await store.estimates.merge("other", [1e-9])
    found = await store.estimates.read()
    assert found["rate"] == second
    assert found["other"].values == (1e-9,)
    heavy = await store.estimates.merge("rate", [17.5, 0.5], weight=1000)
    assert heavy.count == 64
    follows = await store.estimates.merge("rate", [0.0, 0.0], weight=64)
    assert follows.values[0] == pytest.approx(8.75)


async def test_a_sample_of_another_length_begins_anew(store: Store) -> None:
    await store.estimates.merge("rate", [10.0, 2.0])
    anew = await store.estimates.merge("rate", [5.0])
    assert (anew.values, anew.count) == ((5.0,), 1.0)


async def test_concurrent_samples_all_count(store: Store) -> None:
    await asyncio.gather(*(store.estimates.merge("rate", [float(number)]) for number in range(32)))
    found = (await store.estimates.read())["rate"]
    assert found.count == 32
    assert found.values[0] == pytest.approx(15.5)


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")], [1.0] * 17])
async def test_senseless_samples_are_refused(values: list[float]) -> None:
    store = open_store("memory://")
    with pytest.raises(ValueError, match="values"):
        await store.estimates.merge("rate", values)
    with pytest.raises(ValueError, match="weight"):
        await store.estimates.merge("rate", [1.0], weight=0)
