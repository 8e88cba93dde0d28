"""The guard on real engines: what must not be read is refused, and without the guard answers are wrong."""

import asyncio
import os
import signal
from typing import Any

import pytest
from connector_harness import Engine, fresh_prompt, new_id
from connector_steps import (
    ANSWER,
    Balance,
    cold,
    first_turn,
    has_free,
    has_less,
    nothing_held,
    read,
    refused,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


@pytest.mark.parametrize(
    "case", ["short", "long", "range", "absurd", "twice", "null", "no expiry", "no seal", "text"]
)
async def test_bad_counts_are_refused(p: Engine, plain: Engine, d: Engine, case: str) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt = history + fresh_prompt(30)
        grant = await d.control.begin_read(lease, len(history) - 1, 20.0)
        params = grant["params"]
        (blocks,) = params["remote_block_ids"]
        wrong: dict[str, Any] = {
            "short": {"remote_block_ids": [blocks[:-2]]},
            "long": {"remote_block_ids": [[*blocks, max(blocks) + 1]]},
            "range": {"remote_block_ids": [[*blocks[:-1], 4096]]},
            "absurd": {"remote_num_tokens": 10**9},
            "twice": {"remote_block_ids": [[blocks[0], *blocks[:-1]]]},
            "null": {"remote_block_ids": [[0, *blocks[1:]]]},
            "no expiry": {"remote_blocks_expiry_time": None},
            "no seal": {"kvloop_seal": None},
            "text": {"remote_block_ids": "abc"},
        }[case]
        turn_id = new_id("prefill")
        result = await p.prefill(prompt, params | wrong, turn_id=turn_id)
        assert result["finish"] == "error"
        assert await refused(p, turn_id) == (
            "fields" if case in {"no expiry", "no seal", "text"} else "counts"
        )
        assert (await p.generate(prompt, 8))["tokens"] == await cold(plain, prompt, 8)
        await d.control.end_read(lease, grant["read_id"])


@pytest.mark.parametrize("position", [5, 70, 150])
async def test_another_history_is_refused(p: Engine, plain: Engine, d: Engine, position: int) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        history[position] = history[position] - 1 if history[position] > 3 else 4
        prompt, turn_id = history + fresh_prompt(30), new_id("prefill")
        grant = await d.control.begin_read(lease, 160, 20.0)
        result = await p.prefill(prompt, grant["params"], turn_id=turn_id)
        assert result["finish"] == "error"
        assert await refused(p, turn_id) == "hash"
        await d.control.end_read(lease, grant["read_id"])
        assert (await p.generate(prompt, 8))["tokens"] == await cold(plain, prompt, 8)


async def test_without_the_hash_guard_answers_are_wrong(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        history[:120] = fresh_prompt(120)  # one token may be too few to change an answer
        prompt = history + fresh_prompt(30)
        await p.control.guard("hash", False)
        try:
            result, grant = await read(p, d, lease, prompt, 160)
        finally:
            await p.control.guard("hash", True)
        await d.control.end_read(lease, grant["read_id"])
        assert result["finish"] == "length"
        wrong = (await p.generate(prompt, ANSWER))["tokens"]
        assert wrong != await cold(plain, prompt, ANSWER)
        await p.call("reset")


async def test_other_salts_do_not_share(p: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d, salt="one")
        grant = await d.control.begin_read(lease, 160, 20.0)
        same = await p.prefill(history + fresh_prompt(30), grant["params"], salt="one")
        other = await p.prefill(history + fresh_prompt(30), grant["params"], salt="two")
        assert (same["finish"], other["finish"]) == ("length", "error")
        await d.control.end_read(lease, grant["read_id"])


async def test_a_read_after_its_pin_is_refused(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt, turn_id = history + fresh_prompt(30), new_id("prefill")
        grant = await d.control.begin_read(lease, 160, 0.2)
        await d.control.release(lease)
        await until(lambda: nothing_held(d))
        await d.generate(fresh_prompt(1800), 1)
        result = await p.prefill(prompt, grant["params"], turn_id=turn_id)
        assert result["finish"] == "error"
        assert await refused(p, turn_id) == "deadline"
        assert (await p.generate(prompt, 8))["tokens"] == await cold(plain, prompt, 8)


async def test_without_the_deadline_guard_answers_are_wrong(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt = history + fresh_prompt(30)
        grant = await d.control.begin_read(lease, 160, 0.2)
        await d.control.release(lease)
        await until(lambda: nothing_held(d))
        for _ in range(3):
            await d.generate(fresh_prompt(1800), 1)
        await p.control.guard("deadline", False)
        reading = asyncio.ensure_future(p.prefill(prompt, grant["params"]))
        while not reading.done():
            await d.generate(fresh_prompt(40), 2)  # D steps, so that the read gets through
        await p.control.guard("deadline", True)
        assert (await reading)["finish"] == "length"
        assert (await p.generate(prompt, 8))["tokens"] != await cold(plain, prompt, 8)
        await p.call("reset")


async def test_an_unresponsive_peer_fails_the_read_in_time(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt, turn_id = history + fresh_prompt(30), new_id("prefill")
        expected = await cold(plain, prompt, 8)
        grant = await d.control.begin_read(lease, 160, 2.0)
        free = await p.free()
        os.kill(d.process.core_pid, signal.SIGSTOP)
        try:
            result = await p.prefill(prompt, grant["params"], turn_id=turn_id)
            assert result["finish"] == "error"
            assert await refused(p, turn_id) == "deadline"
            assert await p.free() < free  # the transfer may still write into them
            assert (await p.generate(prompt, 8))["tokens"] == expected
        finally:
            os.kill(d.process.core_pid, signal.SIGCONT)
        await until(lambda: has_free(p, free))
        assert (await p.generate(prompt, 8))["tokens"] == expected


async def test_a_reader_stopped_past_its_pin_is_refused(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        prompt, turn_id = history + fresh_prompt(30), new_id("prefill")
        expected = await cold(plain, prompt, 8)
        grant = await d.control.begin_read(lease, 160, 3.0)
        free, reader, decoder = await p.free(), p.process.core_pid, d.process.core_pid
        os.kill(decoder, signal.SIGSTOP)
        reading = asyncio.ensure_future(p.prefill(prompt, grant["params"], turn_id=turn_id))
        await until(lambda: has_less(p, free))
        os.kill(reader, signal.SIGSTOP)
        os.kill(decoder, signal.SIGCONT)
        try:
            await d.control.release(lease)
            await until(lambda: nothing_held(d))
            await d.generate(fresh_prompt(1800), 1)
        finally:
            os.kill(reader, signal.SIGCONT)
        assert (await reading)["finish"] == "error"
        assert await refused(p, turn_id) == "deadline"
        assert (await p.generate(prompt, 8))["tokens"] == expected
        await until(lambda: has_free(p, free))


async def test_a_decoder_refuses_a_prefill_that_has_run_out(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        prompt, lease = fresh_prompt(150), new_id("lease")
        filled = await p.prefill(prompt, ttl_s=0.4)
        await until(lambda: nothing_held(p))
        for _ in range(8):
            await p.generate(fresh_prompt(1900), 1)
        result = await d.decode(prompt, ANSWER, filled["params"], lease=lease)
        assert result["finish"] == "error"
        assert await refused(d, lease) == "deadline"
        assert await d.control.hold(lease) is None
        assert (await d.decode(prompt, ANSWER))["tokens"] == await cold(plain, prompt, ANSWER)


async def test_a_decoder_refuses_a_prefill_of_another_prompt(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        prompt, lease = fresh_prompt(150), new_id("lease")
        filled = await p.prefill(prompt)
        prompt[7] = prompt[7] - 1 if prompt[7] > 3 else 4
        assert (await d.decode(prompt, ANSWER, filled["params"], lease=lease))["finish"] == "error"
        assert await refused(d, lease) == "hash"
        assert (await d.decode(prompt, ANSWER))["tokens"] == await cold(plain, prompt, ANSWER)
