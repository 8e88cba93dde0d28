"""Holds, reads and the guard on real engines. Answers are compared with those of a cold engine."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from connector_harness import BLOCK, Engine, fresh_prompt, new_id

from kvloop.connector.control import ControlError, Grant

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

ANSWER = 24


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - other processes have no event to wait for
        await asyncio.sleep(0.02)


async def cold(plain: Engine, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = (await plain.generate(prompt, count))["tokens"]
    return tokens


async def first_turn(d: Engine, length: int = 140, **more: Any) -> tuple[str, list[int], Any]:
    """Run a DIRECT turn on D, held: (lease, prompt + answer, result)."""
    lease, prompt = new_id("lease"), fresh_prompt(length)
    result = await d.decode(prompt, more.pop("max_tokens", ANSWER), lease=lease, **more)
    return lease, prompt + result["tokens"], result


async def refused(engine: Engine, turn_id: str) -> str | None:
    report = await engine.control.report(turn_id, 5.0)
    assert report is not None
    return report["refused"]


async def read(
    p: Engine, d: Engine, lease: str, prompt: list[int], k: int, pin_s: float = 20.0
) -> tuple[Any, Grant]:
    grant = await d.control.begin_read(lease, k, pin_s)
    return await p.prefill(prompt, grant["params"]), grant


class Balance:
    """Free blocks of engines, to be the same at the end."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines

    async def __aenter__(self) -> None:
        self.before = [await engine.free() for engine in self.engines]

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for engine in self.engines:
                for hold in await engine.control.list():
                    await engine.control.release(hold["lease_id"])
            assert [await engine.free() for engine in self.engines] == self.before


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


async def nothing_held(engine: Engine) -> bool:
    return not await engine.control.list()


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


@pytest.mark.parametrize("ending", ["eos", "stop token", "stop string", "length", "one token"])
async def test_every_ending_is_held_and_readable(p: Engine, plain: Engine, d: Engine, ending: str) -> None:
    async with Balance(p, d):
        lease, prompt = new_id("lease"), fresh_prompt(140)
        answer = await cold(plain, prompt, ANSWER)
        expected, finish, more = answer, "length", {}
        if ending == "eos":
            more = {"ignore_eos": False, "min_tokens": 6, "logit_bias": {"2": 1e6}}
            finish = "stop"
        elif ending == "stop token":
            expected = answer[: answer.index(answer[9]) + 1]
            more, finish = {"stop_token_ids": [answer[9]]}, "stop"
        elif ending == "stop string":
            expected = answer[: answer.index(answer[9]) + 1]
            more, finish = {"stop": [f"w{answer[9]} "]}, "stop"
        elif ending == "one token":
            expected = answer[:1]
        result = await d.decode(prompt, len(expected) if not more else ANSWER, lease=lease, **more)
        assert result["finish"] == finish
        if ending in {"stop token", "length", "one token"}:
            assert result["tokens"] == expected
        history = prompt + result["tokens"]
        hold = await d.control.hold(lease, 5.0)
        assert hold is not None
        assert hold["num_tokens"] >= len(history) - 1
        following = history + fresh_prompt(30)
        read_back, grant = await read(p, d, lease, following, len(history) - 1)
        await d.control.end_read(lease, grant["read_id"])
        assert read_back["params"]["kvloop_report"]["external"] == len(history) - 1
        assert read_back["tokens"] == await cold(plain, following, 1)
        assert (await p.generate(following[:-5], 8))["tokens"] == await cold(plain, following[:-5], 8)


@pytest.mark.parametrize(
    ("on_cancel", "stop", "announced", "held"),
    [
        (True, None, True, True),
        (True, None, False, True),
        (False, None, False, False),
        (False, ["never to be seen"], True, False),
        (False, ["never to be seen"], False, True),
    ],
)
async def test_cancelled_turns(
    p: Engine, plain: Engine, d: Engine, on_cancel: bool, stop: list[str] | None, announced: bool, held: bool
) -> None:
    async with Balance(p, d):
        lease, prompt = new_id("lease"), fresh_prompt(140)
        if announced:
            await d.control.cancel(lease)
        result = await d.decode(prompt, 1500, lease=lease, on_cancel=on_cancel, stop=stop, cancel_after=12)
        assert result["finish"] == "cancelled"
        hold = await d.control.hold(lease, 10.0)
        assert (hold is not None) == held
        report = await d.control.report(lease)
        assert report is not None
        assert (report["hold"] is not None) == held
        if hold is not None:
            history = prompt + result["tokens"]
            following = history + fresh_prompt(30)
            k = min(hold["num_tokens"], len(history) - 1)
            assert k >= len(prompt) + 10
            read_back, grant = await read(p, d, lease, following, k)
            await d.control.end_read(lease, grant["read_id"])
            assert read_back["params"]["kvloop_report"]["external"] == k
            assert read_back["tokens"] == await cold(plain, following, 1)


async def test_direct_turns_hit_locally_and_leak_nothing(p: Engine, plain: Engine, d: Engine) -> None:
    async with Balance(p, d):
        lease, history, _ = await first_turn(d)
        for _ in range(3):
            prompt, following = history + fresh_prompt(20), new_id("lease")
            grant = await d.control.begin_read(lease, len(history) - 1, 20.0)
            result = await d.decode(prompt, ANSWER, lease=following)
            await d.control.end_read(lease, grant["read_id"])
            await d.control.release(lease)
            assert result["tokens"] == await cold(plain, prompt, ANSWER)
            report = result["params"]["kvloop_report"]
            assert report["local"] == (len(history) - 1) // BLOCK * BLOCK
            assert report["external"] == 0
            lease, history = following, prompt + result["tokens"]
        prompt = history + fresh_prompt(20)
        result, grant = await read(p, d, lease, prompt, len(history) - 1)
        await d.control.end_read(lease, grant["read_id"])
        assert result["params"]["kvloop_report"]["external"] == len(history) - 1
        assert result["tokens"] == await cold(plain, prompt, 1)


async def test_a_turn_without_a_hold_keeps_nothing(d: Engine) -> None:
    before = await d.free()
    result = await d.decode(fresh_prompt(100), 4)
    assert result["params"]["kvloop_report"]["hold"] is None
    assert await d.free() == before


async def test_released_while_pinned(p: Engine, plain: Engine, d: Engine) -> None:
    before = await d.free()
    turn_id = new_id("prefill")
    lease, history, _ = await first_turn(d)
    grant = await d.control.begin_read(lease, len(history) - 1, 20.0)
    assert await d.control.release(lease)
    with pytest.raises(ControlError, match="not_found"):
        await d.control.begin_read(lease, 64, 20.0)
    await d.generate(fresh_prompt(1200), 1)
    prompt = history + fresh_prompt(30)
    result = await p.prefill(prompt, grant["params"], turn_id=turn_id)
    assert result["params"]["kvloop_report"]["external"] == len(history) - 1
    assert result["tokens"] == await cold(plain, prompt, 1)
    await d.control.end_read(lease, grant["read_id"])
    assert await d.free() == before
    await p.control.release(turn_id)


async def test_expiry_on_an_idle_engine(d: Engine) -> None:
    before = await d.free()
    events = d.control.subscribe()
    first = asyncio.ensure_future(anext(events))
    lease, _, _ = await first_turn(d, ttl_s=0.3)
    assert await first == {"lease_id": lease, "reason": "expired"}
    assert await d.free() == before
    await events.aclose()


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


async def has_free(engine: Engine, free: int) -> bool:
    return await engine.free() == free


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


async def has_less(engine: Engine, free: int) -> bool:
    return await engine.free() < free


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


async def test_prefill_blocks_are_released_on_request_and_at_the_deadline(p: Engine) -> None:
    before, turn_id = await p.free(), new_id("prefill")
    await p.prefill(fresh_prompt(100), turn_id=turn_id)
    assert await p.free() == before - 4
    assert await p.control.release(turn_id)
    assert await p.free() == before
    await p.prefill(fresh_prompt(100), ttl_s=0.2)
    await until(lambda: has_free(p, before))


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


async def test_holds_give_way_before_anybody_waits(plain: Engine, d: Engine) -> None:
    async with Balance(d):
        events = d.control.subscribe()
        first = asyncio.ensure_future(anext(events))
        leases = [(await first_turn(d, 200))[0] for _ in range(15)]
        pool = await d.control.pool()
        assert pool["held"] <= 0.9 * pool["total"]
        assert (await first)["lease_id"] == leases[0]
        prompt = fresh_prompt(1500)
        result = await d.decode(prompt, 40)
        assert result["tokens"] == await cold(plain, prompt, 40)
        assert (await d.control.pool())["leases"] < len(leases) - 1
        assert leases[-1] in {hold["lease_id"] for hold in await d.control.list()}
        await events.aclose()


async def test_running_requests_grow_into_held_blocks(plain: Engine, d: Engine) -> None:
    async with Balance(d):
        for _ in range(12):
            await first_turn(d, 200)
        prompts = [fresh_prompt(60) for _ in range(4)]
        results = await asyncio.gather(*(d.decode(prompt, 500) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result["tokens"] == await cold(plain, prompt, 500)


async def test_revoking_all_lets_the_prefix_cache_be_reset(d: Engine) -> None:
    await first_turn(d)
    assert not await d.call("reset")
    assert await d.control.revoke_all() == 1
    await d.control.pool()
    assert await d.call("reset")


async def test_an_engine_core_dies_with_its_front_end(d: Engine) -> None:
    family = psutil.Process(d.process.process.pid).children(recursive=True)
    assert d.process.core_pid in {process.pid for process in family}
    d.process.process.kill()
    await until(lambda: all_gone(family))


async def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
