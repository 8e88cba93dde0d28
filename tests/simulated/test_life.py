"""Cancelling, holding, ending, dying."""

import asyncio

import pytest
from sim_rig import Rig, free_blocks, greedy, prefill, say, some_ids, terms

from kvloop.engine.factory import create_engine
from kvloop.engine.port import DecodeJob, HoldEnded, HoldTerms
from kvloop.engine.settings import EngineSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure

PROMPT = some_ids(30)


async def cancel_after(engine: SimulatedEngine, count: int, hold: HoldTerms) -> list[int]:
    """Take so many tokens, then go away."""
    ids: list[int] = []
    stream = engine.decode(DecodeJob("cancelled", tokens.pack(PROMPT), greedy(100), hold=hold))
    async for delta in stream:
        ids += delta.token_ids
        if len(ids) >= count:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return ids


async def test_a_cancelled_turn_is_held_when_asked_for(rig: Rig) -> None:
    engine = await rig.engine()
    ids = await cancel_after(engine, 10, terms("a", on_cancel=True))
    hold = await engine.settle("a")
    assert hold is not None
    assert hold.num_tokens >= len(PROMPT) + len(ids) - 1
    said = await say(engine, PROMPT + ids)
    assert said.done.sources.local == (len(PROMPT) + len(ids) - 1) // 4 * 4
    assert said.ids == await rig.cold(PROMPT + ids)


async def test_a_cancelled_turn_is_dropped_when_not(rig: Rig) -> None:
    engine = await rig.engine()
    await cancel_after(engine, 10, terms("a"))
    assert await engine.settle("a") is None
    assert await free_blocks(engine) == 256


async def test_settle_waits_for_a_turn_that_still_runs(rig: Rig) -> None:
    engine = await rig.engine()
    turn = asyncio.ensure_future(say(engine, PROMPT, hold=terms("a")))
    await asyncio.sleep(0)
    settled = await engine.settle("a")
    assert settled == (await turn).done.hold


async def test_a_cancelled_prefill_leaves_nothing(rig: Rig) -> None:
    p = await rig.engine("prefill", preset="qwen3-32b-h200")
    task = asyncio.ensure_future(prefill(p, PROMPT, request_id="p"))
    await rig.clock.advance(0.001)
    assert await free_blocks(p) < 256
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await free_blocks(p) == 256
    assert not await p.release_prefill("p")


async def test_a_cancelled_read_leaves_nothing(rig: Rig) -> None:
    p, d = await rig.engine("prefill"), await rig.engine("decode")
    said = await say(d, PROMPT, hold=terms("a"))
    p.faults.network_delay_s = 1.0
    grant = await d.begin_read("a", 30, 20.0)
    task = asyncio.ensure_future(prefill(p, PROMPT + said.ids, grant))
    await rig.clock.advance(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await free_blocks(p) == 256
    (hold,) = await d.holds()
    assert hold.pins == 1
    await d.end_read("a", grant.read_id)


async def test_an_unread_prefill_is_released_or_lapses(rig: Rig) -> None:
    p = await rig.engine("prefill")
    await prefill(p, PROMPT, request_id="one")
    assert await p.release_prefill("one")
    assert not await p.release_prefill("one")
    await prefill(p, PROMPT, request_id="two")
    await rig.clock.advance(29.9)
    assert await free_blocks(p) < 256
    await rig.clock.advance(0.2)
    assert await free_blocks(p) == 256


async def test_holds_end_and_say_so(rig: Rig) -> None:
    engine = await rig.engine()
    for lease_id, ttl_s in (("long", 60.0), ("short", 10.0), ("asked", 20.0), ("evicted", 90.0)):
        await say(engine, some_ids(20, seed=len(lease_id)), hold=terms(lease_id, ttl_s))
    assert [hold.lease_id for hold in await engine.holds()] == ["short", "asked", "long", "evicted"]
    events = engine.hold_events()
    assert await engine.release("asked")
    assert engine.faults.evict("evicted")
    await rig.clock.advance(10.0)
    assert await engine.extend("long", 100.0)
    assert not await engine.extend("short", 100.0)
    await rig.clock.advance(60.0)
    assert [hold.lease_id for hold in await engine.holds()] == ["long"]
    await rig.clock.advance(100.0)
    assert [await anext(events) for _ in range(3)] == [
        HoldEnded("evicted", "evicted"),
        HoldEnded("short", "expired"),
        HoldEnded("long", "expired"),
    ]
    assert await free_blocks(engine) == 256
    engine.faults.drop_hold_events = 1
    await say(engine, PROMPT, hold=terms("silent", 1.0))
    await say(engine, PROMPT, hold=terms("told", 2.0))
    await rig.clock.advance(3.0)
    assert await anext(events) == HoldEnded("told", "expired")


async def test_a_jump_of_the_clock_ends_holds(rig: Rig) -> None:
    engine = await rig.engine()
    await say(engine, PROMPT, hold=terms("a", 60.0))
    engine.faults.jump_clock(61.0)
    assert await anext(engine.hold_events()) == HoldEnded("a", "expired")


async def test_release_while_pinned(rig: Rig) -> None:
    p, d = await rig.engine("prefill"), await rig.engine("decode")
    said = await say(d, PROMPT, hold=terms("a"))
    grant = await d.begin_read("a", 30, 20.0)
    assert await d.release("a")
    (hold,) = await d.holds()
    assert hold.doomed
    for refused in (d.begin_read("a", 30, 20.0), d.begin_read("unknown", 30, 20.0)):
        with pytest.raises(Failure) as caught:
            await refused
        assert caught.value.reason_name == "LEASE_NOT_FOUND"
    outcome = await prefill(p, PROMPT + said.ids, grant)
    assert outcome.sources.external == 30
    assert await free_blocks(d) == 256


async def test_killed_engines_fail_everything_and_come_back_empty(rig: Rig) -> None:
    engine = await rig.engine(preset="qwen3-32b-h200")
    await rig.run(say(engine, PROMPT, hold=terms("a")))
    events = engine.hold_events()
    turn = asyncio.ensure_future(say(engine, PROMPT, sampling=greedy(50)))
    await rig.clock.advance(0.2)
    epoch = engine.facts.epoch
    engine.faults.kill()
    with pytest.raises(Failure) as caught:
        await turn
    assert caught.value.reason_name == "WORKER_FAILED"
    for call in (
        engine.check_health(),
        engine.pool(),
        engine.holds(),
        engine.settle("a"),
        prefill(engine, PROMPT),
    ):
        with pytest.raises(Failure) as caught:
            await call
        assert caught.value.reason_name == "WORKER_FAILED"
    assert [event async for event in events] == []
    await engine.start()
    assert engine.facts.epoch != epoch
    assert await free_blocks(engine) == 256
    assert (await rig.run(say(engine, PROMPT))).done.sources.local == 0


async def test_a_stream_that_died_goes_on_elsewhere(rig: Rig) -> None:
    first, second = [await rig.engine(preset="qwen3-32b-h200") for _ in range(2)]
    ids: list[int] = []

    async def stream() -> None:
        async for delta in first.decode(DecodeJob("s", tokens.pack(PROMPT), greedy(30))):
            ids.extend(delta.token_ids)

    task = asyncio.ensure_future(stream())
    await rig.clock.advance(0.3)
    first.faults.kill()
    with pytest.raises(Failure):
        await task
    assert 0 < len(ids) < 30
    rest = await rig.run(say(second, PROMPT + ids, sampling=greedy(30 - len(ids))))
    assert ids + rest.ids == await rig.cold(PROMPT, sampling=greedy(30))


async def test_paused_engines_answer_later(rig: Rig) -> None:
    engine = await rig.engine()
    engine.faults.pause()
    health = asyncio.ensure_future(engine.check_health())
    turn = asyncio.ensure_future(say(engine, PROMPT))
    await rig.clock.advance(5.0)
    assert not health.done()
    assert not turn.done()
    engine.faults.resume()
    await health
    assert (await turn).ids == await rig.cold(PROMPT)


async def test_ordered_failures(rig: Rig) -> None:
    engine = await rig.engine()
    engine.faults.fail_prefills = 1
    engine.faults.fail_decodes = 1
    for call in (prefill(engine, PROMPT), say(engine, PROMPT)):
        with pytest.raises(Failure) as caught:
            await call
        assert caught.value.reason_name == "WORKER_FAILED"
    await prefill(engine, PROMPT, request_id="p")
    await say(engine, PROMPT)
    await engine.release_prefill("p")


async def test_counters_add_up(rig: Rig) -> None:
    p, d = await rig.engine("prefill"), await rig.engine("decode")
    said = await say(d, PROMPT, hold=terms("a"))
    prompt = PROMPT + said.ids
    await prefill(p, prompt, await d.begin_read("a", 37, 20.0))
    counters = await p.counters()
    assert (counters.local_tokens, counters.external_tokens, counters.computed_tokens) == (0, 37, 1)
    assert (counters.transfers, counters.transfer_descriptors) == (1, 10)
    assert counters.transfer_bytes == 10 * 4 * 4096
    assert (await d.counters()).generated_tokens == 8


async def test_stop_is_idempotent_and_ends_the_events(rig: Rig) -> None:
    engine = await rig.engine()
    events = engine.hold_events()
    await engine.stop()
    await engine.stop()
    assert [event async for event in events] == []


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        SimulatedSettings(num_blocks=10)
    with pytest.raises(ValueError, match="preset"):
        SimulatedSettings(preset="unknown")


async def test_made_from_a_workers_settings() -> None:
    settings = EngineSettings.model_validate(
        {
            "engine": "simulated",
            "model": "qwen3-32b-h200",
            "kv_recompute_threshold": 7,
            "extra_engine_args": {"time_scale": 0.5, "num_blocks": 4_000},
        }
    )
    engine = create_engine(settings, "decode")
    assert isinstance(engine, SimulatedEngine)
    assert engine.settings.preset == "qwen3-32b-h200"
    assert (engine.settings.num_blocks, engine.settings.time_scale) == (4_000, 0.5)
    assert engine.settings.kv_recompute_threshold == 7
    await engine.start()
    assert engine.facts.model_name == "qwen3-32b-h200"
    await engine.stop()
    with pytest.raises(ValueError, match="means nothing"):
        SimulatedSettings.from_engine_settings(
            EngineSettings.model_validate({"extra_engine_args": {"swap_space": 1}})
        )


async def test_a_hundred_engines_of_one_process_read_from_each_other(rig: Rig) -> None:
    ps = [await rig.engine("prefill") for _ in range(50)]
    ds = [await rig.engine("decode") for _ in range(50)]

    async def conversation(at: int) -> tuple[list[int], list[int]]:
        history = some_ids(40, seed=at)
        said = await say(ds[at], history, hold=terms("a"))
        prompt = history + said.ids
        outcome = await prefill(ps[at], prompt, await ds[at].begin_read("a", 47, 20.0))
        assert outcome.sources.external == 47
        return prompt, (await say(ds[(at + 1) % 50], prompt, handle_json=outcome.handle_json)).ids

    for prompt, ids in await asyncio.gather(*(conversation(at) for at in range(50))):
        assert ids == await rig.cold(prompt)
