"""E: what happens when time is over, or somebody takes long."""

import asyncio

import pytest
from cases_kit import Case, until
from cases_store import open_entries
from google.protobuf import duration_pb2

from kvloop.v1alpha1 import turn_pb2


def seconds(amount: int) -> turn_pb2.Retention:
    return turn_pb2.Retention(ttl=duration_pb2.Duration(seconds=amount))


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
    one = await case.turn(history, retention=seconds(8), check=False)
    async with open_entries(case.stack) as entries:
        # An entry that outlives its lease is what a lookup just before the end returns.
        key = await entries.key_of(one.summary.lease.lease_id)
        value = await entries.raw(key)
        await gone(case, one.summary.lease.lease_id)
        await entries.put(key, value)
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "RECOMPUTE", ("NOT_FOUND", "EXPIRED"), 0)


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("E6", "lease published in time, D not blocked")
async def test_client_reads_nothing(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    case.watch(case.name())
    call = stack.start(stack.request(history, case.name(), max_tokens=200), router=case.router)

    async def published() -> list[turn_pb2.Lease]:
        return [lease for lease in await stack.leases() if lease.conversation_id == case.name()]

    (lease,) = await until(published)
    assert lease.num_tokens == len(history) + 199
    other = await case.turn(history[:50], case.name("other"))
    assert other.ids
    slow = await stack.finish(call)
    assert len(slow.ids) == 200
    two = await case.turn([*history, *slow.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN")


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("E7", "reaped in order of deadline")
async def test_mixed_ttls(case: Case, history: list[int], suffix: list[int]) -> None:
    long = await case.turn(history, case.name("long"), retention=seconds(60), max_tokens=1)
    short = [
        await case.turn(
            [*history[:40], 300 + i], case.name(f"s{i}"), retention=seconds(7), max_tokens=1, check=False
        )
        for i in range(3)
    ]
    for answer in short:
        await gone(case, answer.summary.lease.lease_id)
    assert long.summary.lease.lease_id in {lease.lease_id for lease in await case.stack.leases()}
    two = await case.turn([*history, *long.ids, *suffix], case.name("long"))
    case.expect(two, "READBACK", "PROVEN", len(history))


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("E5", "DOOMED, read succeeds, freed after")
async def test_release_while_pinned(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    turn = asyncio.create_task(case.turn(prompt, check=False))

    async def pinned() -> bool:
        held = {lease.lease_id: lease for lease in await stack.leases()}
        lease = held.get(one.summary.lease.lease_id)
        return turn.done() or (lease is not None and lease.pins > 0)

    await until(pinned)
    await stack.end(case.name())
    two = await turn
    await case.compare(two, prompt)
    # Whether the release came while the read was on or after it, the read was right.
    case.expect(two, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)
