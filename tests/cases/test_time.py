"""E: what happens when time is over, or somebody takes long."""

import asyncio
import time
from typing import Any, Literal

import pytest
from cases_hooks import hooks, let_go, pinned
from cases_kit import DEADLINE_S, SETTLE_S, Answer, Case, Endpoint, same, until
from cases_store import open_entries
from google.protobuf import duration_pb2

from kvloop.runtime import tokens
from kvloop.v1alpha1 import decode_service_pb2, router_service_pb2, turn_pb2


def seconds(amount: float) -> turn_pb2.Retention:
    retention = turn_pb2.Retention(ttl=duration_pb2.Duration())
    retention.ttl.FromNanoseconds(int(amount * 1e9))
    return retention


async def gone(case: Case, lease_id: str) -> None:
    """Wait until D no longer lists a lease."""

    async def absent() -> bool:
        return lease_id not in {lease.lease_id for lease in await case.stack.leases()}

    assert await until(absent), "the lease outlived its time"


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("E1", "RECOMPUTE (expired / not found)")
async def test_ttl_over_before_lookup(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history, retention=seconds(7), check=False)
    await gone(case, one.summary.lease.lease_id)
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", ("NOT_FOUND", "EXPIRED"), 0)


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("E2", "RECOMPUTE (expired / not found)")
async def test_ttl_over_between_lookup_and_read(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history, retention=seconds(6), check=False)
    async with open_entries(stack) as entries:
        # An entry that outlives its lease is what a lookup just before the end returns.
        key = await entries.outlive(one.summary.lease.lease_id)
        value = await entries.raw(key)
        await gone(case, one.summary.lease.lease_id)

        async def removed() -> bool:
            return not await entries.standing([key])

        # D takes the entry away once, and then not the one that the turn is to find.
        assert await until(removed), "D leaves the entry of a lease that is over"
        await entries.put(key, value)
    two = await case.turn([*history, *one.ids, *suffix])
    # Had the lookup found nothing, or D known no such lease, the reason were NOT_FOUND.
    case.expect(two, "RECOMPUTE", "EXPIRED", 0)
    told = await stack.explain(two, router=case.router)
    assert told.decided_verdict == turn_pb2.VERDICT_READBACK
    assert told.lease_tokens == one.summary.lease.num_tokens


NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
"""A reader that is sent 4 KiB ahead of its reading; what is more waits at the sender."""
LENGTH = 120
LONG = {"max_tokens": LENGTH, "logprobs": 10}
"""An answer of 20 KiB and more."""


def decoding(request: router_service_pb2.GenerateRequest) -> decode_service_pb2.DecodeRequest:
    """Return the same turn as D is asked for it, without a prefill leg."""
    name = request.conversation_id
    return decode_service_pb2.DecodeRequest(
        request_id=name,
        scope=turn_pb2.TurnScope(
            scope=name.encode().ljust(32), digest_key=bytes(32), cache_salt=name, conversation_id=name
        ),
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
    )


def answer_of(responses: list[decode_service_pb2.DecodeResponse]) -> Answer:
    """Return what a leg answered."""
    chunks = [response.chunk for response in responses]
    return Answer(
        ids=tokens.unpack(b"".join(chunk.token_ids for chunk in chunks)),
        text="".join(chunk.text for chunk in chunks),
        logprobs=[position.candidates[0].logprob for chunk in chunks for position in chunk.logprobs],
        summary=turn_pb2.Summary(),
    )


async def read_at_last(call: Any) -> list[Any]:
    """Read a stream that nobody has read so far."""
    responses = [response async for response in call]
    # What found no room was merged meanwhile. Without such a chunk nothing was ever full.
    assert max(len(tokens.unpack(response.chunk.token_ids)) for response in responses) > 32
    return responses


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("E6", "lease published in time, D not blocked")
async def test_client_reads_nothing(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    case.watch(case.name())
    client = Endpoint(stack.routers[case.router].address, NARROW)
    # The router reads for its clients. Somebody who does not read from D either is as a router that is stuck.
    stuck = Endpoint(stack.decodes["d1"].address, NARROW)
    request = stack.request(history, case.name(), **LONG)
    unread = client.router.Generate(request, timeout=DEADLINE_S, metadata=stack.credentials("alpha"))
    request = stack.request(history, case.name("stuck"), **LONG)
    unread_leg = stuck.decode.Decode(decoding(request), timeout=DEADLINE_S)

    async def published() -> list[turn_pb2.Lease]:
        names = {case.name(), case.name("stuck")}
        found = [lease for lease in await stack.leases() if lease.conversation_id in names]
        there = [await entries.published(lease.lease_id) for lease in found]
        return found if len(found) == len(names) and all(there) else []

    async with open_entries(stack) as entries:
        await case.turn(history[:50], case.name("beside"))
        leases = await until(published)
    assert leases, "no lease without a reader"
    assert {lease.num_tokens for lease in leases} == {len(history) + LENGTH - 1}
    after = await case.turn(history[:60], case.name("after"))
    assert after.summary.decode_worker == stack.parts["d1"]
    slow = await stack.finish(unread, *await read_at_last(unread))
    assert len(slow.ids) == LENGTH
    # D had nothing to go on from for the other one.
    assert same(slow, answer_of(await read_at_last(unread_leg)))
    for end in (client, stuck):
        await end.channel.close()
    (left,) = [lease.lease_id for lease in leases if lease.conversation_id == case.name("stuck")]
    await stack.decodes["d1"].decode.ReleaseLease(
        decode_service_pb2.ReleaseLeaseRequest(lease_id=left), timeout=10
    )
    two = await case.turn([*history, *slow.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN", len(history) + LENGTH - 1)


SHORT = 50
STEP_S = 0.06
"""Between the deadlines of two leases."""
CLOSE_S = 0.05
"""Deadlines that are no further apart may change places on their way here."""


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("E7", "reaped in order of deadline")
async def test_mixed_ttls(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    long = await case.turn(history, case.name("long"), retention=seconds(300), max_tokens=1)
    async with open_entries(stack) as entries:

        async def leave(number: int, least_s: float) -> tuple[str, bytes]:
            retention = seconds(least_s + STEP_S * (number * 17 % SHORT))
            answer = await case.turn(
                [300 + number] * 5, case.name(f"s{number}"), retention=retention, max_tokens=1, check=False
            )
            lease_id = answer.summary.lease.lease_id
            # An entry's own time is shorter than its lease's; it is to go by what D does.
            return lease_id, await entries.outlive(lease_id)

        async def leave_all(least_s: float) -> dict[bytes, float]:
            keys = dict(await asyncio.gather(*(leave(number, least_s) for number in range(SHORT))))
            asked = time.monotonic()
            return {
                keys[lease.lease_id]: asked + lease.remaining_time.ToNanoseconds() / 1e9
                for lease in await stack.leases()
                if lease.lease_id in keys
            }

        # All of them are to be there at once, however busy the machine: later ones take the former's place.
        for least_s in (2.0, 15.0) if stack.model is None else (12.0, 45.0):
            due = await leave_all(least_s)
            if len(due) == SHORT:
                break
        assert len(due) == SHORT, "some leases were over before the last one came"
        seen: set[int] = set()

        async def reaped() -> bool:
            left = await entries.standing(list(due))
            over = {deadline for key, deadline in due.items() if key not in left}
            soonest = min((due[key] for key in left), default=float("inf"))
            latest = max(over, default=0.0)
            assert latest <= time.monotonic(), "a lease was over ahead of its time"
            assert latest <= soonest + CLOSE_S, "a lease was over ahead of one that was due before it"
            seen.add(len(left))
            return not left

        assert await until(reaped, least_s + SETTLE_S), "some leases outlived their time"
    # Had they gone at once, or in few heaps, their order would have been anybody's guess.
    assert len(seen) >= 10
    assert long.summary.lease.lease_id in {lease.lease_id for lease in await stack.leases()}
    two = await case.turn([*history, *long.ids, *suffix], case.name("long"))
    case.expect(two, "READBACK", "PROVEN", len(history))


# The P that reads has a prefix cache, and has not computed the history, which it is to read.
@pytest.mark.parametrize("router", ["main"])
@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.case("E5", "DOOMED, read succeeds, freed after")
async def test_release_while_pinned(
    case: Case, history: list[int], suffix: list[int], where: Literal["start", "end"]
) -> None:
    stack = case.stack
    one = await case.turn(history, router="bare")
    lease_id, prompt = one.summary.lease.lease_id, [*history, *one.ids, *suffix]

    async def listed() -> dict[str, turn_pb2.Lease]:
        return {lease.lease_id: lease for lease in await stack.leases()}

    async with hooks(stack, "p1") as reader:
        # Let go of before the first block is read, and before the read is seen to end.
        await reader.stall(where)
        turn = asyncio.create_task(case.turn(prompt, check=False))
        await pinned(stack, "d1", lease_id)
        before, blocks = (await listed())[lease_id], await stack.free_blocks()
        assert before.state == turn_pb2.LEASE_STATE_LIVE
        assert await stack.end(case.name())
        doomed = (await listed()).get(lease_id)
        assert doomed is not None, "a lease that is being read is gone"
        assert doomed.state == turn_pb2.LEASE_STATE_DOOMED
        assert (doomed.pins, doomed.num_blocks) == (1, before.num_blocks)
        assert (await stack.free_blocks())["d1"] == blocks["d1"] == case.free_before["d1"] - before.num_blocks
        assert not turn.done()
        await reader.stall(None)
        two = await turn
    case.expect(two, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)
    assert not two.summary.reuse.retried
    await let_go(stack, "d1", lease_id)
    mine = (await listed())[two.summary.lease.lease_id]

    async def freed() -> bool:
        return (await stack.free_blocks())["d1"] == case.free_before["d1"] - mine.num_blocks

    assert await until(freed), "the blocks of a lease that is gone are not free"
    await case.compare(two, prompt)
