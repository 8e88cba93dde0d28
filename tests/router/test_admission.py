"""Room at a router and at its workers: who waits, who is told to come back; nobody waits between the legs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from router_fakes import Answer, Client, FakeFleet, expected_answer, fake_fleet, until

from kvloop.router.admission import Admission
from kvloop.router.app import RouterApp
from kvloop.router.settings import RouterSettings
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, from_rpc_error

LONG = list(range(100))
ANSWER = expected_answer(tokens.pack(LONG), 4)


def admission(**settings: float) -> Admission:
    values = {"prefill_endpoints": "a:1", "decode_endpoints": "b:1", "queue_timeout_ms": 60_000, **settings}
    return Admission(RouterSettings.load(flags=values))


async def waiting(line: Admission, count: int) -> None:
    await until(lambda: line.waiting == count, f"{count} in the line")


async def test_first_come_first_served() -> None:
    line = admission(max_concurrent_turns=1)
    await line.enter(60)
    served: list[int] = []

    async def one(number: int) -> None:
        await line.enter(60)
        served.append(number)

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(one(number)))
        await waiting(line, number + 1)
    for left in range(5, 0, -1):
        line.leave()
        await waiting(line, left - 1)
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3, 4]
    assert line.running == 1


async def test_whoever_leaves_the_line_blocks_nobody() -> None:
    line = admission(max_concurrent_turns=1)
    await line.enter(60)
    first, second = (asyncio.create_task(line.enter(60)) for _ in range(2))
    await waiting(line, 2)
    # Woken and gone in the same moment: the room is the next one's.
    line.leave()
    first.cancel()
    await second
    assert (line.running, line.waiting) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "time_left_s"),
    [({"queue_timeout_ms": 1}, 60.0), ({}, 0.001), ({"max_queued_turns": 0}, 60.0)],
    ids=["patience", "deadline", "length"],
)
async def test_the_line_has_its_bounds(settings: dict[str, float], time_left_s: float) -> None:
    line = admission(max_concurrent_turns=1, retry_after_ms=300, **settings)
    await line.enter(60)
    with pytest.raises(Failure) as caught:
        await line.enter(time_left_s)
    assert caught.value.reason == Reason.ERROR_REASON_OVERLOADED
    assert caught.value.retry_after_s == 0.3
    assert caught.value.metadata["limit"] == "1"
    assert (line.running, line.waiting) == (1, 0)


async def test_those_who_were_let_in_wait_though_the_line_for_the_router_is_full() -> None:
    line = admission(max_concurrent_turns=2, max_queued_turns=1)
    await line.enter(60)
    await line.enter(60)
    comes = asyncio.create_task(line.enter(60))
    await waiting(line, 1)
    places: list[str] = []
    placed = asyncio.create_task(line.place(lambda: places.pop() if places else None, 60))
    await waiting(line, 2)
    # The next one at the door is sent away all the same.
    with pytest.raises(Failure):
        await line.enter(60)
    places.append("here")
    line.freed()
    assert await placed == "here"
    line.leave()
    await comes


async def test_a_turn_waits_no_longer_in_two_lines_than_in_one() -> None:
    line = admission(max_concurrent_turns=1)
    await line.enter(60)
    patience = line.patience()
    comes = asyncio.create_task(line.enter(60, patience))
    await waiting(line, 1)
    line.leave()
    await comes
    assert 0 < patience.left_s < line.patience().left_s
    patience.left_s = 0.0
    assert await line.place(lambda: "here", 60, patience) == "here"
    with pytest.raises(Failure) as caught:
        await line.place(lambda: None, 60, patience)
    assert caught.value.reason == Reason.ERROR_REASON_OVERLOADED


async def test_a_place_that_does_not_fit_the_first_is_offered_to_the_next() -> None:
    line = admission()
    free: set[str] = set()

    def wants(name: str) -> str | None:
        return name if name in free else None

    picky = asyncio.create_task(line.place(lambda: wants("a"), 60))
    other = asyncio.create_task(line.place(lambda: wants("b"), 60))
    await waiting(line, 2)
    free.add("b")
    line.freed()
    assert await other == "b"
    assert not picky.done()
    free.add("a")
    line.freed()
    assert await picky == "a"


async def test_what_becomes_ready_is_found_in_the_order_of_the_line() -> None:
    line = admission()
    ready: list[str] = []

    def find() -> str | None:
        return ready.pop(0) if ready else None

    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(line.place(find, 60)))
        await waiting(line, number + 1)
    # Nobody says that these are there.
    ready += ["first", "second", "third"]
    async with asyncio.timeout(30):
        assert await asyncio.gather(*tasks) == ["first", "second", "third"]


async def test_a_line_that_waits_for_others_does_not_shut_out_a_turn_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvloop.router.admission._LOOK_AGAIN_S", 3600.0)
    line = admission()
    asked: list[str] = []

    def finds(name: str, found: str | None) -> Callable[[], str | None]:
        def find() -> str | None:
            asked.append(name)
            return found

        return find

    stuck = asyncio.create_task(line.place(finds("stuck", None), 60))
    await waiting(line, 1)
    asked.clear()
    async with asyncio.timeout(30):
        assert await line.place(finds("fits", "here"), 60) == "here"
    # It has overtaken nobody.
    assert asked[-2:] == ["stuck", "fits"]
    stuck.cancel()


async def test_those_who_wait_are_told_of_the_end() -> None:
    line = admission(max_concurrent_turns=1)
    await line.enter(60)
    tasks = [asyncio.create_task(line.enter(60)) for _ in range(3)]
    await waiting(line, 3)
    line.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, Failure)
        assert result.reason == Reason.ERROR_REASON_DRAINING


@asynccontextmanager
async def held(
    prefills: int = 1, decodes: int = 1, **settings: float
) -> AsyncIterator[tuple[FakeFleet, RouterApp, Client, asyncio.Event]]:
    """A fleet whose decode workers answer once the gate is open."""
    async with fake_fleet(prefills, decodes) as fleet:
        gate = asyncio.Event()

        async def wait(_: int) -> None:
            await gate.wait()

        for decode in fleet.decodes:
            decode.on_chunk = wait
        app = await fleet.router(**{"queue_timeout_ms": 60_000, **settings})
        yield fleet, app, await fleet.client(app), gate


async def answers(tasks: list["asyncio.Task[Answer]"]) -> None:
    assert all(answer.token_ids == ANSWER for answer in await asyncio.gather(*tasks))


async def test_a_full_router_lets_wait_and_then_refuses() -> None:
    async with held(max_concurrent_turns=2, max_queued_turns=1, retry_after_ms=300) as (_, app, client, gate):
        tasks = [asyncio.create_task(client.say(LONG, f"c{n}")) for n in range(2)]
        await until(lambda: app.turns == 2, "two turns")
        tasks.append(asyncio.create_task(client.say(LONG, "c2")))
        await until(lambda: app.waiting == 1, "one in the line")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        failure = from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)
        assert (failure.reason_name, failure.retry_after_s) == ("OVERLOADED", 0.3)
        gate.set()
        await answers(tasks)
        assert (await client.say(LONG)).token_ids == ANSWER
        await until(lambda: app.turns == 0, "the end of all turns")


async def test_a_client_that_leaves_the_line_leaves_nothing() -> None:
    async with held(max_concurrent_turns=1) as (fleet, app, client, gate):
        first = asyncio.create_task(client.say(LONG))
        await until(lambda: app.turns == 1, "the turn")
        second = asyncio.create_task(client.say(LONG, "other"))
        await until(lambda: app.waiting == 1, "one in the line")
        second.cancel()
        await until(lambda: app.waiting == 0, "an empty line")
        gate.set()
        await answers([first])
        await until(lambda: app.turns == 0, "the end of all turns")
        assert len(fleet.prefills[0].requests) == 1


async def test_places_at_both_workers_are_taken_before_the_first_leg() -> None:
    async with held(prefills=2, max_turns_per_worker=1) as (fleet, app, client, gate):
        first = asyncio.create_task(client.say(LONG))
        await until(lambda: len(fleet.decodes[0].requests) == 1, "the first turn's second leg")
        others = [asyncio.create_task(client.say(LONG, f"c{n}")) for n in range(3)]
        await until(lambda: app.waiting == 3, "three in the line")
        # Both prefill workers are free, and neither is used as long as nobody could decode.
        assert sum(len(p.requests) for p in fleet.prefills) == 1
        gate.set()
        await answers([first, *others])
        assert sum(len(p.requests) for p in fleet.prefills) == 4
        await until(lambda: app.turns == 0, "the end of all turns")
        assert not any(worker.places for worker in (*app.pool.prefill, *app.pool.decode))


async def test_a_worker_that_becomes_ready_serves_those_who_wait() -> None:
    async with held(prefills=2, decodes=2, max_turns_per_worker=1) as (fleet, app, client, gate):
        app.pool.decode[1].draining = True
        first = asyncio.create_task(client.say(LONG))
        await until(lambda: app.pool.decode[0].places == 1, "a full worker")
        second = asyncio.create_task(client.say(LONG, "other"))
        await until(lambda: app.waiting == 1, "one in the line")
        app.pool.decode[1].draining = False
        await until(lambda: len(fleet.decodes[1].requests) == 1, "the second at the other worker")
        gate.set()
        await answers([first, second])


async def test_a_worker_has_no_more_turns_than_its_limit() -> None:
    async with held(decodes=2, max_turns_per_worker=2) as (fleet, app, client, gate):
        most = 0

        async def count() -> None:
            nonlocal most
            most = max(most, *(worker.places for worker in (*app.pool.prefill, *app.pool.decode)))

        fleet.prefills[0].on_prefill = count
        tasks = [asyncio.create_task(client.say(LONG, f"c{n}")) for n in range(10)]
        await until(lambda: app.waiting == 6, "six in the line")
        gate.set()
        await answers(tasks)
        assert most == 2


async def test_an_answer_that_has_begun_goes_on_though_the_line_is_full() -> None:
    async with fake_fleet() as fleet:
        gate = asyncio.Event()

        async def fail(number: int) -> None:
            if number == 2:
                await gate.wait()
                fleet.decodes[0].on_chunk = None
                raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "late")

        fleet.decodes[0].on_chunk = fail
        app = await fleet.router(max_turns_per_worker=1, max_queued_turns=1, queue_timeout_ms=60_000)
        client = await fleet.client(app)
        begun = asyncio.create_task(client.say(LONG))
        await until(lambda: len(fleet.decodes[0].requests) == 1, "the begun turn's second leg")
        waits = asyncio.create_task(client.say(LONG, "other"))
        await until(lambda: app.waiting == 1, "a full line")
        gate.set()
        answer = await begun
        assert len(answer.token_ids) == len(ANSWER)
        assert answer.summary is not None
        assert answer.summary.migrated
        await answers([waits])


async def test_a_failed_attempt_gives_its_places_back() -> None:
    async with fake_fleet() as fleet:

        async def fail() -> None:
            raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "no")

        fleet.prefills[0].on_prefill = fail
        app = await fleet.router(max_turns_per_worker=1)
        client = await fleet.client(app)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.say(LONG)
            failure = from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)
            assert failure.reason_name == "KV_READ_FAILED"
        fleet.prefills[0].on_prefill = None
        assert (await client.say(LONG)).token_ids == ANSWER
