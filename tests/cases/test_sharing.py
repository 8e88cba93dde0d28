"""D: one lease, many readers; one conversation, many turns at once."""

import asyncio

import pytest
from cases_hooks import hooks
from cases_kit import Case, until

bare = pytest.mark.parametrize("router", ["bare"])


@bare
@pytest.mark.case("D1", "READBACK every time")
async def test_read_twice_in_turn(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    for fork in range(2):
        two = await case.turn(prompt, case.name(f"fork{fork}"), parent_conversation_id=case.name())
        case.expect(two, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)


FORKS = 5


@pytest.mark.parametrize(("router", "reader"), [("bare", "p2"), ("main", "p1")])
@pytest.mark.case("D2", "READBACK every time")
async def test_read_five_times_at_once(
    case: Case, history: list[int], suffix: list[int], reader: str
) -> None:
    # P with a prefix cache has not computed the history, which it is to read.
    one = await case.turn(history, router="bare")
    prompt = [*history, *one.ids, *suffix]
    async with hooks(case.stack, reader) as prefill:
        # What the first one reads must not be there for the others.
        await prefill.stall("end")
        forks = [
            asyncio.create_task(
                case.turn(prompt, case.name(f"fork{i}"), parent_conversation_id=case.name(), check=False)
            )
            for i in range(FORKS)
        ]

        async def all_read() -> bool:
            lease_id = one.summary.lease.lease_id
            pins = {lease.lease_id: lease.pins for lease in await case.stack.leases()}
            pool = (await case.stack.info(reader)).pool
            taken = case.free_before[reader] - pool.free_blocks
            return pins.get(lease_id) == FORKS and taken >= FORKS * (len(prompt) // case.stack.block_size)

        assert await until(all_read), "they do not read at once"
        await prefill.stall(None)
        answers = await asyncio.gather(*forks)
    await case.compare(answers[0], prompt)
    for answer in answers:
        assert answer.ids == answers[0].ids
        case.expect(answer, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)


@bare
@pytest.mark.case("D3", "all reuse")
async def test_forks_while_one_publishes(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    # The first fork goes on under the conversation's own name, so its lease supersedes the one they share.
    mine = await case.turn(prompt)
    case.expect(mine, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)
    for fork in range(2):
        answer = await case.turn(prompt, case.name(f"fork{fork}"), parent_conversation_id=case.name())
        case.expect(answer, "READBACK", "PROVEN")


@bare
@pytest.mark.case("D4", "reuse; later-started turn's lease wins")
async def test_regenerate_while_streaming(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    long = stack.start(stack.request(prompt, case.name(), max_tokens=200), router=case.router)
    begun = await anext(aiter(long))
    again = await case.turn(prompt, max_tokens=4)
    case.expect(again, "READBACK", "PROVEN")
    slow = await stack.finish(long, begun)
    assert not slow.summary.HasField("lease"), "an earlier-started turn's lease must not win"
    held = [lease for lease in await stack.leases() if lease.conversation_id == case.name()]
    assert [lease.lease_id for lease in held] == [again.summary.lease.lease_id]


@bare
@pytest.mark.case("D5", "both right; one lease left")
async def test_two_turns_on_two_routers(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompts = [[*history, *one.ids, *suffix], [*history, *one.ids, *suffix[::-1]]]
    answers = await asyncio.gather(
        case.turn(prompts[0], router="main", check=False), case.turn(prompts[1], router="twin", check=False)
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        await case.compare(answer, prompt)
        # Whichever came second may have found what the first one read.
        case.expect(answer, ("READBACK", "RECOMPUTE"), ("PROVEN", "LOCAL"))
        assert answer.sources.computed <= case.stack.block_size + len(suffix)

    async def one_left() -> bool:
        held = [lease for lease in await case.stack.leases() if lease.conversation_id == case.name()]
        return len(held) == 1

    assert await until(one_left)
