"""Workers and clients that go away: what the turn does, and that nothing stays held."""

import asyncio

import grpc
import pytest
from router_fakes import (
    Answer,
    FakeFleet,
    collect,
    expected_answer,
    fake_fleet,
    make_request,
    until,
)

from kvloop.router.app import RouterApp
from kvloop.router.legs import timed_out
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

LONG = list(range(100))
ANSWER = expected_answer(tokens.pack(LONG), 4)


class ManualClock:
    """Time that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    return from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)


async def settled(fleet: FakeFleet, app: RouterApp) -> None:
    """Nothing runs and nothing is held at any prefill worker."""
    await until(lambda: app.turns == 0, "the end of all turns")
    await until(lambda: not any(p.held for p in fleet.prefills), "the release of prompts")
    assert sum(w.in_flight for w in app.pool.prefill) + sum(w.in_flight for w in app.pool.decode) == 0


@pytest.mark.parametrize(
    "reason",
    [
        Reason.ERROR_REASON_WORKER_FAILED,
        Reason.ERROR_REASON_INTERNAL,
        Reason.ERROR_REASON_DRAINING,
        Reason.ERROR_REASON_NO_WORKER,
        Reason.ERROR_REASON_KV_READ_FAILED,
    ],
)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_fails_before_the_first_chunk_is_done_again(
    leg: str, reason: "Reason.ValueType"
) -> None:
    async with fake_fleet(prefills=2, decodes=2) as fleet:
        failed: list[str] = []

        async def fail(*_: int) -> None:
            if not failed:
                failed.append("once")
                raise Failure(reason, "no")

        for prefill, decode in zip(fleet.prefills, fleet.decodes, strict=True):
            if leg == "prefill":
                prefill.on_prefill = fail
            else:
                decode.on_chunk = fail
        app = await fleet.router()
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert answer.token_ids == ANSWER
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert answer.reuse.retried
        legs = [r for p in fleet.prefills for r in p.requests]
        assert len({r.request_id for r in legs}) == 2
        workers = fleet.prefills if leg == "prefill" else fleet.decodes
        assert [len(w.requests) for w in workers] == [1, 1]
        await settled(fleet, app)
        if leg == "decode":
            assert sum(len(p.released) for p in fleet.prefills) == 1


async def test_a_readback_whose_turn_fails_is_done_again_cold() -> None:
    async with fake_fleet(prefills=2) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        await client.say(LONG)

        async def fail(_: int) -> None:
            fleet.decodes[0].on_chunk = None
            raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "the guard refused")

        fleet.decodes[0].on_chunk = fail
        answer = await client.say(LONG)
        assert answer.way == ("RECOMPUTE", "READ_FAILED")
        assert answer.reuse.retried
        assert (await client.say(LONG)).way == ("READBACK", "PROVEN")
        await settled(fleet, app)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_hand_over_that_fails_is_done_again_from_another_prefill_worker(begun: bool) -> None:
    async with fake_fleet(prefills=2) as fleet:

        async def fail(_: int) -> None:
            fleet.decodes[0].on_chunk = None
            raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "the guard refused")

        fleet.decodes[0].on_chunk = fail
        for prefill in fleet.prefills if begun else ():
            prefill.first = turn_pb2.Chunk(token_ids=tokens.pack(ANSWER[:1]), text="<1>")
        app = await fleet.router()
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert answer.summary is not None
        assert answer.summary.migrated == begun
        assert len(answer.token_ids) == len(ANSWER)
        assert [len(p.requests) for p in fleet.prefills] == [1, 1]
        await settled(fleet, app)


async def test_tries_are_limited_and_the_last_failure_is_told() -> None:
    async with fake_fleet() as fleet:

        async def fail() -> None:
            raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "no")

        fleet.prefills[0].on_prefill = fail
        app = await fleet.router()
        client = await fleet.client(app)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert failure_of(error.value).reason_name == "KV_READ_FAILED"
        assert len(fleet.prefills[0].requests) == 2
        await settled(fleet, app)


async def test_a_prefill_worker_killed_in_its_leg_is_replaced() -> None:
    async with fake_fleet(prefills=2) as fleet:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        for prefill in fleet.prefills:
            prefill.on_prefill = wait
        app = await fleet.router()
        client = await fleet.client(app)
        call = client.generate(make_request(LONG))
        await until(lambda: any(p.requests for p in fleet.prefills), "the first leg")
        victim = next(p for p in fleet.prefills if p.requests)
        gate.set()
        for prefill in fleet.prefills:
            if prefill is not victim:
                prefill.on_prefill = None
        await victim.host.kill()
        answer = await collect(call)
        assert answer.token_ids == ANSWER
        assert answer.summary is not None
        # The victim may have answered just before it was killed.
        assert answer.reuse.retried == (answer.summary.prefill_worker != victim.info.worker_id)
        await until(lambda: app.turns == 0, "the end")


async def test_a_decode_worker_killed_before_the_first_chunk_is_replaced() -> None:
    async with fake_fleet(decodes=2) as fleet:
        started, never = asyncio.Event(), asyncio.Event()

        async def hang(_: int) -> None:
            started.set()
            await never.wait()

        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(LONG)
        assert first.summary is not None
        holder = next(d for d in fleet.decodes if d.requests)
        holder.on_chunk = hang
        call = client.generate(make_request(LONG + first.token_ids))
        await started.wait()
        await holder.host.kill()
        answer = await collect(call)
        assert answer.token_ids == ANSWER
        assert answer.way == ("RECOMPUTE", "READ_FAILED")
        assert answer.summary is not None
        assert answer.summary.decode_worker != first.summary.decode_worker
        # It can't be told whether the lost worker still reads, so P's own deadline frees that prompt.
        assert not fleet.prefills[0].released
        assert (await client.say(LONG)).way == ("READBACK", "PROVEN")
        await until(lambda: app.turns == 0, "the end")


async def test_a_dead_holder_makes_the_turn_cold() -> None:
    async with fake_fleet(decodes=2) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        first = await client.say(LONG)
        holder = next(d for d in fleet.decodes if d.requests)
        await holder.host.kill()
        worker = app.pool.by_endpoint(holder.host.endpoint)
        assert worker is not None
        await until(lambda: not worker.present, "the router's noticing")
        answer = await client.say(LONG + first.token_ids)
        assert answer.way == ("RECOMPUTE", "DECODE_UNAVAILABLE")
        await holder.host.start()
        await until(lambda: worker.present, "the worker's return")


async def test_a_stream_that_can_not_be_repeated_fails() -> None:
    async with fake_fleet(decodes=2) as fleet:
        turns: list[int] = []

        async def fail(number: int) -> None:
            turns.append(number)
            if number == 2 and turns.count(2) == 1:
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "late")

        for decode in fleet.decodes:
            decode.on_chunk = fail
        app = await fleet.router()
        client = await fleet.client(app)
        # With a seed the answer is given again from its start, and is another one here.
        request = make_request(LONG, sampling=sampling_pb2.SamplingParams(max_tokens=4, seed=3))
        got = Answer()
        call = client.generate(request)
        for decode in fleet.decodes:
            decode.drifts = True
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call, got)
        assert got.token_ids == ANSWER[:2]
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        failure = failure_of(error.value)
        assert (failure.reason_name, failure.metadata["migration"]) == (
            "WORKER_FAILED",
            "the answer can't be repeated",
        )
        assert sum(len(d.requests) for d in fleet.decodes) == 2
        await settled(fleet, app)


async def test_an_answer_that_has_ended_needs_no_other_worker() -> None:
    async with fake_fleet(decodes=2) as fleet:

        async def fail() -> None:
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "gone before the summary")

        for decode in fleet.decodes:
            decode.on_summary = fail
        app = await fleet.router()
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert answer.token_ids == ANSWER
        assert answer.summary is not None
        assert answer.summary.finish_reason == turn_pb2.FINISH_REASON_LENGTH
        assert answer.summary.output_tokens == len(ANSWER)
        assert not answer.summary.migrated
        assert not answer.summary.HasField("lease")
        assert answer.way == ("RECOMPUTE", "NOT_FOUND")
        assert sum(len(d.requests) for d in fleet.decodes) == 1
        await settled(fleet, app)


async def test_migrations_are_limited() -> None:
    async with fake_fleet(decodes=2) as fleet:

        async def fail(number: int) -> None:
            if number == 1:
                raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "late")

        for decode in fleet.decodes:
            decode.on_chunk = fail
        app = await fleet.router(max_migrations=2)
        client = await fleet.client(app)
        got = Answer()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(client.generate(make_request(LONG, max_tokens=8)), got)
        assert failure_of(error.value).metadata["migration"] == "the answer was taken up too often"
        assert sum(len(d.requests) for d in fleet.decodes) == 3
        await settled(fleet, app)


async def test_a_silent_decode_worker_is_given_up() -> None:
    async with fake_fleet(decodes=2) as fleet:
        hung: list[int] = []

        async def hang(number: int) -> None:
            if not hung:
                hung.append(number)
                await asyncio.Event().wait()

        for decode in fleet.decodes:
            decode.on_chunk = hang
        app = await fleet.router(first_chunk_timeout_s=0.2)
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert answer.token_ids == ANSWER
        assert answer.reuse.retried
        await until(lambda: sum(d.cancelled for d in fleet.decodes) == 1, "the cancellation")


async def test_an_answer_that_stands_still_at_a_worker_that_answers_questions_goes_on_elsewhere() -> None:
    async with fake_fleet(decodes=2) as fleet:
        hung: list[int] = []

        async def hang(number: int) -> None:
            if number == 2 and not hung:
                hung.append(number)
                await asyncio.Event().wait()

        for decode in fleet.decodes:
            decode.on_chunk = hang
        app = await fleet.router(chunk_timeout_s=0.2)
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert len(answer.token_ids) == len(ANSWER)
        assert answer.summary is not None
        assert answer.summary.migrated
        assert all(worker.present for worker in app.pool.decode)
        await until(lambda: sum(d.cancelled for d in fleet.decodes) == 1, "the cancellation")
        await settled(fleet, app)


async def test_a_silent_prefill_worker_is_given_up() -> None:
    async with fake_fleet(prefills=2) as fleet:
        hung: list[int] = []

        async def hang() -> None:
            if not hung:
                hung.append(1)
                await asyncio.Event().wait()

        for prefill in fleet.prefills:
            prefill.on_prefill = hang
        app = await fleet.router(prefill_timeout_s=0.2)
        client = await fleet.client(app)
        answer = await client.say(LONG)
        assert answer.reuse.retried
        await settled(fleet, app)


async def test_a_client_that_leaves_in_the_first_leg_frees_the_prompt() -> None:
    async with fake_fleet() as fleet:

        async def hang() -> None:
            await asyncio.Event().wait()

        fleet.prefills[0].on_prefill = hang
        app = await fleet.router()
        client = await fleet.client(app)
        call = client.generate(make_request(LONG))
        await until(lambda: len(fleet.prefills[0].requests) == 1, "the leg")
        call.cancel()
        await until(lambda: fleet.prefills[0].cancelled == 1, "the cancellation of the leg")
        await until(lambda: fleet.prefills[0].released != [], "the release")
        assert fleet.prefills[0].released == [fleet.prefills[0].requests[0].request_id]
        await settled(fleet, app)


async def test_a_client_that_leaves_in_the_second_leg_cancels_it_and_says_what_to_keep() -> None:
    async with fake_fleet() as fleet:

        async def hang(number: int) -> None:
            if number == 2:
                await asyncio.Event().wait()

        fleet.decodes[0].on_chunk = hang
        app = await fleet.router()
        client = await fleet.client(app)
        retention = turn_pb2.Retention(hold=False, hold_on_cancel=True)
        call = client.generate(make_request(LONG, retention=retention))
        responses = aiter(call)
        await anext(responses)
        call.cancel()
        await until(lambda: fleet.decodes[0].cancelled == 1, "the cancellation of the leg")
        assert fleet.decodes[0].requests[0].retention == retention
        await settled(fleet, app)


async def test_a_deadline_ends_the_legs() -> None:
    async with fake_fleet() as fleet:

        async def hang(_: int) -> None:
            await asyncio.Event().wait()

        fleet.decodes[0].on_chunk = hang
        app = await fleet.router()
        client = await fleet.client(app)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.turn(make_request(LONG), timeout=0.5)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: fleet.decodes[0].cancelled == 1, "the cancellation of the leg")
        await until(lambda: app.turns == 0, "the end")
        assert app.pool.decode[0].ready, "the caller's haste says nothing about the worker"


@pytest.mark.parametrize("left_s", [-0.001, 0.0005])
async def test_a_leg_that_the_callers_deadline_ends_a_little_early_is_no_workers_fault(
    left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_fleet() as fleet:
        clock = ManualClock()
        app = RouterApp(fleet.settings(), directory=fleet.directory, clock=clock)
        fleet.stack.push_async_callback(app.stop)
        await app.start()
        client = await fleet.client(app)
        [worker] = app.pool.prefill

        async def run_out(request: object, prompt: bytes, timeout_s: float) -> None:
            clock.now += timeout_s - left_s
            raise timed_out("answer")

        monkeypatch.setattr(worker.link, "prefill", run_out)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG)
        assert failure_of(error.value).reason_name == "DEADLINE_EXCEEDED"
        assert worker.ready


async def test_nothing_is_sent_before_the_first_chunk() -> None:
    async with fake_fleet() as fleet:
        gate = asyncio.Event()

        async def wait(_: int) -> None:
            await gate.wait()

        fleet.decodes[0].on_chunk = wait
        client = await fleet.client()
        call = client.generate(make_request(LONG))
        headers = asyncio.create_task(call.initial_metadata())
        await until(lambda: len(fleet.decodes[0].requests) == 1, "the second leg")
        assert not headers.done()
        gate.set()
        await headers
        assert (await collect(call)).token_ids == ANSWER


async def test_draining_refuses_new_turns_and_lets_running_ones_end() -> None:
    async with fake_fleet() as fleet:
        gate = asyncio.Event()

        async def wait(_: int) -> None:
            await gate.wait()

        fleet.decodes[0].on_chunk = wait
        app = await fleet.router()
        client = await fleet.client(app)
        running = asyncio.create_task(client.say(LONG))
        await until(lambda: app.turns == 1, "the turn")
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.say(LONG, "other")
        assert failure_of(error.value).reason_name == "DRAINING"
        assert not draining.done()
        gate.set()
        assert (await running).token_ids == ANSWER
        await draining


async def test_stopping_with_turns_under_way_ends_them_and_their_legs() -> None:
    async with fake_fleet() as fleet:

        async def hang(_: int) -> None:
            await asyncio.Event().wait()

        fleet.decodes[0].on_chunk = hang
        app = await fleet.router()
        client = await fleet.client(app)
        running = asyncio.create_task(client.say(LONG))
        await until(lambda: len(fleet.decodes[0].requests) == 1, "the second leg")
        await app.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        await until(lambda: fleet.decodes[0].cancelled == 1, "the cancellation of the leg")
        await app.stop()
