"""Legs of many turns on one stream per worker."""

import asyncio

from router_fakes import expected_answer, fake_fleet, until

from kvloop.runtime import tokens

PROMPTS = [[number, *range(60)] for number in range(1, 21)]


async def test_turns_share_a_stream_per_worker() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        asked = [client.say(prompt, f"c{number}", max_tokens=8) for number, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*asked)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == expected_answer(tokens.pack(prompt), 8)
        assert (fleet.prefills[0].streams, fleet.decodes[0].streams) == (1, 1)


async def test_workers_that_have_no_such_stream_get_a_call_per_leg() -> None:
    async with fake_fleet() as fleet:
        for worker in (fleet.prefills[0], fleet.decodes[0]):
            worker.info.attach = False
        client = await fleet.client()
        answer = await client.say(PROMPTS[0])
        assert answer.token_ids == expected_answer(tokens.pack(PROMPTS[0]), 4)
        assert (fleet.prefills[0].streams, fleet.decodes[0].streams) == (0, 0)


async def test_a_worker_that_comes_back_older_is_served_by_calls() -> None:
    async with fake_fleet() as fleet:
        app = await fleet.router()
        client = await fleet.client(app)
        await client.say(PROMPTS[0])
        fleet.decodes[0].info.attach = False
        fleet.decodes[0].info.epoch = "another life"
        worker = app.pool.decode[0]
        await until(lambda: worker.info is not None and not worker.info.attach, "the new facts")
        await client.say(PROMPTS[1])
        assert fleet.decodes[0].streams == 1


async def test_a_stream_that_breaks_before_any_chunk_costs_each_turn_a_retry() -> None:
    async with fake_fleet(decodes=2) as fleet:
        client = await fleet.client()
        stuck = asyncio.Event()
        first, other = fleet.decodes

        async def hang(number: int) -> None:
            await stuck.wait()

        for decode in fleet.decodes:
            decode.on_chunk = hang
        asked = [asyncio.create_task(client.say(p, f"c{number}")) for number, p in enumerate(PROMPTS)]
        await until(lambda: len(first.requests) + len(other.requests) == len(PROMPTS), "all second legs")
        lost = len(first.requests)
        assert lost
        await first.host.kill()
        other.on_chunk = None
        stuck.set()
        answers = await asyncio.gather(*asked)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == expected_answer(tokens.pack(prompt), 4)
        assert sum(answer.reuse.retried for answer in answers) == lost


async def test_a_client_that_goes_away_takes_only_its_own_turn_off_the_stream() -> None:
    async with fake_fleet() as fleet:
        client = await fleet.client()
        go = asyncio.Event()

        async def hang(number: int) -> None:
            if number:
                await go.wait()

        decode = fleet.decodes[0]
        decode.on_chunk = hang
        stays = asyncio.create_task(client.say(PROMPTS[0], "stays"))
        leaves = asyncio.create_task(client.say(PROMPTS[1], "leaves"))
        await until(lambda: len(decode.requests) == 2, "both second legs")
        leaves.cancel()
        await until(lambda: decode.cancelled == 1, "the cancellation")
        go.set()
        assert (await stays).token_ids == expected_answer(tokens.pack(PROMPTS[0]), 4)
        assert decode.streams == 1
