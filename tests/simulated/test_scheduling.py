"""Queues, chunks, preemption, and what time it takes."""

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest
from sim_rig import Rig, free_blocks, greedy, prefill, say, some_ids, terms

from kvloop.engine.port import DecodeJob
from kvloop.engine.simulated.cost import PRESETS
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.runtime import tokens

QWEN = PRESETS["qwen3-32b-h200"]
BIG: dict[str, Any] = {
    "preset": "qwen3-32b-h200",
    "max_model_len": 32_768,
    "block_size": 16,
    "num_blocks": 8_192,
}
BIG["max_num_batched_tokens"] = 8_192


async def timed(rig: Rig, awaitable: Awaitable[object]) -> float:
    start = rig.clock.monotonic()
    await rig.run(awaitable)
    return rig.clock.monotonic() - start


@pytest.mark.parametrize(
    ("length", "measured"), [(2_048, 0.238), (8_192, 0.908), (16_384, 2.057), (24_576, 3.404)]
)
async def test_recomputing_takes_what_it_took(rig: Rig, length: int, measured: float) -> None:
    p = await rig.engine("prefill", **{**BIG, "max_num_batched_tokens": 32_768})
    prefill_s = await timed(rig, prefill(p, some_ids(length)))
    assert prefill_s + QWEN.decode(1) + QWEN.first_step_s == pytest.approx(measured, rel=0.1)


async def test_reading_back_is_faster_and_direct_fastest(rig: Rig) -> None:
    p = await rig.engine("prefill", **BIG, enable_prefix_caching=False)
    d = await rig.engine("decode", **BIG)
    history = some_ids(24_576)
    await rig.run(say(d, history, hold=terms("a")))
    prompt = history + some_ids(160, seed=1)
    recompute = await timed(rig, prefill(p, prompt))
    readback = await timed(rig, prefill(p, prompt, await d.begin_read("a", 24_576, 20.0)))
    direct = await timed(rig, say(d, prompt, sampling=greedy(1)))
    assert recompute > 20 * readback
    assert readback > direct
    assert direct == pytest.approx(0.05, rel=0.1)


async def test_time_scale_and_per_layer_descriptors(rig: Rig) -> None:
    whole = await timed(rig, prefill(await rig.engine("prefill", **BIG), some_ids(1_000)))
    scaled = await timed(rig, prefill(await rig.engine("prefill", **BIG, time_scale=0.1), some_ids(1_000)))
    assert scaled == pytest.approx(whole / 10)
    cross, layered = PRESETS["qwen3-32b-h200"], PRESETS["qwen3-32b-h200-per-layer"]
    size = 24_576 * cross.bytes_per_token
    blocks = 24_576 // 16
    assert layered.read(size, blocks * layered.descriptors_per_block) == pytest.approx(0.366, rel=0.1)
    assert cross.read(size, blocks) == pytest.approx(0.059, rel=0.1)


async def arrivals(rig: Rig, engine: SimulatedEngine, ids: list[int], count: int) -> list[float]:
    """Decode; returns when each delta came."""
    job = DecodeJob("stream", tokens.pack(ids), greedy(count))
    return [rig.clock.monotonic() async for _ in engine.decode(job)]


async def test_chunks_of_a_prompt_slow_running_streams(rig: Rig) -> None:
    d = await rig.engine("decode", **{**BIG, "max_num_batched_tokens": 2_048})
    alone = await rig.run(arrivals(rig, d, some_ids(32), 20))
    steps = [later - sooner for sooner, later in itertools.pairwise(alone)]
    assert max(steps) == pytest.approx(QWEN.decode(1))
    crowded, _ = await rig.run(
        asyncio.gather(
            arrivals(rig, d, some_ids(32, seed=1), 20), say(d, some_ids(8_000), sampling=greedy(1))
        )
    )
    steps = [later - sooner for sooner, later in itertools.pairwise(crowded)]
    slow = [step for step in steps if step > 2 * QWEN.decode(1)]
    assert len(slow) == 3, "four chunks, of which the first runs beside the stream's own prompt"


async def test_a_long_prompt_is_computed_in_chunks(rig: Rig) -> None:
    engine = await rig.engine(max_num_batched_tokens=8, max_num_seqs=8)
    prompt = some_ids(50)
    said = await say(engine, prompt)
    assert said.ids == await rig.cold(prompt)
    assert said.done.sources.computed == 50


async def test_no_more_than_max_num_seqs_run_and_all_get_their_turn(rig: Rig) -> None:
    engine = await rig.engine(max_num_seqs=3)
    seen = 0

    async def one(seed: int) -> list[int]:
        nonlocal seen
        said = await say(engine, some_ids(20, seed=seed))
        seen = max(seen, len(engine.core.scheduler.running))
        return said.ids

    answers = await asyncio.gather(*(one(seed) for seed in range(10)))
    assert seen <= 3
    assert answers == [await rig.cold(some_ids(20, seed=seed)) for seed in range(10)]


async def test_out_of_blocks_the_last_is_preempted_and_says_the_same(rig: Rig) -> None:
    engine = await rig.engine(num_blocks=32, max_model_len=128)
    prompts = [some_ids(40, seed=seed) for seed in range(3)]
    said = await asyncio.gather(*(say(engine, prompt, sampling=greedy(40)) for prompt in prompts))
    assert (await engine.counters()).preemptions > 0
    for prompt, one in zip(prompts, said, strict=True):
        assert one.ids == await rig.cold(prompt, sampling=greedy(40))
        assert one.done.sources.computed == 40
    assert await free_blocks(engine) == 32


async def test_holds_go_before_anybody_is_preempted(rig: Rig) -> None:
    engine = await rig.engine(num_blocks=64, max_model_len=256, hold_share=0.9)
    for seed in range(4):
        await say(engine, some_ids(48, seed=seed), hold=terms(str(seed)))
    assert (await engine.pool()).free_blocks < 10
    await asyncio.gather(*(say(engine, some_ids(60, seed=seed), sampling=greedy(20)) for seed in (10, 11)))
    assert (await engine.counters()).preemptions == 0
    assert len(await engine.holds()) < 4
    events = engine.hold_events()
    assert (await anext(events)).reason == "evicted"


async def test_a_pinned_hold_is_not_taken(rig: Rig) -> None:
    engine = await rig.engine(num_blocks=64, max_model_len=256, hold_share=0.9)
    await say(engine, some_ids(160), hold=terms("pinned"))
    await engine.begin_read("pinned", 160, 20.0)
    await asyncio.gather(*(say(engine, some_ids(60, seed=seed), sampling=greedy(20)) for seed in (10, 11)))
    (hold,) = await engine.holds()
    assert (hold.lease_id, hold.doomed) == ("pinned", False)


async def test_a_full_prefill_pool_waits_for_reads_or_deadlines(rig: Rig) -> None:
    p = await rig.engine("prefill", num_blocks=32, max_model_len=128)
    first = await prefill(p, some_ids(100))
    waiting = asyncio.ensure_future(prefill(p, some_ids(100, seed=1)))
    await rig.clock.advance(29.0)
    assert not waiting.done()
    await rig.clock.advance(1.5)
    assert (await waiting).sources.computed == 100
    assert first.held_s == 30.0
    waiting = asyncio.ensure_future(prefill(p, some_ids(100, seed=2), request_id="third"))
    await rig.clock.advance(1.0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not await p.release_prefill("third")
