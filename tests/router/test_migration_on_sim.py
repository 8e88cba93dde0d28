"""Decode workers lost in the middle of an answer: the answer goes on, no token twice and none left out."""

import asyncio
from typing import Any

import grpc
import pytest
from router_fakes import Answer, collect
from router_sim import Node, SimClient, SimFleet, ask, ids, sim_fleet

from kvloop.decode.app import DecodeApp
from kvloop.engine.simulated import text
from kvloop.router.app import RouterApp
from kvloop.runtime import tokens
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

PROMPT = ids(400)
# 22 ms per token: slow enough to be killed in the middle.
SLOW = {"preset": "qwen3-32b-h200", "time_scale": 0.3}
TOKENS = 60


def serving(fleet: SimFleet) -> Node:
    alive = [node for node in fleet.decodes if node.engine.alive]
    [busy] = [node for node in alive if isinstance(node.app, DecodeApp) and len(node.app.parts.turns)]
    return busy


async def broken(
    fleet: SimFleet,
    client: SimClient,
    request: router_service_pb2.GenerateRequest,
    *,
    after: int = 5,
    times: int = 1,
) -> Answer:
    """Play a turn whose decode worker is killed once some chunks have come, so many times."""
    got = Answer()
    call = client.generate(request)
    responses = aiter(call)
    for _ in range(times):
        for _ in range(after):
            response = await anext(responses)
            add(got, response)
        serving(fleet).engine.faults.kill()
    async for response in responses:
        add(got, response)
    return got


def add(answer: Answer, response: router_service_pb2.GenerateResponse) -> None:
    if response.WhichOneof("event") == "summary":
        assert answer.summary is None
        answer.summary = response.summary
        return
    answer.chunks += 1
    answer.token_ids += tokens.unpack(response.chunk.token_ids)
    answer.text += response.chunk.text
    answer.logprobs += len(response.chunk.logprobs)


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**fields)


async def test_a_greedy_answer_goes_on_as_it_would_have() -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client()
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS))
        whole = await client.say(PROMPT, "", max_tokens=TOKENS)
        assert got.token_ids == whole.token_ids
        assert got.text == whole.text
        assert got.summary is not None
        assert got.summary.migrated
        assert not got.reuse.retried
        assert got.summary.output_tokens == TOKENS
        assert got.summary.prompt_tokens == len(PROMPT) == got.reuse.tokens.computed
        assert got.summary.finish_reason == turn_pb2.FINISH_REASON_LENGTH
        assert got.summary.lease.num_tokens == len(PROMPT) + TOKENS - 1
        following = await client.say([*PROMPT, *got.token_ids])
        assert following.way == ("READBACK", "PROVEN")
        assert following.token_ids == await client.cold([*PROMPT, *got.token_ids])
        assert await client.end()
        await fleet.whole()


async def test_twice_in_one_answer() -> None:
    async with sim_fleet(prefills=2, decodes=3, engine=SLOW) as fleet:
        client = await fleet.client()
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS), times=2)
        assert got.token_ids == (await client.say(PROMPT, "", max_tokens=TOKENS)).token_ids
        assert await client.end()
        await fleet.whole()


async def test_a_direct_answer_goes_on_through_a_prefill_worker() -> None:
    async with sim_fleet(decodes=2, engine=SLOW | {"enable_prefix_caching": True}) as fleet:
        client = await fleet.client(await fleet.router(direct=True))
        first = await client.say(PROMPT)
        prompt = [*PROMPT, *first.token_ids, 9]
        got = await broken(fleet, client, ask(prompt, max_tokens=TOKENS))
        assert got.way == ("DIRECT", "PROVEN")
        assert got.summary is not None
        assert got.summary.migrated
        sources = got.reuse.tokens
        assert sources.d_local + sources.computed == len(prompt)
        assert got.token_ids == (await client.say(prompt, "", max_tokens=TOKENS)).token_ids
        assert await client.end()
        await fleet.whole()


@pytest.mark.parametrize(
    "extra",
    [
        sampling(seed=7, temperature=0.8),
        sampling(presence_penalty=0.5),
        sampling(bad_words=["nothing"]),
        sampling(structured_outputs=sampling_pb2.StructuredOutputs(regex=".*")),
    ],
    ids=["seed", "penalty", "bad_words", "grammar"],
)
async def test_what_keeps_state_is_given_again_and_compared(extra: sampling_pb2.SamplingParams) -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client()
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS, sampling=extra))
        whole = await client.say(PROMPT, "", max_tokens=TOKENS, sampling=extra)
        assert (got.token_ids, got.text) == (whole.token_ids, whole.text)
        assert got.summary is not None
        assert got.summary.migrated
        assert got.summary.output_tokens == TOKENS
        assert await client.end()
        await fleet.whole()


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_is_found_across_the_break(included: bool) -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client()
        plain = await client.say(PROMPT, "", max_tokens=TOKENS)
        # From the token before the break into the one after it, and on.
        stop = text.decode(plain.token_ids[3:30])
        extra = sampling(stop=[stop], include_stop_str_in_output=included)
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS, sampling=extra))
        whole = await client.say(PROMPT, "", max_tokens=TOKENS, sampling=extra)
        assert got.text == whole.text
        assert got.token_ids == whole.token_ids
        assert got.summary is not None
        assert got.summary.migrated
        assert got.summary.stop_reason == stop
        assert len(got.token_ids) < TOKENS
        assert await client.end()
        await fleet.whole()


async def test_minimum_and_log_probabilities_are_counted_through() -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client()
        plain = await client.say(PROMPT, "", max_tokens=TOKENS)
        stop_id = plain.token_ids[30]
        extra = sampling(min_tokens=20, logprobs=1, stop_token_ids=[stop_id])
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS, sampling=extra))
        whole = await client.say(PROMPT, "", max_tokens=TOKENS, sampling=extra)
        assert got.token_ids == whole.token_ids
        assert got.logprobs == len(got.token_ids) == 31
        assert got.summary is not None
        assert got.summary.stop_reason == str(stop_id)
        assert await client.end()
        await fleet.whole()


async def test_a_sampled_answer_that_keeps_state_gets_a_seed_to_be_repeatable() -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client()
        extra = sampling(temperature=1.0, stop=["never "])
        got = await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS, sampling=extra))
        assert len(got.token_ids) == TOKENS
        assert got.summary is not None
        assert got.summary.migrated
        again = await client.say(PROMPT, "", max_tokens=TOKENS, sampling=extra)
        assert again.token_ids != got.token_ids, "answers without a seed differ"
        assert await client.end()
        await fleet.whole()


async def test_a_paused_worker_s_answer_goes_on_elsewhere() -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        app = await fleet.router(info_timeout_s=0.1)
        client = await fleet.client(app)
        got = Answer()
        responses = aiter(client.generate(ask(PROMPT, max_tokens=TOKENS)))
        for _ in range(2):  # the second one is the decode worker's
            add(got, await anext(responses))
        victim = serving(fleet)
        victim.engine.faults.pause()
        async for response in responses:
            add(got, response)
        assert got.summary is not None
        assert got.summary.migrated
        assert got.summary.decode_worker != victim.name
        victim.engine.faults.resume()
        assert got.token_ids == (await client.say(PROMPT, "", max_tokens=TOKENS)).token_ids
        assert await client.end()
        await fleet.whole()


async def test_without_another_worker_the_answer_waits_for_one() -> None:
    async with sim_fleet(engine=SLOW) as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        got = Answer()
        responses = aiter(client.generate(ask(PROMPT, max_tokens=TOKENS)))
        for _ in range(2):  # the second one is the decode worker's
            add(got, await anext(responses))
        victim = serving(fleet)
        victim.engine.faults.kill()
        await gone(app)
        await victim.engine.start()
        async for response in responses:
            add(got, response)
        assert got.token_ids == await client.cold(PROMPT, max_tokens=TOKENS)
        assert await client.end()
        await fleet.whole()


async def gone(app: RouterApp) -> None:
    async with asyncio.timeout(20):
        while app.pool.decode[0].ready:  # noqa: ASYNC110 - what a router sees sets no event for tests
            await asyncio.sleep(0.01)


async def test_switched_off_it_fails_as_before() -> None:
    async with sim_fleet(decodes=2, engine=SLOW) as fleet:
        client = await fleet.client(await fleet.router(max_migrations=0))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await broken(fleet, client, ask(PROMPT, max_tokens=TOKENS))
        failure = from_rpc_error(error.value, Reason.ERROR_REASON_UNSPECIFIED)
        assert failure.reason_name == "WORKER_FAILED"
        assert failure.metadata["migration"]
        assert await collect(client.generate(ask(PROMPT)))
        assert await client.end()
        await fleet.whole()
