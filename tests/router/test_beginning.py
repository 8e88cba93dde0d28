"""Answers that begin with a token of the prefill worker's."""

import asyncio
from typing import Any

import pytest
from router_fakes import collect, fake_fleet, make_request, until
from router_sim import ask, ids, sim_fleet

from kvloop.runtime import tokens
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


async def test_a_client_that_leaves_with_it_leaves_the_handover_to_end() -> None:
    async with fake_fleet() as fleet:
        fleet.prefills[0].first = FIRST
        decode, client = fleet.decodes[0], await fleet.client()
        asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def wait(number: int) -> None:
            asked.set()
            await may_go_on.wait()

        decode.on_chunk = wait
        call = client.generate(make_request(LONG))
        await anext(aiter(call))
        await asked.wait()
        call.cancel()
        assert fleet.prefills[0].held
        assert not decode.cancelled
        decode.on_chunk = None
        may_go_on.set()
        await until(lambda: not fleet.prefills[0].held, "the hand-over")
        await until(lambda: bool(decode.cancelled or decode.finished), "the decode leg's end")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"seed": 3},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"prompt_logprobs": 1},
        {"structured_outputs": sampling_pb2.StructuredOutputs(regex=".*")},
    ],
    ids=lambda fields: f"{next(iter(fields))}",
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
