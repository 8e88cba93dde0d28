"""E3, E4: somebody is away for longer than blocks are held for him."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cases_hooks import frozen, hooks, let_go, overwrite, pinned, unheard
from cases_kit import Answer, Case, Stack, until

from kvloop.connector.control import ControlClient
from kvloop.runtime import tokens
from kvloop.v1alpha1 import prefill_service_pb2, router_service_pb2, turn_pb2


@asynccontextmanager
async def late_read(
    stack: Stack, reader: ControlClient, one: Answer, prompt: list[int], conversation: str
) -> AsyncIterator["asyncio.Task[Answer]"]:
    """Have P begin a turn that reads from the small D, and meanwhile take the lease and its blocks away.

    Yields the turn while P's read waits for its start; the hook is off when this ends.
    """
    lease_id = one.summary.lease.lease_id
    await reader.stall("start")
    turn = asyncio.create_task(stack.turn(prompt, conversation, router="small"))
    await pinned(stack, "d2", lease_id)
    await stack.end(conversation, router="small-direct")
    await let_go(stack, "d2", lease_id)
    await overwrite(stack, "small-direct", "d2")
    yield turn
    await reader.stall(None)


# The P that reads has a prefix cache, and has not computed the history, which it is to read.
@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("E3", "guard refuses, cold retry")
async def test_prefill_stopped_mid_read(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history, router="small")
    lease_id, prompt = one.summary.lease.lease_id, [*history, *one.ids, *suffix]
    async with hooks(stack, "p1") as reader:
        # The read has begun and is not seen to end before the process stops.
        await reader.stall("end")
        readback = router_service_pb2.REUSE_POLICY_READBACK
        turn = asyncio.create_task(case.turn(prompt, check=False, reuse_policy=readback))
        await pinned(stack, "d2", lease_id)
        with frozen(stack, "p1"):
            await stack.end(case.name(), router="small")
            await let_go(stack, "d2", lease_id)
            await overwrite(stack, "small", "d2")
        await reader.stall(None)
        two = await turn
    case.expect(two, "RECOMPUTE", "READ_FAILED", 0)
    assert two.summary.reuse.retried
    await case.compare(two, prompt)


@pytest.mark.parametrize("router", ["small"])
@pytest.mark.case("E4", "D's guard refuses, retry")
async def test_pause_between_the_legs(case: Case, history: list[int]) -> None:
    stack = case.stack

    async with hooks(stack, "p2") as prefill, hooks(stack, "d2") as decode:
        await decode.stall("start")
        turn = asyncio.create_task(case.turn(history, check=False))

        async def handed_over() -> bool:
            return any(hold["kind"] == "prefill" for hold in await prefill.list())

        async def over() -> bool:
            return not await handed_over()

        assert await until(handed_over), "P holds nothing for D"
        assert await until(over, 45.0), "P holds its blocks on and on"
        await other_traffic(stack)
        await decode.stall(None)
        answer = await turn
    case.expect(answer, "RECOMPUTE", "NOT_FOUND", 0)
    # P has told the answer's first token by then, so that the answer goes on where it would have begun anew.
    assert answer.summary.migrated
    await case.compare(answer, history)


async def other_traffic(stack: Stack) -> None:
    """Have P compute prompts that nobody fetches."""
    stub = stack.prefills["p2"].prefill
    for number in range(3):
        name = f"traffic-{number}"
        request = prefill_service_pb2.PrefillRequest(
            request_id=name,
            prompt_token_ids=tokens.pack(unheard(500)),
            cold_reason=turn_pb2.REUSE_REASON_NO_CONVERSATION,
        )
        await stub.Prefill(request, timeout=30)
        await stub.ReleasePrefill(prefill_service_pb2.ReleasePrefillRequest(request_id=name), timeout=10)
