"""Holds on real engines: how they come, how they go, and how they make room."""

import asyncio

import pytest
from connector_harness import Engine, fresh_prompt, new_id
from connector_steps import ANSWER, Balance, cold, first_turn, has_free, read, until

from kvloop.connector.control import ControlError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


@pytest.mark.parametrize("ending", ["eos", "stop token", "stop string", "repetition", "length", "one token"])
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
        elif ending == "repetition":
            expected, finish = [7] * 4, "repetition"
            more = {"logit_bias": {"7": 1e6}, "repetition": {"max_pattern_size": 1, "min_count": 4}}
        elif ending == "one token":
            expected = answer[:1]
        result = await d.decode(prompt, len(expected) if not more else ANSWER, lease=lease, **more)
        assert result["finish"] == finish
        if ending in {"stop token", "repetition", "length", "one token"}:
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
            assert report["local"] == len(history) - 1
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


async def test_prefill_blocks_are_released_on_request_and_at_the_deadline(p: Engine) -> None:
    before, turn_id = await p.free(), new_id("prefill")
    await p.prefill(fresh_prompt(100), turn_id=turn_id)
    assert await p.free() == before - 4
    assert await p.control.release(turn_id)
    assert await p.free() == before
    await p.prefill(fresh_prompt(100), ttl_s=0.2)
    await until(lambda: has_free(p, before))


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
        before = await d.call("preemptions")
        results = await asyncio.gather(*(d.decode(prompt, 500) for prompt in prompts))
        assert await d.call("preemptions") == before
        for prompt, result in zip(prompts, results, strict=True):
            assert result["tokens"] == await cold(plain, prompt, 500)


async def test_revoking_all_lets_the_prefix_cache_be_reset(d: Engine) -> None:
    await first_turn(d)
    assert not await d.call("reset")
    assert await d.control.revoke_all() == 1
    await d.control.pool()
    assert await d.call("reset")
