"""Answers that begin with a token of the prefill worker's."""

import asyncio
from typing import Any

import pytest
from router_fakes import FakeFleet, collect, fake_fleet, make_request, until
from router_sim import ask, ids, sim_fleet

from kvloop.router import beginning
from kvloop.router.app import RouterApp
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

LONG = list(range(100))
PROMPT = ids(400)
FIRST = turn_pb2.Chunk(token_ids=tokens.pack([77]), text="<77>")
STOP = turn_pb2.Chunk(token_ids=tokens.pack([77]), finish_reason=turn_pb2.FINISH_REASON_STOP)


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **fields})


async def test_the_client_has_it_before_the_decode_worker_has_said_anything() -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].first = FIRST
        client = await fleet.client()
        may_go_on = asyncio.Event()

        async def wait(number: int) -> None:
            await may_go_on.wait()

        fleet.decodes[0].on_chunk = wait
        call = client.generate(make_request(LONG))
        early = await anext(aiter(call))
        assert (tokens.unpack(early.chunk.token_ids), early.chunk.text) == ([77], "<77>")
        may_go_on.set()
        rest = await collect(call)
        [second] = fleet.decodes[0].requests
        assert tokens.unpack(second.prompt_token_ids) == [*LONG, 77]
        assert second.sampling.max_tokens == 3
        assert rest.summary is not None
        assert (rest.summary.prompt_tokens, rest.summary.output_tokens) == (100, 4)
        assert rest.summary.lease.num_tokens == 103
        assert not rest.summary.migrated


class Leaving:
    """A client that leaves with the first token, while D has said nothing."""

    def __init__(self, fleet: FakeFleet) -> None:
        fleet.prefills[0].first = FIRST
        self.fleet, self.decode = fleet, fleet.decodes[0]
        self.may_go_on = asyncio.Event()
        self.fails: Failure | None = None

    async def leave(self, app: RouterApp, *, keep: bool = True) -> None:
        asked = asyncio.Event()

        async def wait(number: int) -> None:
            asked.set()
            await self.may_go_on.wait()
            if self.fails is not None:
                raise self.fails

        self.decode.on_chunk = wait
        retention = turn_pb2.Retention(hold_on_cancel=keep)
        client = await self.fleet.client(app)
        call = client.generate(make_request(LONG, retention=retention))
        await anext(aiter(call))
        await asked.wait()
        call.cancel()
        await until(lambda: not app.turns, "the turn's end")


@pytest.mark.parametrize("keep", [True, False])
async def test_a_turn_that_is_cancelled_with_it_is_handed_over_first(keep: bool) -> None:
    async with fake_fleet() as fleet:
        app, leaving = await fleet.router(), Leaving(fleet)
        await leaving.leave(app, keep=keep)
        [worker] = app.pool.decode
        assert (worker.places, worker.in_flight, leaving.decode.cancelled) == (1, 1, 0)
        assert fleet.prefills[0].held
        leaving.may_go_on.set()
        await until(lambda: not fleet.prefills[0].held, "the hand-over")
        await until(lambda: (worker.places, worker.in_flight) == (0, 0), "the decode leg's end")
        await until(lambda: bool(leaving.decode.cancelled or leaving.decode.finished), "D to hear of it")


async def test_a_handover_that_nobody_waits_for_fails_as_any_other() -> None:
    async with fake_fleet() as fleet:
        app, leaving = await fleet.router(), Leaving(fleet)
        await leaving.leave(app)
        leaving.fails = Failure(Reason.ERROR_REASON_DRAINING, "D drains")
        leaving.may_go_on.set()
        await until(lambda: not fleet.prefills[0].held, "P's blocks to be let go of")
        assert not app.pool.decode[0].ready


async def test_a_handover_that_nobody_waits_for_does_not_take_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beginning, "_LONGEST_S", 0.1)
    async with fake_fleet() as fleet:
        app, leaving = await fleet.router(), Leaving(fleet)
        await leaving.leave(app)
        await until(lambda: leaving.decode.cancelled == 1, "the cancellation")
        await until(lambda: not app.pool.decode[0].places, "the place")


async def test_a_hand_over_that_failed_is_not_begun_again() -> None:
    async with fake_fleet(decodes=2) as fleet:
        [prefill] = fleet.prefills
        prefill.first = FIRST
        failed = Failure(Reason.ERROR_REASON_KV_READ_FAILED, "the read failed")
        failures = [failed]

        async def fail_once(number: int) -> None:
            if failures:
                raise failures.pop()

        for decode in fleet.decodes:
            decode.on_chunk = fail_once
        client = await fleet.client()
        answer = await client.say(LONG)
        assert answer.summary is not None
        assert answer.summary.migrated
        assert [request.first_token for request in prefill.requests] == [True, False]
        assert answer.token_ids[0] == 77


async def test_workers_that_do_not_agree_on_a_limit_are_left_to_theirs() -> None:
    async with fake_fleet(decodes=2) as fleet:
        fleet.prefills[0].first = FIRST
        fleet.prefills[0].info.default_max_tokens = fleet.decodes[0].info.default_max_tokens = 7
        client = await fleet.client()
        await client.say(LONG, sampling=sampling_pb2.SamplingParams(temperature=0.0))
        [first] = fleet.prefills[0].requests
        assert not first.first_token
        assert not first.sampling.HasField("max_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"seed": 3},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"prompt_logprobs": 1},
        {"temperature": 1.0, "logprobs": 1},
        {"structured_outputs": sampling_pb2.StructuredOutputs(regex=".*")},
    ],
    ids=",".join,
)
async def test_what_could_not_be_continued_does_not_begin_there(fields: dict[str, Any]) -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].first = FIRST
        client = await fleet.client()
        await client.say(LONG, sampling=sampling(**fields))
        assert not fleet.prefills[0].requests[0].first_token
        assert tokens.unpack(fleet.decodes[0].requests[0].prompt_token_ids) == LONG


@pytest.mark.parametrize("switch", [{"first_token_from_prefill": False}, {"max_migrations": 0}], ids=str)
async def test_it_can_be_switched_off(switch: dict[str, Any]) -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].first = FIRST
        client = await fleet.client(await fleet.router(**switch))
        await client.say(LONG)
        assert not fleet.prefills[0].requests[0].first_token


@pytest.mark.parametrize(("default", "limit"), [(0, 4000 - 100), (50, 50), (1_000_000, 4000 - 100)])
async def test_a_limit_that_workers_know_is_as_good_as_one_that_is_asked_for(
    default: int, limit: int
) -> None:
    async with fake_fleet() as fleet:
        for worker in (*fleet.prefills, *fleet.decodes):
            worker.info.max_model_len = 4000
            worker.info.default_max_tokens = default
        client = await fleet.client()
        await client.say(LONG, sampling=sampling_pb2.SamplingParams(temperature=1.0))
        [first] = fleet.prefills[0].requests
        assert first.first_token
        assert first.sampling == sampling_pb2.SamplingParams(temperature=1.0, max_tokens=limit)


async def test_a_token_that_ends_the_answer_is_the_decode_workers_to_tell() -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].first = STOP
        client = await fleet.client()
        await client.say(LONG)
        await client.say(LONG, "other", sampling=sampling(temperature=1.0))
        greedy, sampled = fleet.decodes[0].requests
        assert tokens.unpack(greedy.prompt_token_ids) == tokens.unpack(sampled.prompt_token_ids) == LONG
        assert greedy.sampling == sampling()
        assert sampled.sampling == sampling(temperature=1.0, allowed_token_ids=[77])


async def test_whichever_leg_tells_it_the_answer_is_the_same() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        other = await fleet.client(await fleet.router(first_token_from_prefill=False))
        history = list(PROMPT)
        for turn in range(3):
            answer = await client.say(history)
            apart = await other.say(history, "")
            assert answer.token_ids == apart.token_ids
            assert answer.text == apart.text
            if turn:
                assert answer.way == ("READBACK", "PROVEN")
                assert answer.reuse.tokens.readback == len(history) - 4
            history += [*answer.token_ids, 5, 6, 7]
        assert await client.end()
        await fleet.whole()


async def test_it_ends_where_the_model_ends_it() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        token = (await client.say(PROMPT, "")).token_ids[0]
        for temperature in (0.0, 0.9):
            given = sampling_pb2.SamplingParams(
                temperature=temperature, stop_token_ids=[token], allowed_token_ids=[token]
            )
            answer = await client.say(PROMPT, "", sampling=given)
            assert answer.token_ids == [token]
            assert answer.summary is not None
            assert answer.summary.stop_reason == str(token)
        await fleet.whole()


async def test_an_answer_goes_on_when_the_decode_leg_fails_after_it() -> None:
    async with sim_fleet(decodes=2) as fleet:
        client = await fleet.client()
        whole = await client.say(PROMPT, "")
        for node in fleet.decodes:
            node.engine.faults.fail_decodes = 1
        answer = await client.say(PROMPT)
        assert answer.token_ids == whole.token_ids
        assert answer.text == whole.text
        assert answer.summary is not None
        assert answer.summary.migrated
        assert answer.summary.output_tokens == len(whole.token_ids)
        assert await client.end()
        await fleet.whole()


async def test_every_logprob_comes_once() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        answer = await client.turn(ask(PROMPT, sampling=sampling_pb2.SamplingParams(logprobs=1)))
        assert answer.logprobs == len(answer.token_ids) == 16
