"""What of a history is read back and what is computed anew, with and without a prefix cache at P (A1-A12)."""

from collections.abc import AsyncIterator

import pytest
from worker_kit import BLOCK, THRESHOLD, Answer, Pair, open_pair, prompt, scope_of, until

from kvloop.v1alpha1 import sampling_pb2, turn_pb2

HISTORY = prompt(150, 1)
SUFFIX = prompt(40, 2)


@pytest.fixture(params=["cached", "bare"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    caching = request.param == "cached"
    async with open_pair(prefill_engine={"enable_prefix_caching": caching}) as workers:
        yield workers


async def forget(pair: Pair) -> None:
    """Empty P's prefix cache, so that a shared prefix is read whatever P could keep."""
    await pair.prefill_engine.reset_prefix_cache()


async def replay(pair: Pair, ids: list[int], verdict: str, reason: str, readback: int) -> Answer:
    """Play a turn of the conversation whose mechanism is known, and compare it with a cold one."""
    before = (await pair.prefill_engine.counters()).external_tokens
    answer = await pair.play(ids)
    read = (await pair.prefill_engine.counters()).external_tokens - before
    assert (answer.verdict, answer.reason) == (verdict, reason)
    tokens = answer.reuse.tokens
    assert tokens.readback == read == readback
    assert tokens.p_local + tokens.readback + tokens.computed == len(ids)
    assert answer.reuse.HasField("readback") == (readback > 0)
    assert answer.reuse.readback.bytes == -(-readback // BLOCK) * BLOCK * 4096
    cold = await pair.cold(ids)
    assert answer.ids == cold.ids
    # A second request with the same prefix: nothing wrong stayed in a prefix cache.
    more = [*ids, *SUFFIX]
    assert (await pair.play(more)).ids == (await pair.cold(more)).ids
    return answer


async def begun(pair: Pair) -> tuple[list[int], list[int]]:
    """Play the first turn; return what is held of it and its whole history."""
    one = await pair.play(HISTORY)
    assert (one.verdict, one.reason) == ("RECOMPUTE", "NOT_FOUND")
    await forget(pair)
    whole = [*HISTORY, *one.ids]
    return whole[:-1], whole


async def test_a1_history_and_suffix(pair: Pair) -> None:
    held, whole = await begun(pair)
    await replay(pair, [*whole, *SUFFIX], "READBACK", "PROVEN", len(held))


async def test_a2_first_token_changed(pair: Pair) -> None:
    _, whole = await begun(pair)
    await replay(pair, [whole[0] + 1, *whole[1:], *SUFFIX], "RECOMPUTE", "DIVERGED", 0)


async def test_a3_middle_token_changed(pair: Pair) -> None:
    _, whole = await begun(pair)
    at = 5 * BLOCK + 3
    changed = [*whole[:at], whole[at] + 1, *whole[at + 1 :], *SUFFIX]
    await replay(pair, changed, "READBACK", "PROVEN", 5 * BLOCK)


async def test_a4_last_token_changed(pair: Pair) -> None:
    held, whole = await begun(pair)
    changed = [*held[:-1], held[-1] + 1, whole[-1], *SUFFIX]
    await replay(pair, changed, "READBACK", "PROVEN", len(held[:-1]) // BLOCK * BLOCK)


@pytest.mark.parametrize("cut", [6 * BLOCK, 6 * BLOCK - 1, 6 * BLOCK + 1])
async def test_a5_to_a7_regenerate(pair: Pair, cut: int) -> None:
    held, _ = await begun(pair)
    # At least one token is left to compute.
    await replay(pair, held[:cut], "READBACK", "PROVEN", cut - 1)


async def test_a8_the_same_prompt_again(pair: Pair) -> None:
    await begun(pair)
    answer = await replay(pair, HISTORY, "READBACK", "PROVEN", len(HISTORY) - 1)
    assert answer.reuse.tokens.computed >= 1


async def test_a9_answer_drifts(pair: Pair) -> None:
    held, whole = await begun(pair)
    at = len(HISTORY) + 12
    drifted = [*whole[:at], 77, 78, *whole[at + 1 :], *SUFFIX]
    assert at > len(held) // BLOCK * BLOCK - BLOCK
    await replay(pair, drifted, "READBACK", "PROVEN", at // BLOCK * BLOCK)


async def test_a10_part_local_part_read() -> None:
    async with open_pair(prefill_engine={"enable_prefix_caching": True}) as pair:
        one = await pair.play(HISTORY)
        whole = [*HISTORY, *one.ids]
        local = len(HISTORY) // BLOCK * BLOCK
        # P kept the blocks of the prompt; the answer's are D's alone.
        two = await pair.play(
            [*whole, *SUFFIX], sampling=sampling_pb2.SamplingParams(max_tokens=100, ignore_eos=True)
        )
        assert two.reuse.tokens.p_local == local
        assert two.reason == "BELOW_THRESHOLD"
        whole = [*whole, *SUFFIX, *two.ids]
        local = (len(whole) - len(two.ids)) // BLOCK * BLOCK
        await replay(pair, [*whole, *SUFFIX], "READBACK", "PROVEN", len(whole) - 1 - local)


async def test_a11_everything_local_reads_nothing() -> None:
    async with open_pair(prefill_engine={"enable_prefix_caching": True}) as pair:
        one = await pair.play(HISTORY)
        answer = await replay(pair, HISTORY, "RECOMPUTE", "LOCAL", 0)
        assert answer.reuse.tokens.p_local == len(HISTORY) // BLOCK * BLOCK
        assert one.summary.HasField("lease")


@pytest.mark.parametrize(("length", "reads"), [(THRESHOLD, False), (THRESHOLD + 1, True)])
async def test_a12_below_threshold_leaves_the_lease(pair: Pair, length: int, reads: bool) -> None:
    # One token is always computed, so a prompt of the threshold's length has one too few to read.
    held, _ = await begun(pair)
    scope = scope_of("c")
    source = await pair.source(scope)
    answer = await pair.run_prefill(held[:length], scope, source)
    expected = turn_pb2.REUSE_REASON_PROVEN if reads else turn_pb2.REUSE_REASON_BELOW_THRESHOLD
    assert answer.reuse.reason == expected
    assert answer.reuse.HasField("readback") == reads
    [lease] = await pair.leases()
    assert lease.state == turn_pb2.LEASE_STATE_LIVE


async def test_proven_but_too_little_ends_the_pin(pair: Pair) -> None:
    _, whole = await begun(pair)
    at = BLOCK + 1
    changed = [*whole[:at], whole[at] + 1, *whole[at + 1 :]]
    await replay(pair, changed, "RECOMPUTE", "BELOW_THRESHOLD", 0)

    async def unpinned() -> bool:
        return all(lease.pins == 0 for lease in await pair.leases())

    await until(unpinned)


async def test_prompt_logprobs_are_never_read_back(pair: Pair) -> None:
    _, whole = await begun(pair)
    scope = scope_of("c")
    source = await pair.source(scope)
    sampling = sampling_pb2.SamplingParams(max_tokens=4, prompt_logprobs=1)
    answer = await pair.run_prefill([*whole, *SUFFIX], scope, source, sampling)
    assert answer.reuse.reason == turn_pb2.REUSE_REASON_FULL_PREFILL_NEEDED
    assert answer.reuse.tokens.computed == len(whole) + len(SUFFIX)
    assert len(answer.prompt_logprobs) == len(whole) + len(SUFFIX)


async def test_without_a_source_the_router_s_reason_is_repeated(pair: Pair) -> None:
    answer = await pair.run_prefill(HISTORY, scope_of("c"), None, cold_reason=turn_pb2.REUSE_REASON_DISABLED)
    assert answer.reuse.verdict == turn_pb2.VERDICT_RECOMPUTE
    assert answer.reuse.reason == turn_pb2.REUSE_REASON_DISABLED
