"""H, G3: the decode worker goes on from what it holds, or may still have, without a prefill leg."""

import pytest
from cases_kit import Answer, Case, until
from cases_store import open_entries

from kvloop.v1alpha1 import turn_pb2

pytestmark = pytest.mark.parametrize("router", ["main-direct"])


def expect_direct(case: Case, answer: Answer, held: int) -> None:
    """Assert that D itself found what was held: all of it, or its full blocks."""
    case.expect(answer, "DIRECT", "PROVEN", 0)
    size = case.stack.block_size
    assert answer.sources.d_local in (held, held // size * size)
    assert answer.summary.prefill_worker == ""
    assert not answer.summary.reuse.retried
    assert answer.readback_bytes == answer.summary.reuse.handoff.bytes == 0


@pytest.mark.case("H1", "DIRECT, 0 bytes, next turn still leased")
async def test_short_suffix(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    case.expect(one, "RECOMPUTE", "NOT_FOUND", 0)
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt)
    expect_direct(case, two, one.summary.lease.num_tokens)
    assert two.summary.lease.num_tokens == len(prompt) + len(two.ids) - 1
    held = [lease for lease in await case.stack.leases() if lease.conversation_id == case.name()]
    assert [lease.lease_id for lease in held] == [two.summary.lease.lease_id]
    assert held[0].pins == 0


@pytest.mark.case("H1", "DIRECT, 0 bytes, next turn still leased")
async def test_a_long_suffix_goes_through_p(case: Case, history: list[int]) -> None:
    one = await case.turn(history)
    long = (history * 4)[:600]
    # By the P without a prefix cache: the other one has most of it.
    two = await case.turn([*history, *one.ids, *long], router="direct")
    case.expect(two, "READBACK", "PROVEN", one.summary.lease.num_tokens)


@pytest.mark.case("H2", "FAILED_PRECONDITION inside, turn goes through P")
async def test_lease_gone_before_submit(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    async with open_entries(case.stack) as entries:
        # An entry that outlives its lease is what a lookup just before the end returns.
        key = await entries.key_of(one.summary.lease.lease_id)
        value = await entries.raw(key)
        await case.stack.end(case.name())
        await entries.put(key, value)
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    assert two.summary.prefill_worker
    assert not two.summary.reuse.retried
    # A lookup that finds nothing ends alike: it has to be D that refused what the router had chosen.
    told = await case.stack.explain(two, router=case.router)
    assert told.decided_verdict == turn_pb2.VERDICT_DIRECT
    assert told.lease_tokens == one.summary.lease.num_tokens
    assert told.direct_refused
    assert told.attempts == 1
    three = await case.turn([*history, *one.ids, *suffix, *two.ids, *suffix])
    expect_direct(case, three, two.summary.lease.num_tokens)


@pytest.mark.case("H3", "not DIRECT")
async def test_prompt_logprobs(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    two = await case.turn([*history, *one.ids, *suffix], prompt_logprobs=1)
    case.expect(two, "RECOMPUTE", "FULL_PREFILL_NEEDED", 0)


@pytest.mark.case("H4", "both reuse")
async def test_direct_direct_readback(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt)
    expect_direct(case, two, one.summary.lease.num_tokens)
    prompt = [*prompt, *two.ids, *suffix]
    three = await case.turn(prompt)
    expect_direct(case, three, two.summary.lease.num_tokens)
    four = await case.turn([*prompt, *three.ids, *suffix], router="bare")
    case.expect(four, "READBACK", "PROVEN", three.summary.lease.num_tokens)


async def push_out(case: Case, lease_id: str) -> None:
    """Fill D's budget of holds until a lease has to go."""
    pushed = 0
    while pushed < 200:
        if lease_id not in {lease.lease_id for lease in await case.stack.leases()}:
            break
        await case.turn([100 + pushed] * 200, case.name(f"push{pushed}"), check=False, max_tokens=1)
        pushed += 1

    async def softened() -> bool:
        async with open_entries(case.stack) as entries:
            return not (await entries.entry(lease_id)).held

    assert await until(softened), "the lease is still held"
    for number in range(pushed):
        await case.stack.end(case.name(f"push{number}"))


@pytest.mark.case("G3", "DIRECT hit")
async def test_soft_lease_whole(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    await push_out(case, one.summary.lease.lease_id)
    two = await case.turn([*history, *one.ids, *suffix])
    expect_direct(case, two, one.summary.lease.num_tokens)
