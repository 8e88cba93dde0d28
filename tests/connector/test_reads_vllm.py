"""Reads between real engines. Answers are compared with those of a cold engine."""

import asyncio

import pytest
from connector_harness import BLOCK, Engine, fresh_prompt, new_id
from connector_steps import ANSWER, Balance, cold, first_turn, has_free, has_less, nothing_held, read, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


@pytest.mark.parametrize("k", [64, 65, 95, 96, 97, 150, 10_000])
@pytest.mark.parametrize("reader", ["p", "plain"])
async def test_readback_of_any_length(p: Engine, plain: Engine, d: Engine, reader: str, k: int) -> None:
    p = p if reader == "p" else plain
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        k = min(k, len(history) - 1)
        prompt = history + fresh_prompt(40)
        expected = await cold(plain, prompt, ANSWER)
        result, grant = await read(p, d, lease, prompt, k)
        report = result["params"]["kvloop_report"]
        assert (report["local"], report["external"], report["computed"]) == (0, k, len(prompt) - k)
        assert report["transfer"]["bytes"] > 0
        assert report["transfer"]["descriptors"] > 0
        assert result["tokens"] == expected[:1]
        await d.control.end_read(lease, grant["read_id"])
        answer = await d.decode(prompt, ANSWER, result["params"], lease=new_id("lease"))
        assert answer["tokens"] == expected
        other = prompt[:-3] + fresh_prompt(9)
        assert (await p.generate(other, 8))["tokens"] == await cold(plain, other, 8)
        assert (await d.generate(other, 8))["tokens"] == await cold(plain, other, 8)


async def test_decode_report_has_no_handle(p: Engine, d: Engine, plain: Engine) -> None:
    async with Balance(p, d):
        prompt, lease = fresh_prompt(150), new_id("lease")
        filled = await p.prefill(prompt)
        assert 0 < filled["params"]["kvloop_report"]["held_s"] <= 30.0
        result = await d.decode(prompt, ANSWER, filled["params"], lease=lease)
        assert result["tokens"] == await cold(plain, prompt, ANSWER)
        assert set(result["params"]) == {"kvloop_report"}
        report = result["params"]["kvloop_report"]
        assert (report["local"], report["external"], report["computed"]) == (0, 150, 0)
        assert report["hold"]["num_tokens"] == 150 + ANSWER - 1
        assert report["hold"]["num_blocks"] == -(-(150 + ANSWER - 1) // BLOCK)
        await until(lambda: nothing_held(p))


async def test_one_lease_read_twice_and_five_times_at_once(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, plain, d):
        lease, history, _ = await first_turn(d)

        async def one(reader: Engine) -> None:
            prompt = history + fresh_prompt(30)
            result, grant = await read(reader, d, lease, prompt, len(history) - 1)
            await d.control.end_read(lease, grant["read_id"])
            report = result["params"]["kvloop_report"]
            assert report["local"] + report["external"] >= len(history) - 1 - BLOCK
            assert result["tokens"] == await cold(plain, prompt, 1)

        await one(plain)
        await one(plain)
        await asyncio.gather(*(one(reader) for reader in (p, plain, p, plain, plain)))
        (hold,) = await d.control.list()
        assert (hold["lease_id"], hold["pins"]) == (lease, 0)


async def test_below_the_threshold_nothing_is_read(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt = history + fresh_prompt(30)
        result, grant = await read(p, d, lease, prompt, 63)
        report = result["params"]["kvloop_report"]
        assert (report["external"], report["transfer"], report["refused"]) == (0, None, None)
        assert result["tokens"] == await cold(plain, prompt, 1)
        await d.control.end_read(lease, grant["read_id"])
        again, grant = await read(p, d, lease, prompt, len(history) - 1)
        assert again["params"]["kvloop_report"]["external"] == 0
        assert again["params"]["kvloop_report"]["local"] >= len(history) - BLOCK
        await d.control.end_read(lease, grant["read_id"])
        assert [hold["lease_id"] for hold in await d.control.list()] == [lease]


async def test_a_part_is_local_and_the_rest_is_read(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        prompt, lease = fresh_prompt(150), new_id("lease")
        filled = await p.prefill(prompt)
        result = await d.decode(prompt, 80, filled["params"], lease=lease)
        history = prompt + result["tokens"]
        following = history + fresh_prompt(30)
        read_back, grant = await read(p, d, lease, following, len(history) - 1)
        await d.control.end_read(lease, grant["read_id"])
        report = read_back["params"]["kvloop_report"]
        assert (report["local"], report["external"]) == (128, len(history) - 1 - 128)
        assert read_back["tokens"] == await cold(plain, following, 1)


async def test_a_decoder_that_needs_nothing_tells_the_prefill_engine(p: Engine, d: Engine) -> None:
    prompt = fresh_prompt(4 * BLOCK + 1)
    async with Balance(p, d):
        first = await p.prefill(prompt)
        answer = await d.decode(prompt, 4, first["params"])
        second = await p.prefill(prompt[:-1] + fresh_prompt(1))
        report = (await d.decode(prompt[:-1] + fresh_prompt(1), 4, second["params"]))["finish"]
        assert (answer["finish"], report) == ("length", "error")
        third = await p.prefill(prompt[:129])
        held = {hold["lease_id"] for hold in await p.control.list()}
        short = await d.decode(prompt, 4, third["params"])
        assert short["tokens"] == answer["tokens"]
        assert len(held) >= 1
        await until(lambda: fewer_held(p, len(held)))


async def fewer_held(engine: Engine, count: int) -> bool:
    return len(await engine.control.list()) < count


async def test_an_aborted_read_is_reported_and_not_kept(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt, turn_id = history + fresh_prompt(30), new_id("prefill")
        grant = await d.control.begin_read(lease, 160, 20.0)
        free = await p.free()
        await p.control.stall("end")
        reading = asyncio.ensure_future(
            p.prefill(prompt, grant["params"], turn_id=turn_id, request_id=turn_id)
        )
        await until(lambda: has_less(p, free))
        assert await p.control.report(turn_id, 0.0) is None
        await p.call("abort", request_id=turn_id)
        # From the report on D may let go of the blocks, and write others into them.
        assert await p.control.report(turn_id, 20.0) is not None
        await d.control.end_read(lease, grant["read_id"])
        await d.control.release(lease)
        await p.control.stall(None)
        assert (await reading)["finish"] == "abort"
        await until(lambda: has_free(p, free))
        again = await p.generate(prompt, 8)
        assert again["tokens"] == await cold(plain, prompt, 8)
        assert again["cached"] == 0
