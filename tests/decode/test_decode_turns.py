"""Decode legs: the stream, every way an answer can end, and what is left of it (B1-B7, E6)."""

import asyncio

import pytest
from worker_kit import Answer, Pair, decode_request, open_pair, prompt, read_answer, scope_of, until

from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

HISTORY = prompt(150, 1)
SUFFIX = prompt(40, 2)
LONG = 8000
SLOW = {"preset": "qwen3-32b-h200"}


async def next_turn_reads(pair: Pair, one: Answer, held: int) -> None:
    """Play a next turn that goes on from all the answer's tokens."""
    assert one.summary.lease.num_tokens == held
    ids = [*HISTORY, *one.ids, *SUFFIX]
    two = await pair.play(ids)
    assert (two.verdict, two.reason) == ("READBACK", "PROVEN")
    assert two.reuse.tokens.readback == held
    assert two.ids == (await pair.cold(ids)).ids
    await pair.close_conversation()
    await until(pair.all_free)


async def test_the_stream_is_chunks_then_one_summary(pair: Pair) -> None:
    one = await pair.play(HISTORY)
    assert len(one.ids) == 24
    assert len(one.text.split()) == 24
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_LENGTH
    assert one.summary.handoff.bytes > 0
    lease = one.summary.lease
    assert lease.decode_worker == pair.decode_app.worker_id
    assert 0 < lease.remaining_time.ToNanoseconds() <= 60e9


async def test_the_lease_is_published_before_the_summary(pair: Pair) -> None:
    scope = scope_of("c", start=7)
    prefilled = await pair.run_prefill(HISTORY, scope, None)
    call = pair.decode.Decode(decode_request(HISTORY, scope, prefilled), timeout=20)
    async for response in call:
        if response.HasField("summary"):
            entry = await pair.entry()
            assert entry is not None
            assert entry.lease_id == response.summary.lease.lease_id
            assert entry.turn_start_us == 7
            assert entry.epoch == pair.decode_engine.facts.epoch
            assert entry.digests[-1].num_tokens == entry.num_tokens == response.summary.lease.num_tokens


async def test_b1_end_of_sequence() -> None:
    async with open_pair(engine={"eos_every": 10}) as pair:
        one = await pair.play(HISTORY, sampling=sampling_pb2.SamplingParams(max_tokens=500))
        assert one.summary.finish_reason == turn_pb2.FINISH_REASON_STOP
        await next_turn_reads(pair, one, len(HISTORY) + len(one.ids) - 1)


@pytest.mark.parametrize("limit", [1, 2, 24])
async def test_b2_b7_length(pair: Pair, limit: int) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=limit, ignore_eos=True)
    one = await pair.play(HISTORY, sampling=sampling)
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_LENGTH
    await next_turn_reads(pair, one, len(HISTORY) + limit - 1)


async def test_b3_stop_token(pair: Pair) -> None:
    whole = (await pair.cold(HISTORY)).ids
    sampling = sampling_pb2.SamplingParams(max_tokens=100, stop_token_ids=[whole[9]], ignore_eos=True)
    one = await pair.play(HISTORY, sampling=sampling)
    assert one.ids == whole[: whole.index(whole[9]) + 1]
    assert one.summary.stop_reason == str(whole[9])
    await next_turn_reads(pair, one, len(HISTORY) + len(one.ids) - 1)


async def test_b4_stop_string(pair: Pair) -> None:
    whole = await pair.cold(HISTORY)
    word = whole.text.split()[9]
    sampling = sampling_pb2.SamplingParams(max_tokens=100, stop=[word], ignore_eos=True)
    one = await pair.play(HISTORY, sampling=sampling)
    assert one.summary.stop_reason == word
    assert word not in one.text
    ids = [*HISTORY, *one.ids, *SUFFIX]
    assert 0 < one.summary.lease.num_tokens <= len(HISTORY) + len(one.ids)
    two = await pair.play(ids)
    assert two.verdict == "READBACK"
    assert two.reuse.tokens.readback <= len(HISTORY) + len(one.ids)
    assert two.ids == (await pair.cold(ids)).ids


async def leave_early(pair: Pair, retention: turn_pb2.Retention) -> list[int]:
    """Cancel a turn after some tokens; return those that were seen."""
    scope = scope_of("c", start=1)
    prefilled = await pair.run_prefill(HISTORY, scope, None)
    sampling = sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    request = decode_request(HISTORY, scope, prefilled, sampling, retention)
    call = pair.decode.Decode(request, timeout=20)
    seen: list[int] = []
    async for response in call:
        seen += tokens.unpack(response.chunk.token_ids)
        if len(seen) >= 5:
            call.cancel()
            return seen
    raise AssertionError("the answer ended before it was left")


async def test_b5_a_cancelled_turn_is_held_when_asked_for() -> None:
    async with open_pair(engine=SLOW) as pair:
        seen = await leave_early(pair, turn_pb2.Retention(hold_on_cancel=True))
        entry = await until(pair.entry)
        assert entry.num_tokens >= len(HISTORY) + len(seen) - 1
        ids = [*HISTORY, *seen, *SUFFIX]
        two = await pair.play(ids)
        assert (two.verdict, two.reason) == ("READBACK", "PROVEN")
        assert two.reuse.tokens.readback >= (len(HISTORY) + len(seen) - 1) // 16 * 16
        assert two.ids == (await pair.cold(ids)).ids


@pytest.mark.parametrize("hold", [True, False])
async def test_b6_a_cancelled_turn_is_freed_at_once(hold: bool) -> None:
    async with open_pair(engine=SLOW) as pair:
        await leave_early(pair, turn_pb2.Retention(hold=hold))
        await until(pair.all_free)
        assert await pair.entry() is None
        assert await pair.leases() == []


async def test_a_call_that_runs_out_of_time_is_a_cancelled_one() -> None:
    async with open_pair(engine=SLOW) as pair:
        scope = scope_of("c", start=1)
        sampling = sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
        with pytest.raises(Failure) as raised:
            await read_answer(pair.decode.Decode(decode_request(HISTORY, scope, None, sampling), timeout=0.3))
        assert "DEADLINE_EXCEEDED" in raised.value.message
        await until(pair.all_free)


@pytest.mark.parametrize(
    ("retention", "scoped"),
    [(turn_pb2.Retention(hold=False), True), (turn_pb2.Retention(), False)],
)
async def test_nothing_is_held_unless_wanted_and_findable(
    pair: Pair, retention: turn_pb2.Retention, scoped: bool
) -> None:
    scope = scope_of("c", start=1)
    if not scoped:
        scope.ClearField("scope")
    prefilled = await pair.run_prefill(HISTORY, scope, None)
    one = await pair.run_decode(HISTORY, scope, prefilled, retention=retention)
    assert not one.summary.HasField("lease")
    await until(pair.all_free)


async def test_hold_only_on_cancel_holds_no_finished_turn(pair: Pair) -> None:
    one = await pair.play(HISTORY, retention=turn_pb2.Retention(hold=False, hold_on_cancel=True))
    assert not one.summary.HasField("lease")
    await until(pair.all_free)


async def test_e6_a_reader_that_stalls_holds_nothing_up() -> None:
    # Far more text than the transport's windows take, so that writes to the reader block.
    async with open_pair(engine={"max_model_len": 200_000, "num_blocks": 30_000}) as pair:
        scope = scope_of("c", start=1)
        sampling = sampling_pb2.SamplingParams(max_tokens=LONG, ignore_eos=True, logprobs=20)
        call = pair.decode.Decode(decode_request(HISTORY, scope, None, sampling), timeout=60)
        responses = aiter(call)
        ids = tokens.unpack((await anext(responses)).chunk.token_ids)
        entry = await until(pair.entry, 40)
        assert entry.num_tokens == len(HISTORY) + LONG - 1
        # Others are served meanwhile.
        other = await pair.play(prompt(80, 4), "other")
        assert len(other.ids) == 24
        chunks = 1
        async for response in responses:
            ids += tokens.unpack(response.chunk.token_ids)
            chunks += 1
        assert len(ids) == LONG
        # What the reader left lying was merged.
        assert chunks < LONG


async def test_a_failing_engine_is_a_status_and_leaves_nothing(pair: Pair) -> None:
    pair.decode_engine.faults.fail_decodes = 1
    with pytest.raises(Failure) as raised:
        await pair.play(HISTORY)
    assert raised.value.reason == Reason.ERROR_REASON_WORKER_FAILED
    assert await pair.entry() is None
    await until(pair.decode_is_free)


async def test_an_engine_that_dies_in_mid_answer_is_a_status() -> None:
    async with open_pair(engine=SLOW) as pair:
        sampling = sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
        request = decode_request(HISTORY, scope_of("c", start=1), None, sampling)
        responses = aiter(pair.decode.Decode(request, timeout=20))
        await anext(responses)
        pair.decode_engine.faults.kill()
        with pytest.raises(Failure) as raised:
            await read_answer(responses)
        assert raised.value.reason == Reason.ERROR_REASON_WORKER_FAILED
        assert await pair.entry() is None


async def test_a_failed_handoff_is_a_status_and_leaves_nothing(pair: Pair) -> None:
    pair.decode_engine.faults.fail_reads = 1
    with pytest.raises(Failure) as raised:
        await pair.play(HISTORY)
    assert raised.value.reason == Reason.ERROR_REASON_KV_READ_FAILED
    assert await pair.entry() is None
    await until(pair.decode_is_free)


async def test_many_turns_at_once_leave_one_lease_each(pair: Pair) -> None:
    answers = await asyncio.gather(*(pair.play(prompt(60, i), f"c{i}") for i in range(20)))
    assert len({answer.summary.lease.lease_id for answer in answers}) == 20
    assert len(await pair.leases()) == 20
    for i in range(20):
        assert await pair.close_conversation(f"c{i}")
    assert not await pair.close_conversation("c0")
    await until(pair.all_free)
