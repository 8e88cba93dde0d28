"""What happens without a guard: each of them is switched off, and the wrong thing comes about.

If one of these fails, its guard guards nothing that the cases would notice. The prompts are the tests' own
and reach no prefix cache but the small D's, under their own hashes.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from cases_hooks import hooks
from cases_kit import Answer, Stack, failure_of
from test_late import late_read

from kvloop.runtime.digests import prefix_digests, proof_lengths
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, turn_pb2


async def first(stack: Stack, history: list[int], conversation: str) -> Answer:
    one = await stack.turn(history, conversation, router="small")
    assert one.summary.lease.num_tokens
    return one


async def end_wrong(stack: Stack, answer: Answer, prompt: list[int], conversation: str) -> None:
    """Assert that a turn was answered from KV that is not its own."""
    cold = await stack.cold(prompt, router="small")
    await stack.end(conversation, router="small")
    assert answer.verdict == "READBACK"
    assert answer.ids != cold.ids or answer.logprobs != pytest.approx(cold.logprobs, abs=2e-2)


@pytest.mark.parametrize(("guard", "lie"), [("hash", "other"), ("counts", "twice")])
async def test_lies_are_believed(
    stack: Stack, history: list[int], suffix: list[int], guard: Any, lie: Any
) -> None:
    conversation = f"without-{guard}"
    one = await first(stack, history, conversation)
    prompt = [*history, *one.ids, *suffix]
    async with hooks(stack, "d2") as holder, hooks(stack, "p2") as reader:
        await holder.spoil(lie)
        await reader.guard(guard, False)
        two = await stack.turn(prompt, conversation, router="small")
    await end_wrong(stack, two, prompt, conversation)


async def test_what_has_run_out_is_read(stack: Stack, history: list[int], suffix: list[int]) -> None:
    conversation = "without-deadline"
    one = await first(stack, history, conversation)
    prompt = [*history, *one.ids, *suffix]
    async with hooks(stack, "p2") as reader:
        await reader.guard("deadline", False)
        async with late_read(stack, reader, one, prompt, conversation) as turn:
            await reader.stall(None)
            two = await turn
    await end_wrong(stack, two, prompt, conversation)


@pytest_asyncio.fixture(loop_scope="session")
async def unguarded(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[bool]:
    """Switch guards of the small D's BeginRead off, or leave them on."""
    if request.param:
        await stack.restart(("decode-1",), guards_off=["epoch", "scope"])
        await stack.ready()
    yield request.param
    if request.param:
        await stack.restart(("decode-1",), guards_off=[])
        await stack.ready()


@pytest.mark.parametrize("unguarded", [False, True], indirect=True)
async def test_strangers_and_old_epochs(stack: Stack, history: list[int], unguarded: bool) -> None:
    conversation = f"strangers-{unguarded}"
    one = await first(stack, history, conversation)
    lease, end = one.summary.lease, stack.decodes["d2"]
    info = await stack.info("d2")
    stranger = secrets.token_bytes(32)
    packed = pack([*history, *one.ids])
    lengths = proof_lengths(lease.num_tokens, stack.block_size)

    def read(epoch: str) -> Any:
        return end.decode.BeginRead(
            decode_service_pb2.BeginReadRequest(
                lease_id=lease.lease_id,
                epoch=epoch,
                scope=turn_pb2.TurnScope(digest_key=stranger, scope=stranger),
                prefix_lengths=lengths,
                prefix_digests=b"".join(prefix_digests(stranger, packed, lengths)),
                compatibility=info.compatibility,
            ),
            timeout=10,
        )

    if not unguarded:
        assert (await failure_of(read("0123456789abcdef"))).reason_name == "LEASE_EPOCH"
        assert (await failure_of(read(info.epoch))).reason_name == "LEASE_NOT_FOUND"
    else:
        for epoch in (info.epoch, "0123456789abcdef"):
            granted = await asyncio.wait_for(read(epoch), 10)
            assert granted.num_tokens == lease.num_tokens
            ended = decode_service_pb2.EndReadRequest(lease_id=lease.lease_id, read_id=granted.read_id)
            await end.decode.EndRead(ended, timeout=10)
    await stack.end(conversation, router="small")
