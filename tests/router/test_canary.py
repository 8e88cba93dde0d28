"""The canary: reused greedy turns computed once more, cold; only when there is room, and seen by nobody."""

import asyncio
from collections.abc import Sequence

import pytest
from router_fakes import Answer
from router_sim import SimClient, SimFleet, ids, sim_fleet, until_async

from kvloop.router import canary
from kvloop.router.app import RouterApp
from kvloop.router.canary import LOWEST_PRIORITY, Cold, Limiter, compare, request
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

OFTEN = {"canary_per_minute": 600.0}


async def results(app: RouterApp) -> dict[str, float]:
    """Return the counts by result, once no repeat is under way."""
    await app.canary.settle()
    found = {}
    for line in (await app._metrics.exposition()).decode().splitlines():
        if line.startswith("kvloop_canary_total{"):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    if found:
        assert set(found) == {"match", "tie", "mismatch", "dropped", "failed"}, "a rate needs a beginning"
    return {result: count for result, count in found.items() if count}


async def turns(app: RouterApp) -> float:
    lines = (await app._metrics.exposition()).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvloop_turns_total{"))


async def reused(fleet: SimFleet, client: SimClient, spoil: bool = False, **fields: object) -> Answer:
    """Play two turns of which the second reads back what the first left."""
    first = await client.say(ids(100))
    if spoil:
        # A reader that trusts whatever lies under the handle, and other tokens' KV lies there.
        engine = fleet.prefills[0].engine
        engine.faults.guard.hash = False
        engine.faults.corrupt_reads = 1
    second = await client.say([*ids(100), *first.token_ids, *ids(20, seed=1)], **fields)
    assert second.reuse.tokens.readback > 0
    return second


async def test_a_reused_turn_is_repeated_and_is_the_same() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        client = await fleet.client(app)
        await reused(fleet, client)
        assert await results(app) == {"match": 1}
        assert await turns(app) == 2, "a repeat is no user's turn"
        # It leaves nothing behind.
        await client.end()
        await fleet.whole()


async def test_wrong_tokens_are_found() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        await reused(fleet, await fleet.client(app), spoil=True)
        assert await results(app) == {"mismatch": 1}


async def test_cold_and_sampled_turns_are_not_repeated() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        client = await fleet.client(app)
        await client.say(ids(100, seed=5), "other")
        await reused(fleet, client, sampling=sampling_pb2.SamplingParams(temperature=0.7))
        assert await results(app) == {}


async def test_off_unless_asked_for_and_no_more_often_than_asked() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router()
        await reused(fleet, await fleet.client(app))
        assert await results(app) == {}
        seldom = await fleet.router(canary_per_minute=1.0)
        client = await fleet.client(seldom)

        async def counted() -> bool:
            return bool(await results(seldom))

        for number, conversation in enumerate("abc"):
            # Nothing that is held begins like it: the first turn is not repeated.
            prompt = ids(100, seed=10 + number)
            first = await client.say(prompt, conversation)
            await client.say([*prompt, *first.token_ids, *ids(20, seed=1)], conversation)
            # A repeat begins after its turn's end has gone out; the next turn would have it give way.
            await until_async(counted, "the repeat")
        await seldom.canary.settle()
        assert await results(seldom) == {"match": 1}


async def test_dropped_while_workers_are_busy() -> None:
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        client = await fleet.client(app)
        (worker,) = app.pool.prefill
        first = await client.say(ids(100))
        worker.in_flight += 1
        await client.say([*ids(100), *first.token_ids, *ids(20, seed=1)])
        worker.in_flight -= 1
        assert await results(app) == {"dropped": 1}


async def test_a_repeat_gives_way_to_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def hangs(*_: object) -> Cold:
        worker.in_flight += 1
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            worker.in_flight -= 1
        raise AssertionError

    monkeypatch.setattr(canary, "compute", hangs)
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        (worker,) = app.pool.prefill
        client = await fleet.client(app)
        await reused(fleet, client)
        async with asyncio.timeout(20):
            await begun.wait()
            await client.say(ids(100, seed=7), "other")
            assert await results(app) == {"dropped": 1}


async def test_a_repeat_that_fails_is_nobody_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> Cold:
        raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "gone")

    monkeypatch.setattr(canary, "compute", fails)
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        await reused(fleet, await fleet.client(app))
        assert await results(app) == {"failed": 1}


async def test_a_drain_does_not_wait_for_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hangs(*_: object) -> Cold:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(canary, "compute", hangs)
    async with sim_fleet() as fleet:
        app = await fleet.router(**OFTEN)
        await reused(fleet, await fleet.client(app))
        async with asyncio.timeout(20):
            await begun.wait()
            await app.drain()
        assert ended.is_set()


def test_the_limiter_spreads_evenly() -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    limiter = Limiter(6.0, clock)  # type: ignore[arg-type]
    assert limiter.due()
    limiter.took()
    clock.now = 9.999
    assert not limiter.due()
    clock.now = 10.0
    assert limiter.due()
    assert not Limiter(0.0, clock).due()  # type: ignore[arg-type]


def test_what_is_asked_again() -> None:
    served = router_service_pb2.GenerateRequest(
        request_id="r",
        conversation_id="c",
        parent_conversation_id="p",
        prompt_token_ids=b"\1\0\0\0",
        retention=turn_pb2.Retention(hold=True),
        cache_salt="theirs",
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=500, min_tokens=100),
    )
    cold = request(served, 64)
    assert cold.prompt_token_ids == served.prompt_token_ids
    assert (cold.conversation_id, cold.parent_conversation_id, cold.HasField("retention")) == ("", "", False)
    assert cold.cache_salt not in {"", "theirs", request(served, 64).cache_salt}
    assert cold.request_id != "r"
    assert cold.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID
    assert cold.priority == LOWEST_PRIORITY
    assert (cold.sampling.max_tokens, cold.sampling.min_tokens) == (64, 64)
    assert served.sampling.max_tokens == 500


def position(*candidates: tuple[int, float]) -> turn_pb2.PositionLogprobs:
    return turn_pb2.PositionLogprobs(
        candidates=[turn_pb2.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in candidates]
    )


CERTAIN = position((1, -0.01), (2, -5.0))


@pytest.mark.parametrize(
    ("served", "cold", "at_two", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], CERTAIN, ("match", 3)),
        ([1, 2, 3], [1, 9, 3], position((9, -0.6), (2, -0.8)), ("tie", 1)),
        ([1, 2, 3], [1, 9, 3], position((9, -0.1), (2, -0.61)), ("mismatch", 1)),
        ([1, 2, 3], [1, 9, 3], position((9, -0.1)), ("mismatch", 1)),
        ([1, 2, 3], [1], CERTAIN, ("mismatch", 1)),
    ],
)
def test_comparing(
    served: Sequence[int],
    cold: Sequence[int],
    at_two: turn_pb2.PositionLogprobs,
    expected: tuple[str, int],
) -> None:
    assert compare(served, Cold(cold, [CERTAIN, at_two, CERTAIN])) == expected
