"""Reads between engines, and the guard around them."""

import asyncio
import json
from typing import Any

import pytest
from sim_rig import Rig, free_blocks, greedy, prefill, say, some_ids, terms

from kvloop.engine.port import ReadGrant
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.fabric import Fabric
from kvloop.runtime.errors import Failure

HISTORY = some_ids(40)
MORE = some_ids(10, seed=1)


async def pair(rig: Rig, **settings: Any) -> tuple[SimulatedEngine, SimulatedEngine]:
    return await rig.engine("prefill", **settings), await rig.engine("decode", **settings)


async def first_turn(d: SimulatedEngine, lease: str = "a", ttl_s: float = 480.0) -> list[int]:
    """Let D hold a turn; returns the ids whose KV is held."""
    said = await say(d, HISTORY, hold=terms(lease, ttl_s))
    assert said.done.hold is not None
    return (HISTORY + said.ids)[: said.done.hold.num_tokens]


async def refusal(awaitable: object) -> str:
    with pytest.raises(Failure) as caught:
        await awaitable  # type: ignore[misc]
    assert caught.value.reason_name == "KV_READ_FAILED"
    return caught.value.metadata["refused"]


async def test_a_handoff_is_read_whole_and_lets_the_prefill_go(rig: Rig) -> None:
    p, d = await pair(rig)
    outcome = await prefill(p, HISTORY)
    assert await free_blocks(p) == 256 - 10
    said = await say(d, HISTORY, handle_json=outcome.handle_json)
    assert said.ids == await rig.cold(HISTORY)
    assert (said.done.sources.external, said.done.sources.computed) == (39, 1)
    assert said.done.handoff is not None
    assert said.done.handoff.descriptors == 10
    assert await free_blocks(p) == 256


@pytest.mark.parametrize("cut", [47, 46, 45, 44, 43, 5, 4])
async def test_any_length_of_a_hold_is_read(rig: Rig, cut: int) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    prompt = held[:cut] + MORE
    outcome = await prefill(p, prompt, await d.begin_read("a", cut, 20.0))
    assert (outcome.sources.external, outcome.sources.computed) == (cut, len(MORE))
    assert outcome.readback is not None
    assert outcome.readback.bytes == -(-cut // 4) * 4 * 4096
    said = await say(d, prompt, handle_json=outcome.handle_json)
    cold = await rig.cold(prompt)
    assert said.ids == cold
    assert (await say(p, prompt)).ids == cold


async def test_reads_do_not_consume_and_forks_read_at_once(rig: Rig) -> None:
    p, d = await pair(rig, enable_prefix_caching=False)
    held = await first_turn(d)
    for _ in range(2):
        prompts = [held + some_ids(6, seed=seed) for seed in range(5)]
        grants = [await d.begin_read("a", len(held), 20.0) for _ in prompts]
        outcomes = await asyncio.gather(*(prefill(p, *pair) for pair in zip(prompts, grants, strict=True)))
        assert [outcome.sources.external for outcome in outcomes] == [len(held)] * 5
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert (await say(d, prompt, handle_json=outcome.handle_json)).ids == await rig.cold(prompt)
    (hold,) = await d.holds()
    assert (hold.pins, hold.doomed) == (0, False)


async def test_what_is_local_is_not_read_and_little_is_not_either(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    await prefill(p, held + MORE)
    outcome = await prefill(p, held + some_ids(10, seed=2), await d.begin_read("a", 47, 20.0))
    assert outcome.sources.local == 44
    assert outcome.readback is None
    outcome = await prefill(p, held[:30] + some_ids(20, seed=3), await d.begin_read("a", 30, 20.0))
    assert (outcome.sources.local, outcome.sources.external) == (28, 0)
    other = await rig.engine("prefill")
    outcome = await prefill(other, held[:3] + MORE, await d.begin_read("a", 3, 20.0))
    assert (outcome.sources.external, outcome.readback) == (0, None)


async def test_local_blocks_first_the_rest_is_read(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    await prefill(p, held[:22])
    outcome = await prefill(p, held + MORE, await d.begin_read("a", 47, 20.0))
    assert (outcome.sources.local, outcome.sources.external) == (20, 27)
    said = await say(d, held + MORE, handle_json=outcome.handle_json)
    assert said.ids == await rig.cold(held + MORE)


async def test_direct_hits_what_is_held(rig: Rig) -> None:
    d = await rig.engine()
    held = await first_turn(d)
    said = await say(d, held + MORE, hold=terms("b"))
    assert (said.done.sources.local, said.done.sources.external) == (44, 0)
    assert said.ids == await rig.cold(held + MORE)
    assert (await d.pool()).held_blocks == 12 + 5


async def test_caches_of_other_salts_and_adapters_are_not_seen(rig: Rig) -> None:
    d = await rig.engine(adapters=("lora",))
    await say(d, HISTORY, cache_salt="one")
    assert (await say(d, HISTORY, cache_salt="two")).done.sources.local == 0
    assert (await say(d, HISTORY, cache_salt="one", adapter="lora")).done.sources.local == 0
    assert (await say(d, HISTORY, cache_salt="one")).done.sources.local == 36


async def test_another_history_is_refused_and_leaves_nothing(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    for at in (0, 20, 46):
        wrong = held.copy()
        wrong[at] += 1
        assert await refusal(prefill(p, wrong + MORE, await d.begin_read("a", 47, 20.0))) == "hash"
        assert await free_blocks(p) == 256
        assert (await say(p, wrong + MORE)).ids == await rig.cold(wrong + MORE)
    assert await refusal(prefill(p, held[:30], await d.begin_read("a", 47, 20.0))) == "counts"


async def test_another_hash_seed_or_model_is_refused(rig: Rig) -> None:
    d = await rig.engine()
    held = await first_turn(d)
    seeded = await rig.engine("prefill", hash_seed="1")
    assert await refusal(prefill(seeded, held + MORE, await d.begin_read("a", 47, 20.0))) == "hash"
    other = await rig.engine("prefill", revision="other")
    assert await refusal(prefill(other, held + MORE, await d.begin_read("a", 47, 20.0))) == "transfer"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"remote_num_tokens": 48}, "hash"),
        ({"remote_num_tokens": 49}, "counts"),
        ({"remote_num_tokens": 0}, "counts"),
        ({"remote_block_ids": [[1, 2]]}, "counts"),
        ({"remote_block_ids": [[-1] * 12]}, "counts"),
        ({"remote_block_ids": [[*range(9_990, 10_002)]]}, "transfer"),
        ({"remote_block_ids": [[1] * 12]}, "counts"),
        ({"remote_block_ids": 7}, "fields"),
        ({"remote_blocks_expiry_time": None}, "deadline"),
        ({"transfer_mode": "push"}, "fields"),
        ({"remote_engine_id": "nobody"}, "transfer"),
    ],
)
async def test_malformed_handles_are_refused_and_the_engine_lives(
    rig: Rig, change: dict[str, object], why: str
) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    grant = await d.begin_read("a", 47, 20.0)
    params = {**json.loads(grant.handle_json), **change}
    forged = ReadGrant(grant.read_id, json.dumps(params), 47, 20.0)
    assert await refusal(prefill(p, held + MORE, forged)) == why
    assert await free_blocks(p) == 256
    await p.check_health()
    assert (await prefill(p, held + MORE)).sources.computed == 57


async def test_without_the_count_guard_a_short_list_kills_the_engine(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    grant = await d.begin_read("a", 47, 20.0)
    params = json.loads(grant.handle_json)
    params["remote_block_ids"] = [params["remote_block_ids"][0][:3]]
    p.faults.guard.counts = False
    with pytest.raises(Failure) as caught:
        await prefill(p, held + MORE, ReadGrant(grant.read_id, json.dumps(params), 47, 20.0))
    assert caught.value.reason_name == "WORKER_FAILED"
    with pytest.raises(Failure):
        await p.check_health()


async def overwrite(engine: SimulatedEngine) -> None:
    """Let other traffic take every block once."""
    for seed in range(100, 108):
        await say(engine, some_ids(400, seed=seed))


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_handle_that_outlived_its_blocks(rig: Rig, guarded: bool) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    grant = await d.begin_read("a", 47, 20.0)
    await d.end_read("a", grant.read_id)
    await d.release("a")
    await overwrite(d)
    await rig.clock.advance(21.0)
    p.faults.guard.deadline = guarded
    cold = await rig.cold(held + MORE)
    if guarded:
        assert await refusal(prefill(p, held + MORE, grant)) == "deadline"
        assert (await say(p, held + MORE)).ids == cold
    else:
        outcome = await prefill(p, held + MORE, grant)
        assert (await say(d, held + MORE, handle_json=outcome.handle_json)).ids != cold
        assert (await say(p, held + MORE)).ids != cold, "the cache is poisoned"


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_read_paused_past_its_pin(rig: Rig, guarded: bool) -> None:
    p, d = await pair(rig)
    held = await first_turn(d, ttl_s=6.0)
    grant = await d.begin_read("a", 47, 20.0)
    p.faults.network_delay_s = 1.0
    p.faults.guard.deadline = guarded
    reading = asyncio.ensure_future(prefill(p, held + MORE, grant))
    await rig.clock.advance(0.5)
    p.faults.pause()
    await rig.clock.advance(30.0)
    assert not reading.done() or guarded
    await overwrite(d)
    p.faults.resume()
    cold = await rig.cold(held + MORE)
    if guarded:
        assert await refusal(reading) == "deadline"
        assert (await say(p, held + MORE)).ids == cold
    else:
        await reading
        assert (await say(p, held + MORE)).ids != cold


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_prompt_that_outlived_the_prefill_hold(rig: Rig, guarded: bool) -> None:
    p, d = await pair(rig)
    outcome = await prefill(p, HISTORY)
    await rig.clock.advance(35.0)
    await overwrite(p)
    d.faults.guard.deadline = guarded
    if guarded:
        assert await refusal(say(d, HISTORY, handle_json=outcome.handle_json)) == "deadline"
        assert (await say(d, HISTORY)).ids == await rig.cold(HISTORY)
    else:
        said = await say(d, HISTORY, handle_json=outcome.handle_json)
        assert said.ids != await rig.cold(HISTORY)


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_corrupt_read(rig: Rig, guarded: bool) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    p.faults.corrupt_reads = 1
    p.faults.guard.hash = guarded
    prompt = held + MORE
    grant = await d.begin_read("a", 47, 20.0)
    if guarded:
        assert await refusal(prefill(p, prompt, grant)) == "hash"
    else:
        outcome = await prefill(p, prompt, grant)
        assert (await say(d, prompt, handle_json=outcome.handle_json)).ids != await rig.cold(prompt)
    assert p.faults.corrupt_reads == 0


async def test_a_pin_shorter_than_the_margin_is_declined(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    assert await refusal(prefill(p, held + MORE, await d.begin_read("a", 47, 4.0))) == "deadline"


async def test_failed_and_stalled_reads(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    p.faults.fail_reads = 1
    assert await refusal(prefill(p, held + MORE, await d.begin_read("a", 47, 20.0))) == "transfer"
    p.faults.stall_reads = 1
    start = rig.clock.monotonic()
    stalled = prefill(p, held + MORE, await d.begin_read("a", 47, 20.0))
    assert await refusal(rig.run(stalled)) == "deadline"
    assert rig.clock.monotonic() - start == pytest.approx(20.0)
    assert await free_blocks(p) == 256
    assert (await prefill(p, held + MORE, await d.begin_read("a", 47, 20.0))).sources.external == 47


async def test_a_paused_holder_costs_the_reader_a_bounded_time(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    grant = await d.begin_read("a", 47, 20.0)
    d.faults.pause()
    assert await refusal(rig.run(prefill(p, held + MORE, grant))) == "deadline"
    d.faults.resume()
    assert (await prefill(p, held + MORE, grant)).sources.external == 47


async def test_a_dead_holder_fails_at_once_when_known_and_after_seconds_when_not(rig: Rig) -> None:
    p, d = await pair(rig, preset="qwen3-32b-h200")
    other = await rig.engine("prefill", preset="qwen3-32b-h200")
    said = await rig.run(say(d, HISTORY, hold=terms("a")))
    prompt = HISTORY + said.ids
    await rig.run(prefill(p, prompt, await d.begin_read("a", 40, 20.0)))
    grant = await d.begin_read("a", 40, 60.0)
    d.faults.kill()
    await p.reset_prefix_cache()
    for engine, seconds in ((p, 0.01), (other, 5.0)):
        await rig.clock.advance(31.0)
        assert await engine.reset_prefix_cache()
        start = rig.clock.monotonic()
        assert await refusal(rig.run(prefill(engine, prompt, grant))) == "transfer"
        assert rig.clock.monotonic() - start == pytest.approx(seconds)


async def test_a_restarted_holder_has_forgotten_everything(rig: Rig) -> None:
    p, d = await pair(rig)
    held = await first_turn(d)
    grant = await d.begin_read("a", 47, 20.0)
    epoch = d.facts.epoch
    d.faults.kill()
    await d.start()
    assert d.facts.epoch != epoch
    assert await d.holds() == []
    with pytest.raises(Failure) as caught:
        await d.begin_read("a", 47, 20.0)
    assert caught.value.reason_name == "LEASE_NOT_FOUND"
    assert await refusal(prefill(p, held + MORE, grant)) == "transfer"
    held = await first_turn(d, "b")
    outcome = await prefill(p, held + MORE, await d.begin_read("b", 47, 20.0))
    assert outcome.sources.external == 47


async def test_a_lost_notice_costs_nothing_but_time(rig: Rig) -> None:
    p, d = await pair(rig)
    outcome = await prefill(p, HISTORY)
    d.faults.drop_read_notices = 1
    await say(d, HISTORY, handle_json=outcome.handle_json)
    assert await free_blocks(p) == 246
    await rig.clock.advance(30.0)
    assert await free_blocks(p) == 256


async def test_other_weights_under_the_same_name_show(rig: Rig) -> None:
    d = await rig.engine()
    held = await first_turn(d)
    epoch = d.facts.epoch
    await d.reload_weights("2")
    assert d.facts.epoch != epoch
    stale = await say(d, held + MORE)
    await d.release("a")
    assert await d.reset_prefix_cache()
    assert stale.ids != (await say(d, held + MORE)).ids


async def test_engines_without_readback(rig: Rig) -> None:
    d = await rig.engine("decode")
    held = await first_turn(d)
    one_way = await rig.engine("prefill", bidirectional_kv_xfer=False)
    assert await refusal(prefill(one_way, held + MORE, await d.begin_read("a", 47, 20.0))) == "fields"
    closed = await rig.engine("decode", bidirectional_kv_xfer=False)
    await first_turn(closed)
    with pytest.raises(Failure) as caught:
        await closed.begin_read("a", 47, 20.0)
    assert caught.value.reason_name == "INCOMPATIBLE_ENGINES"


async def test_over_tcp_between_fabrics(rig: Rig) -> None:
    p = await rig.engine("prefill", fabric=Fabric(tcp=True))
    d = await rig.engine("decode", fabric=Fabric(tcp=True))
    outcome = await prefill(p, HISTORY)
    said = await say(d, HISTORY, handle_json=outcome.handle_json, hold=terms("a"))
    assert said.done.sources.external == 39
    assert await free_blocks(p) == 256
    prompt = HISTORY + said.ids + MORE
    assert await p.reset_prefix_cache()
    outcome = await prefill(p, prompt, await d.begin_read("a", 47, 20.0))
    assert outcome.sources.external == 47
    said = await say(d, prompt, handle_json=outcome.handle_json, sampling=greedy(30))
    assert said.ids == await rig.cold(prompt, sampling=greedy(30))
    grant = await d.begin_read("a", 47, 20.0)
    d.faults.kill()
    await p.release_prefill("nobody")
    await rig.clock.advance(31.0)
    assert await p.reset_prefix_cache()
    assert await refusal(prefill(p, prompt, grant)) == "transfer"
