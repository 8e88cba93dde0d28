"""B: every way a turn can end, and what the next turn may reuse of it."""

import pytest
from cases_kit import Answer, Case, until

from kvloop.v1alpha1 import turn_pb2


async def next_turn(case: Case, history: list[int], one: Answer, suffix: list[int], num_tokens: int) -> None:
    assert one.summary.lease.num_tokens == num_tokens
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN", num_tokens - two.sources.p_local)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B1", "next turn READBACK")
async def test_eos(case: Case, question: list[int], suffix: list[int]) -> None:
    one = await case.turn(question, max_tokens=64, ignore_eos=False)
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_STOP
    assert one.ids[-1] == case.stack.eos
    await next_turn(case, question, one, suffix, len(question) + len(one.ids) - 1)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B2", "next turn READBACK")
async def test_length(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history, max_tokens=40)
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_LENGTH
    assert len(one.ids) == 40
    await next_turn(case, history, one, suffix, len(history) + 39)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B3", "next turn READBACK; tokens past the stop not reused")
async def test_stop_token(case: Case, history: list[int], suffix: list[int]) -> None:
    whole = await case.stack.cold(history)
    stop = whole.ids[7]
    end = whole.ids.index(stop)
    one = await case.turn(history, stop_token_ids=[stop])
    assert one.ids == whole.ids[: end + 1]
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_STOP
    assert one.summary.stop_reason == str(stop)
    await next_turn(case, history, one, suffix, len(history) + end)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B4", "next turn READBACK; tokens past the stop not reused")
async def test_stop_string(case: Case, history: list[int], suffix: list[int]) -> None:
    whole = await case.stack.cold(history, max_tokens=24)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    one = await case.turn(history, max_tokens=24, stop=[stop])
    assert one.summary.finish_reason == turn_pb2.FINISH_REASON_STOP
    assert one.summary.stop_reason == stop
    assert one.text == whole.text[: whole.text.index(stop)]
    assert one.ids == whole.ids[: len(one.ids)]
    await next_turn(case, history, one, suffix, len(history) + len(one.ids) - 1)


async def cancel_mid_stream(case: Case, history: list[int], *, hold: bool) -> list[int]:
    """Cancel a long answer after some tokens; return the tokens seen."""
    stack = case.stack
    case.watch(case.name())
    request = stack.request(
        history, case.name(), max_tokens=400, retention=turn_pb2.Retention(hold_on_cancel=hold)
    )
    call = stack.start(request, router=case.router)
    seen: list[int] = []
    async for response in call:
        seen += memoryview(response.chunk.token_ids).cast("I").tolist()
        if len(seen) >= 40:
            break
    call.cancel()
    return seen


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B5", "next turn reuses what was generated")
async def test_cancel_and_hold(case: Case, history: list[int], suffix: list[int]) -> None:
    seen = await cancel_mid_stream(case, history, hold=True)

    async def listed() -> list[turn_pb2.Lease]:
        return [lease for lease in await case.stack.leases() if lease.conversation_id == case.name()]

    (lease,) = await until(listed)
    assert lease.num_tokens >= len(history) + len(seen) - 1
    whole = await case.stack.cold(history, max_tokens=len(seen))
    two = await case.turn([*history, *whole.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN", two.sources.readback)
    size = case.stack.block_size
    assert two.sources.readback >= (len(history) + len(seen)) // size * size > len(history)


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("B6", "blocks freed at once")
async def test_cancel_without_hold(case: Case, history: list[int], suffix: list[int]) -> None:
    seen = await cancel_mid_stream(case, history, hold=False)

    async def whole() -> bool:
        return await case.stack.free_blocks() == case.free_before

    assert await until(whole), "the cancelled turn's blocks stayed"
    assert case.name() not in {lease.conversation_id for lease in await case.stack.leases()}
    two = await case.turn([*history, *seen, *suffix])
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("B7", "next turn READBACK")
async def test_one_token(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history, max_tokens=1)
    assert len(one.ids) == 1
    await next_turn(case, history, one, suffix, len(history))
