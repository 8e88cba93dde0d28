"""What every engine behind the port does. Written against the port alone."""

import asyncio
import contextlib
import dataclasses
import json

import pytest
from engine_pair import Pair, Said, greedy, name, words

from kvloop.engine.port import DecodeJob, PrefillJob, ReadGrant
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.contextmanager
def fails(*reasons: "Reason.ValueType") -> object:
    with pytest.raises(Failure) as caught:
        yield caught
    assert caught.value.reason in reasons, caught.value.reason_name


async def held_turn(pair: Pair, ids: list[int], salt: str = "", max_tokens: int = 8) -> tuple[str, Said]:
    lease = name("lease")
    return lease, await pair.turn(ids, greedy(max_tokens), lease, salt)


async def test_facts_agree(pair: Pair) -> None:
    assert pair.p.facts.compatibility == pair.d.facts.compatibility
    assert pair.p.facts.epoch != pair.d.facts.epoch
    assert pair.p.facts.block_size == pair.d.facts.block_size
    assert pair.p.facts.max_model_len == 1024
    await pair.p.check_health()


async def test_prefill_then_decode_equals_cold(pair: Pair) -> None:
    ids = words(200, seed=1)
    outcome = await pair.prefill(ids)
    assert dataclasses.astuple(outcome.sources) == (0, 0, 200)
    assert outcome.held_s > 10
    said = await pair.say(pair.job(ids, outcome.handle_json))
    assert said.done.sources.external > 0
    assert sum(dataclasses.astuple(said.done.sources)) == 200
    assert said.done.handoff is not None
    assert said.done.handoff.bytes > 0
    assert said.done.hold is None
    assert said.done.reason == turn_pb2.FINISH_REASON_LENGTH
    assert said.ids == (await pair.cold(ids)).ids


async def test_nobody_is_told_a_token_that_was_not_asked_for(pair: Pair) -> None:
    assert (await pair.prefill(words(40, seed=70))).first is None


@pytest.mark.parametrize("length", [7, 8 * 16, 200, 8 * 16 + 1], ids=str)
async def test_prefill_tells_the_first_token_and_decode_goes_on(pair: Pair, length: int) -> None:
    ids = words(length, seed=71 + length)
    outcome = await pair.prefill(ids, sampling=greedy(logprobs=1), first_token=True)
    first = outcome.first
    assert first is not None
    assert not first.ends
    assert [entry.candidates[0].token_id for entry in first.logprobs] == [first.token_id]
    job = pair.job([*ids, first.token_id], outcome.handle_json, greedy(7), lease=name("lease"))
    said = await pair.say(job)
    assert dataclasses.astuple(said.done.sources) == (0, length, 1)
    assert said.held.num_tokens == length + 7
    cold = await pair.cold(ids)
    assert [first.token_id, *said.ids] == cold.ids
    assert first.text + said.text == cold.text
    await pair.d.release(said.held.lease_id)


async def test_a_first_token_that_ends_the_answer_says_so(pair: Pair) -> None:
    ids = words(90, seed=75)
    (token,) = (await pair.cold(ids, greedy(1))).ids
    stops = greedy(stop_token_ids=[token])
    outcome = await pair.prefill(ids, sampling=stops, first_token=True)
    assert outcome.first is not None
    assert (outcome.first.token_id, outcome.first.ends) == (token, True)
    said = await pair.say(pair.job(ids, outcome.handle_json, stops))
    assert (said.ids, said.done.reason) == ([token], turn_pb2.FINISH_REASON_STOP)


async def test_a_first_token_may_not_end_an_answer_too_short(pair: Pair) -> None:
    ids = words(90, seed=75)
    (token,) = (await pair.cold(ids, greedy(1))).ids
    outcome = await pair.prefill(ids, sampling=greedy(stop_token_ids=[token], min_tokens=3), first_token=True)
    assert outcome.first is not None
    assert not outcome.first.ends
    assert outcome.first.token_id != token


async def test_a_sampled_answer_is_held_to_the_token_that_ended_it(pair: Pair) -> None:
    ids = words(90, seed=76)
    sampled = sampling_pb2.SamplingParams(
        temperature=1.0, max_tokens=8, stop_token_ids=[777], allowed_token_ids=[777]
    )
    for _ in range(3):
        said = await pair.turn(ids, sampled)
        assert (said.ids, said.done.stop_reason) == ([777], "777")


async def test_every_token_comes_once_with_its_logprobs(pair: Pair) -> None:
    ids = words(40, seed=2)
    said = await pair.turn(ids, greedy(20, logprobs=2))
    assert len(said.ids) == 20
    assert len(said.logprobs) == 20
    assert [entry.candidates[0].token_id for entry in said.logprobs] == said.ids
    assert all(len(entry.candidates) >= 2 for entry in said.logprobs)
    assert all(entry.candidates[0].rank == 1 for entry in said.logprobs)


async def test_prompt_logprobs_come_from_prefill(pair: Pair) -> None:
    ids = words(50, seed=3)
    outcome = await pair.prefill(ids, sampling=greedy(prompt_logprobs=1))
    assert len(outcome.prompt_logprobs) == 50
    assert not outcome.prompt_logprobs[0].candidates
    assert [entry.candidates[0].token_id for entry in outcome.prompt_logprobs[1:]] == ids[1:]
    said = await pair.say(pair.job(ids, outcome.handle_json, greedy(prompt_logprobs=1)))
    assert said.done.sources.external > 0


async def test_a_hold_is_read_back(pair: Pair) -> None:
    ids = words(150, seed=4)
    lease, said = await held_turn(pair, ids)
    assert said.held.lease_id == lease
    assert said.held.num_tokens == 150 + len(said.ids) - 1
    assert [hold.lease_id for hold in await pair.d.holds()] == [lease]

    longer = ids + said.ids + words(30, seed=5)
    grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
    assert grant.num_tokens == said.held.num_tokens
    assert [hold.pins for hold in await pair.d.holds()] == [1]
    await pair.forget()
    outcome = await pair.prefill(longer, read=grant)
    await pair.d.end_read(lease, grant.read_id)
    assert outcome.sources.external == grant.num_tokens
    assert outcome.readback is not None
    assert outcome.readback.bytes > 0
    again = await pair.say(pair.job(longer, outcome.handle_json))
    assert again.ids == (await pair.cold(longer)).ids
    assert await pair.d.release(lease)
    assert not await pair.d.release(lease)
    assert await pair.d.holds() == []


@pytest.mark.parametrize("share", [1, 31, 32, 33, 64, 100, 149])
async def test_a_read_is_cut_to_what_is_proven(pair: Pair, share: int) -> None:
    ids = words(150, seed=6)
    lease, _ = await held_turn(pair, ids)
    other = ids[:share] + words(200 - share, seed=7 + share)
    await pair.forget()
    grant = await pair.d.begin_read(lease, share, 20)
    outcome = await pair.prefill(other, read=grant)
    await pair.d.end_read(lease, grant.read_id)
    assert outcome.sources.external in {0, share}
    if share >= pair.p.facts.kv_recompute_threshold:
        assert outcome.sources.external == share
    said = await pair.say(pair.job(other, outcome.handle_json))
    assert said.ids == (await pair.cold(other)).ids
    await pair.d.release(lease)


async def test_reads_do_not_consume(pair: Pair) -> None:
    ids = words(160, seed=8)
    lease, said = await held_turn(pair, ids)
    expected = None
    for _ in range(3):
        longer = ids + said.ids + words(20, seed=9)
        await pair.forget()
        grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
        outcome = await pair.prefill(longer, read=grant)
        await pair.d.end_read(lease, grant.read_id)
        assert outcome.sources.external == grant.num_tokens
        answer = await pair.say(pair.job(longer, outcome.handle_json))
        expected = expected or answer.ids
        assert answer.ids == expected
    await pair.d.release(lease)


async def test_direct_computes_only_the_suffix(pair: Pair) -> None:
    salt = name("salt")
    ids = words(128, seed=10)
    lease, said = await held_turn(pair, ids, salt)
    longer = ids + said.ids + words(10, seed=11)
    second = name("lease")
    again = await pair.say(pair.job(longer, None, lease=second, salt=salt))
    assert again.done.sources.local >= 128
    assert again.done.sources.external == 0
    assert again.held.num_tokens == len(longer) + len(again.ids) - 1
    assert again.ids == (await pair.cold(longer)).ids
    for each in (lease, second):
        assert await pair.d.release(each)


async def test_the_pool_is_whole_after_everything_is_released(pair: Pair) -> None:
    for hold in await pair.d.holds():
        await pair.d.release(hold.lease_id)
    before = await pair.idle(pair.d)
    assert before.held_blocks == 0
    lease, said = await held_turn(pair, words(100, seed=12))
    full = await pair.idle(pair.d)
    assert full.held_blocks == said.held.num_blocks
    assert full.leases == 1
    await pair.d.release(lease)
    assert (await pair.idle(pair.d)).free_blocks == before.free_blocks
    prefilled = await pair.prefill(words(100, seed=13))
    assert prefilled.handle_json
    assert (await pair.p.pool()).free_blocks < (await pair.p.pool()).total_blocks


async def test_an_unread_prefill_is_released(pair: Pair) -> None:
    job = PrefillJob(name("p"), tokens.pack(words(64, seed=14)), greedy())
    await pair.forget()
    before = (await pair.p.pool()).free_blocks
    await pair.p.prefill(job)
    assert (await pair.p.pool()).free_blocks < before
    assert await pair.p.release_prefill(job.request_id)
    assert not await pair.p.release_prefill(job.request_id)
    assert (await pair.p.pool()).free_blocks == before


async def test_a_stop_string_leaves_a_hold(pair: Pair) -> None:
    ids = words(96, seed=15)
    free = await pair.turn(ids, greedy(24))
    assert len(free.text) > 8
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    lease = name("lease")
    said = await pair.turn(ids, greedy(24, stop=[stop]), lease)
    assert said.done.reason == turn_pb2.FINISH_REASON_STOP
    assert said.done.stop_reason == stop
    assert said.text == free.text[: free.text.index(stop)]
    assert said.ids == free.ids[: len(said.ids)]
    assert len(ids) + len(said.ids) - 1 <= said.held.num_tokens <= len(ids) + len(said.ids)
    longer = ids + said.ids + words(20, seed=16)
    await pair.forget()
    grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
    outcome = await pair.prefill(longer, read=grant)
    await pair.d.end_read(lease, grant.read_id)
    assert outcome.sources.external == grant.num_tokens
    again = await pair.say(pair.job(longer, outcome.handle_json))
    assert again.ids == (await pair.cold(longer)).ids
    await pair.d.release(lease)


async def test_a_stop_token_is_told(pair: Pair) -> None:
    ids = words(60, seed=17)
    free = await pair.turn(ids, greedy(12))
    stop = free.ids[5]
    said = await pair.turn(ids, greedy(12, stop_token_ids=[stop]))
    assert said.done.reason == turn_pb2.FINISH_REASON_STOP
    assert said.done.stop_reason == str(stop)
    assert said.ids == free.ids[: free.ids.index(stop) + 1]


async def cancelled(pair: Pair, job: DecodeJob, after: int) -> list[int]:
    said: list[int] = []
    answer = pair.d.decode(job)
    async for delta in answer:
        said += delta.token_ids
        if len(said) >= after:
            break
    await answer.aclose()  # type: ignore[attr-defined]
    return said


async def test_cancel_frees(pair: Pair) -> None:
    before = await pair.idle(pair.d)
    ids = words(80, seed=18)
    outcome = await pair.prefill(ids)
    lease = name("lease")
    job = pair.job(ids, outcome.handle_json, greedy(800, stop=["no such text, ever"]), lease)
    await cancelled(pair, job, 3)
    assert await pair.d.settle(lease) is None
    assert await pair.idle(pair.d) == before


async def test_cancel_holds_when_asked(pair: Pair) -> None:
    ids = words(80, seed=19)
    outcome = await pair.prefill(ids)
    lease = name("lease")
    said = await cancelled(pair, pair.job(ids, outcome.handle_json, greedy(800), lease, on_cancel=True), 5)
    hold = await pair.d.settle(lease)
    assert hold is not None
    assert 80 < hold.num_tokens <= 80 + len(said)
    assert await pair.d.release(lease)


async def test_a_cancelled_consumer_aborts(pair: Pair) -> None:
    before = await pair.idle(pair.d)
    ids = words(80, seed=20)
    outcome = await pair.prefill(ids)
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in pair.d.decode(pair.job(ids, outcome.handle_json, greedy(900))):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pair.idle(pair.d) == before


async def test_a_cancelled_prefill_holds_nothing(pair: Pair) -> None:
    await pair.forget()
    before = await pair.idle(pair.p)
    job = PrefillJob(name("p"), tokens.pack(words(900, seed=21)), greedy())
    task = asyncio.create_task(pair.p.prefill(job))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pair.p.prefill_ended(job.request_id, 60.0)
    assert await pair.idle(pair.p) == before


async def test_a_diverging_prompt_reads_nothing_wrong(pair: Pair) -> None:
    ids = words(160, seed=22)
    lease, said = await held_turn(pair, ids)
    changed = [*ids[:70], ids[70] + 1, *ids[71:], *said.ids, *words(20, seed=23)]
    await pair.forget()
    grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
    outcome = None
    with contextlib.suppress(Failure):  # an engine may refuse the read, or cut it
        outcome = await pair.prefill(changed, read=grant)
        assert outcome.sources.external <= 70
    outcome = outcome or await pair.prefill(changed)
    await pair.d.end_read(lease, grant.read_id)
    said = await pair.say(pair.job(changed, outcome.handle_json))
    assert said.ids == (await pair.cold(changed)).ids
    await pair.d.release(lease)


async def test_a_malformed_handle_is_refused(pair: Pair) -> None:
    ids = words(160, seed=24)
    lease, said = await held_turn(pair, ids)
    grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
    longer = ids + said.ids + words(20, seed=25)
    handle = json.loads(grant.handle_json)
    await pair.forget()
    for broken in ("{", "[]", json.dumps({**handle, "remote_num_tokens": 10**6})):
        with fails(Reason.ERROR_REASON_KV_READ_FAILED, Reason.ERROR_REASON_INVALID_FIELD):
            await pair.prefill(longer, read=dataclasses.replace(grant, handle_json=broken))
    await pair.d.end_read(lease, grant.read_id)
    await pair.d.release(lease)
    await pair.p.check_health()
    assert (await pair.turn(longer)).ids == (await pair.cold(longer)).ids


async def test_a_read_after_release_is_not_found(pair: Pair) -> None:
    lease, _ = await held_turn(pair, words(64, seed=26))
    await pair.d.release(lease)
    with fails(Reason.ERROR_REASON_LEASE_NOT_FOUND):
        await pair.d.begin_read(lease, 10, 20)
    with fails(Reason.ERROR_REASON_LEASE_NOT_FOUND):
        await pair.d.begin_read("no such lease", 10, 20)
    assert not await pair.d.extend("no such lease", 100)
    await pair.d.end_read("no such lease", "no such read")
    assert await pair.d.settle("no such lease") is None


async def test_a_pinned_hold_is_doomed_not_freed(pair: Pair) -> None:
    lease, said = await held_turn(pair, words(64, seed=27))
    grant = await pair.d.begin_read(lease, said.held.num_tokens, 20)
    assert await pair.d.release(lease)
    assert (await pair.idle(pair.d)).held_blocks == said.held.num_blocks
    with fails(Reason.ERROR_REASON_LEASE_NOT_FOUND):
        await pair.d.begin_read(lease, 10, 20)
    await pair.d.end_read(lease, grant.read_id)
    assert (await pair.idle(pair.d)).held_blocks == 0


async def test_extend_moves_a_deadline_only_later(pair: Pair) -> None:
    lease, _ = await held_turn(pair, words(40, seed=28))
    assert await pair.d.extend(lease, 1000)
    assert await pair.d.extend(lease, 10)
    (hold,) = await pair.d.holds()
    assert 900 < hold.remaining_s <= 1000
    await pair.d.release(lease)


BAD = [
    ("sampling.temperature", {"temperature": 3.0}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.min_p", {"min_p": float("nan")}),
    ("sampling.logprobs", {"logprobs": 1000}),
    ("sampling.stop_token_ids", {"stop_token_ids": [10**6]}),
    ("sampling.n", {"n": 2}),
    ("sampling.stop", {"stop": ["x"], "detokenize": False}),
    ("sampling.extra_args_json", {"extra_args_json": '{"kv_transfer_params": {}}'}),
    ("sampling.extra_args_json", {"extra_args_json": "["}),
]


@pytest.mark.parametrize(("field", "values"), BAD)
async def test_bad_sampling_is_named_and_harmless(pair: Pair, field: str, values: dict[str, object]) -> None:
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 2, **values})  # type: ignore[arg-type]
    with pytest.raises(Failure) as caught:
        await pair.say(pair.job(words(20), None, sampling))
    assert caught.value.field == field
    assert caught.value.code.name == "INVALID_ARGUMENT"
    await pair.d.check_health()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (b"", Reason.ERROR_REASON_EMPTY_PROMPT),
        (b"abc", Reason.ERROR_REASON_INVALID_FIELD),
        (tokens.pack([49_152]), Reason.ERROR_REASON_INVALID_FIELD),
        (tokens.pack([2**32 - 1]), Reason.ERROR_REASON_INVALID_FIELD),
        (tokens.pack([7] * 1024), Reason.ERROR_REASON_PROMPT_TOO_LONG),
    ],
)
async def test_a_bad_prompt_is_refused(pair: Pair, prompt: bytes, reason: "Reason.ValueType") -> None:
    with fails(reason):
        await pair.p.prefill(PrefillJob(name("p"), prompt, greedy()))
    with fails(reason):
        async for _ in pair.d.decode(DecodeJob(name("d"), prompt, greedy())):
            pass


async def test_the_longest_prompt_fits(pair: Pair) -> None:
    ids = words(1023, seed=29)
    said = await pair.turn(ids, sampling_pb2.SamplingParams(temperature=0))
    assert len(said.ids) == 1
    assert said.done.reason == turn_pb2.FINISH_REASON_LENGTH


async def test_an_unknown_adapter_is_refused(pair: Pair) -> None:
    with fails(Reason.ERROR_REASON_MODEL_NOT_FOUND):
        await pair.p.prefill(PrefillJob(name("p"), tokens.pack([5]), greedy(), adapter="nobody's"))


async def test_salts_do_not_share(pair: Pair) -> None:
    ids = words(128, seed=30)
    await pair.prefill(ids, salt="one")
    assert (await pair.prefill(ids, salt="two")).sources.local == 0
    assert (await pair.prefill(ids, salt="one")).sources.local > 0


async def test_counters_grow(pair: Pair) -> None:
    before = await pair.p.counters()
    await pair.prefill(words(70, seed=31))
    after = await pair.p.counters()
    while after.computed_tokens < before.computed_tokens + 70:
        await asyncio.sleep(0.01)
        after = await pair.p.counters()
    assert after.computed_tokens == before.computed_tokens + 70


async def test_many_at_once(pair: Pair) -> None:
    prompts = [words(50 + 10 * number, seed=40 + number) for number in range(6)]
    alone = [(await pair.cold(ids)).ids for ids in prompts]
    together = await asyncio.gather(*(pair.turn(ids) for ids in prompts))
    assert [said.ids for said in together] == alone


async def test_a_refused_read_grant_type(pair: Pair) -> None:
    grant = ReadGrant("r", "null", 5, 1.0)
    with fails(Reason.ERROR_REASON_KV_READ_FAILED, Reason.ERROR_REASON_INVALID_FIELD):
        await pair.prefill(words(30), read=grant)
