"""Turns that go on in the middle of a block, on a real engine. Answers are compared with a cold one's."""

import asyncio

import pytest
from connector_harness import BLOCK, Engine, fresh_prompt, new_id
from connector_steps import ANSWER, Balance, cold, first_turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


@pytest.mark.parametrize("tail", [0, 1, 2, 17, BLOCK - 1])
async def test_only_the_new_tokens_are_computed(plain: Engine, d: Engine, tail: int) -> None:
    async with Balance(plain, d):
        held = 4 * BLOCK + tail
        _, history, _ = await first_turn(d, held - ANSWER + 1)
        prompt = history + fresh_prompt(40)
        result = await d.decode(prompt, ANSWER, lease=(lease := new_id("lease")))
        assert result["tokens"] == await cold(plain, prompt, ANSWER)
        report = result["params"]["kvloop_report"]
        assert (report["local"], report["computed"]) == (held, len(prompt) - held)
        assert report["transfer"] is None
        # And once more, from what that turn left.
        prompt = prompt + result["tokens"] + fresh_prompt(9)
        again = await d.decode(prompt, ANSWER, lease=new_id("lease"))
        assert again["tokens"] == await cold(plain, prompt, ANSWER)
        assert again["params"]["kvloop_report"]["local"] == report["hold"]["num_tokens"]
        assert await d.control.release(lease)


async def test_a_prompt_that_leaves_the_held_one_inside_the_block(plain: Engine, d: Engine) -> None:
    async with Balance(plain, d):
        _, history, _ = await first_turn(d, 4 * BLOCK + 20 - ANSWER + 1)
        for shared in (4 * BLOCK + 11, 4 * BLOCK):
            prompt = [*history[:shared], 3 + (history[shared] - 2) % 500, *fresh_prompt(20)]
            result = await d.decode(prompt, ANSWER, lease=new_id("lease"))
            assert result["tokens"] == await cold(plain, prompt, ANSWER)
            assert result["params"]["kvloop_report"]["local"] == shared
        short = history[: 4 * BLOCK + 7]
        result = await d.decode(short, ANSWER, lease=new_id("lease"))
        assert result["tokens"] == await cold(plain, short, ANSWER)
        assert result["params"]["kvloop_report"]["local"] == len(short) - 1


async def test_forks_copy_the_same_block_while_its_hold_ends(plain: Engine, d: Engine) -> None:
    async with Balance(plain, d):
        lease, history, _ = await first_turn(d, 4 * BLOCK + 20 - ANSWER + 1)

        async def fork() -> None:
            prompt = history + fresh_prompt(30)
            result = await d.decode(prompt, ANSWER, lease=new_id("lease"))
            assert result["tokens"] == await cold(plain, prompt, ANSWER)
            assert result["params"]["kvloop_report"]["local"] in (4 * BLOCK, 4 * BLOCK + 20)

        forks = [asyncio.create_task(fork()) for _ in range(5)]
        await asyncio.sleep(0)
        await d.control.release(lease)
        await asyncio.gather(*forks)


async def test_another_salt_copies_nothing(plain: Engine, d: Engine) -> None:
    async with Balance(plain, d):
        _, history, _ = await first_turn(d, 4 * BLOCK + 20 - ANSWER + 1, salt="one")
        prompt = history + fresh_prompt(30)
        result = await d.decode(prompt, ANSWER, lease=new_id("lease"), salt="two")
        assert result["tokens"] == await cold(plain, prompt, ANSWER)
        assert result["params"]["kvloop_report"]["local"] == 0
