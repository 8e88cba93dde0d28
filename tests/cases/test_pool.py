"""G: leases and the decode worker's memory."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cases_hooks import LONG, NOTHING_HELD, hooks, unheard
from cases_kit import Answer, Case, until
from cases_store import open_entries

from kvloop.connector.control import ControlClient


async def preemptions(case: Case) -> int:
    """Return how many running requests the small D has preempted since its start."""
    return int((await case.stack.info("d2")).counters.preemptions)


async def fill(case: Case) -> list[Answer]:
    """Leave leases at the small D until it has no budget for another; returns the turns, oldest first."""
    turns: list[Answer] = []
    while True:
        turns.append(await case.turn(unheard(200), case.name(f"fill{len(turns)}"), check=False, max_tokens=1))
        if len(await case.stack.leases("d2")) < len(turns):
            return turns
        assert len(turns) < 100


@pytest.mark.parametrize("router", ["small"])
@pytest.mark.case("G1", "served at once; leases turn SOFT")
async def test_pool_full_of_leases(case: Case, history: list[int]) -> None:
    turns = await fill(case)
    before = await preemptions(case)
    long = (history * 10)[:LONG]
    one = await case.turn(long, retention=NOTHING_HELD, max_tokens=4)
    case.expect(one, "RECOMPUTE", "NOT_FOUND", 0)
    left = {lease.lease_id for lease in await case.stack.leases("d2")}
    softened = [turn for turn in turns if turn.summary.lease.lease_id not in left]
    assert len(softened) > 1
    assert await preemptions(case) == before
    async with open_entries(case.stack) as entries:
        for turn in softened:
            assert not (await entries.entry(turn.summary.lease.lease_id)).held


@pytest.mark.parametrize("router", ["small"])
@pytest.mark.case("G2", "no preemption due to leases; reuse above stock")
async def test_twice_the_pool(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    length = 10 * stack.block_size
    conversations = 2 * (await stack.info("d2")).pool.total_blocks // 10
    before = await preemptions(case)
    reused = {"held": 0, "not held": 0}
    for kind, retention in (("held", None), ("not held", NOTHING_HELD)):
        waiting: list[tuple[str, list[int]]] = []
        fields = {} if retention is None else {"retention": retention}
        # Without leases nothing can be found, so that a few tell it.
        for number in range(conversations if retention is None else 6):
            name, prompt = case.name(f"{kind}{number}"), [*unheard(8), *history, *unheard(length)][:length]
            one = await case.turn(prompt, name, check=False, max_tokens=1, **fields)
            waiting.append((name, [*prompt, *one.ids, *suffix]))
            if number >= 3:  # each comes back after three others have been there
                name, prompt = waiting.pop(0)
                two = await case.turn(prompt, name, check=number == 3, max_tokens=1, **fields)
                reused[kind] += two.verdict == "READBACK"
                if kind == "held" and number == 3:
                    case.expect(two, "READBACK", "PROVEN", length)
    assert await preemptions(case) == before
    assert reused["held"] > conversations // 2
    assert reused["not held"] == 0
    await fill(case)
    await grow(case, answers=4, tokens=400)
    assert await preemptions(case) == before


async def grow(case: Case, *, answers: int, tokens: int) -> None:
    """Play long answers at once at the small D, which grow into blocks that are held."""
    free = (await case.stack.info("d2")).pool.free_blocks
    assert free < answers * tokens // case.stack.block_size
    turns = [
        case.turn(unheard(60), case.name(f"long{n}"), check=False, max_tokens=tokens, retention=NOTHING_HELD)
        for n in range(answers)
    ]
    assert [len(answer.ids) for answer in await asyncio.gather(*turns)] == [tokens] * answers


@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("G4", "right tokens, partial hit")
async def test_soft_lease_partly_overwritten(case: Case, history: list[int], suffix: list[int]) -> None:
    stack, size = case.stack, case.stack.block_size
    one = await case.turn(history)
    lease_id = one.summary.lease.lease_id
    async with hooks(stack, "d2") as holder:
        assert await holder.evict(lease_id)

    async def softened() -> bool:
        async with open_entries(stack) as entries:
            return not (await entries.entry(lease_id)).held

    assert await until(softened), "the lease is still held"
    # Free blocks are taken in the order in which they came free, and the lease's came last, its tail first.
    # So what leaves just `kept` blocks free has overwritten all but the lease's head.
    whole = one.summary.lease.num_tokens // size
    kept = whole // 2
    free = (await stack.info("d2")).pool.free_blocks
    await take(case, free - kept)
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "DIRECT", "PROVEN", 0)
    assert two.sources.d_local == kept * size


async def take(case: Case, blocks: int) -> None:
    """Have leases take so many of the small D's free blocks, to the block, then give them back."""
    stack = case.stack
    before = (await stack.info("d2")).pool.free_blocks
    names = []
    for part in (blocks // 2, blocks - blocks // 2):
        names.append(case.name(f"take{len(names)}"))
        # All but one token of the last block: the answer's only token has no KV.
        prompt = unheard(part * stack.block_size - 1)
        await case.turn(prompt, names[-1], check=False, max_tokens=1)
    assert before - (await stack.info("d2")).pool.free_blocks == blocks
    for name in names:
        await stack.end(name, router=case.router)


@contextmanager
def stopped_store(case: Case) -> Iterator[None]:
    pid = case.stack.fleet.parts["store"].facts["server_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def new_lease(holder: ControlClient, known: set[str]) -> str:
    """Return the lease of the next turn that ends, once the engine holds it."""

    async def there() -> set[str]:
        return {hold["lease_id"] for hold in await holder.list() if hold["kind"] == "decode"} - known

    (lease_id,) = await until(there)
    known.add(lease_id)
    return str(lease_id)


@pytest.mark.parametrize("router", ["small"])
@pytest.mark.case("G5", "newer entry survives")
async def test_eviction_races_publish(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    first = stack.start(stack.request(prompt, case.name(), max_tokens=80), router="small")
    begun = await anext(aiter(first))
    async with hooks(stack, "d2") as holder:
        known = {hold["lease_id"] for hold in await holder.list()}
        with stopped_store(case):
            # The turn ends and can't be published; its hold is evicted; a turn that started later ends too.
            lease_id = await new_lease(holder, known)
            assert await holder.evict(lease_id)
            three = asyncio.create_task(case.turn(prompt, max_tokens=4, check=False))
            newer = await new_lease(holder, known)
        await stack.finish(first, begun)
        answer = await three
    await case.compare(answer, prompt, max_tokens=4)

    async def settled() -> bool:
        held = [lease for lease in await stack.leases("d2") if lease.conversation_id == case.name()]
        async with open_entries(stack) as entries:
            return [lease.lease_id for lease in held] == [newer] and await entries.published(newer)

    assert await until(settled), "the newer lease's entry did not survive"
    four = await case.turn([*prompt, *answer.ids, *suffix])
    case.expect(four, "READBACK", "PROVEN", len(prompt) + len(answer.ids) - 1)
