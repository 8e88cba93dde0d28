"""DIRECT on a decode worker: what it goes on from, what it refuses before any token, and what it keeps."""

from typing import Any

import pytest
from keeper_kit import Bench, scope
from worker_kit import Answer, Pair, decode_request, open_pair, prompt, read_answer, scope_of, until

from kvloop.runtime.errors import Failure
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, sampling_pb2

HISTORY = prompt(150, 1)
SUFFIX = prompt(10, 2)
BLOCK = 16


async def first(pair: Pair) -> tuple[list[int], lease_pb2.DirectoryEntry]:
    """Play a turn; return the prompt that goes on from it, and its lease's entry."""
    one = await pair.play(HISTORY)
    entry = await pair.entry()
    assert entry is not None
    return [*HISTORY, *one.ids, *SUFFIX], entry


def terms(entry: lease_pb2.DirectoryEntry, **changes: Any) -> decode_service_pb2.DirectTerms:
    values = {"lease_id": entry.lease_id, "epoch": entry.epoch, "num_tokens": entry.num_tokens}
    return decode_service_pb2.DirectTerms(**(values | changes))


async def go_on(
    pair: Pair, ids: list[int], direct: decode_service_pb2.DirectTerms, tenant: str = "t", **fields: Any
) -> Answer:
    request = decode_request(ids, scope_of("c", tenant, start=2**51), **fields)
    request.direct.CopyFrom(direct)
    return await read_answer(pair.decode.Decode(request, timeout=20))


async def refused(pair: Pair, *args: Any, **fields: Any) -> str:
    with pytest.raises(Failure) as failure:
        await go_on(pair, *args, **fields)
    return failure.value.reason_name


async def test_it_goes_on_and_leaves_the_next_lease(pair: Pair) -> None:
    ids, entry = await first(pair)
    two = await go_on(pair, ids, terms(entry))
    assert two.ids == (await pair.cold(ids)).ids
    assert two.summary.tokens.d_local == entry.num_tokens // BLOCK * BLOCK
    assert two.summary.tokens.d_local + two.summary.tokens.computed == len(ids)
    assert not two.summary.HasField("handoff")
    held = await pair.leases()
    assert [(lease.num_tokens, lease.pins) for lease in held] == [(len(ids) + len(two.ids) - 1, 0)]
    await pair.close_conversation()
    await until(pair.all_free)


async def test_a_superseded_lease_leads_to_its_successor(pair: Pair) -> None:
    ids, entry = await first(pair)
    await go_on(pair, ids, terms(entry))
    again = await go_on(pair, ids, terms(entry))
    # The last token is computed even if its block is there.
    assert again.summary.tokens.d_local == (len(ids) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease_id": "unknown"}, "LEASE_NOT_FOUND"),
        ({"epoch": "old"}, "LEASE_EPOCH"),
        ({"num_tokens": 100_000}, "PREFIX_DIVERGED"),
        ({"lease_id": ""}, "INVALID_FIELD"),
        ({"num_tokens": 0}, "INVALID_FIELD"),
        ({"lease_id": "unknown", "soft": True}, "LEASE_NOT_FOUND"),
    ],
)
async def test_terms_that_do_not_hold(pair: Pair, changes: dict[str, Any], reason: str) -> None:
    ids, entry = await first(pair)
    assert await refused(pair, ids, terms(entry, **changes)) == reason
    assert [lease.pins for lease in await pair.leases()] == [0]
    await pair.close_conversation()
    await until(pair.all_free)


@pytest.mark.parametrize("at", [0, 149, 172])
async def test_a_changed_token(pair: Pair, at: int) -> None:
    ids, entry = await first(pair)
    assert at < entry.num_tokens
    ids[at] += 1
    assert await refused(pair, ids, terms(entry)) == "PREFIX_DIVERGED"


async def test_another_tenant_finds_nothing(pair: Pair) -> None:
    ids, entry = await first(pair)
    assert await refused(pair, ids, terms(entry), tenant="other") == "LEASE_NOT_FOUND"
    assert await refused(pair, ids, terms(entry, soft=True), tenant="other") == "LEASE_NOT_FOUND"


async def test_a_released_lease(pair: Pair) -> None:
    ids, entry = await first(pair)
    await pair.close_conversation()
    for soft in (False, True):
        assert await refused(pair, ids, terms(entry, soft=soft)) == "LEASE_NOT_FOUND"
    await until(pair.all_free)


async def test_a_hold_that_is_gone_without_a_word(pair: Pair) -> None:
    ids, entry = await first(pair)
    pair.decode_engine.core.table.release(entry.lease_id)
    assert await refused(pair, ids, terms(entry)) == "LEASE_NOT_FOUND"
    await until(pair.all_free)


async def test_prompt_logprobs_need_a_full_prefill(pair: Pair) -> None:
    ids, entry = await first(pair)
    sampling = sampling_pb2.SamplingParams(max_tokens=4, prompt_logprobs=1)
    assert await refused(pair, ids, terms(entry), sampling=sampling) == "INVALID_FIELD"


async def test_without_a_prefix_cache_nothing_is_gone_on_from() -> None:
    async with open_pair(decode_engine={"enable_prefix_caching": False}) as pair:
        ids, entry = await first(pair)
        assert await refused(pair, ids, terms(entry)) == "INCOMPATIBLE_ENGINES"


async def test_an_evicted_lease_is_gone_on_from_softly() -> None:
    async with open_pair(decode={"soft_hints": True}) as pair:
        ids, entry = await first(pair)
        assert pair.decode_engine.core.table.evict(entry.lease_id)

        async def softened() -> bool:
            now = await pair.entry()
            assert now is not None
            return not now.held

        await until(softened)
        assert await refused(pair, ids, terms(entry)) == "LEASE_NOT_FOUND"
        two = await go_on(pair, ids, terms(entry, soft=True))
        assert two.ids == (await pair.cold(ids)).ids
        assert two.summary.tokens.d_local == entry.num_tokens // BLOCK * BLOCK
        await pair.close_conversation()
        await until(pair.all_free)


TOKENS = pack(range(8))


async def test_soft_entries_go_when_the_conversation_ends() -> None:
    bench = Bench(soft_hints=True)
    kept = await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    assert kept.lease is not None
    await bench.keeper.lost(kept.lease)
    entry = (await bench.directory.lookup(scope().scope)).entry
    assert entry is not None
    assert not entry.held
    assert not await bench.keeper.release("a")
    assert await bench.standing(scope()) is None


async def test_a_late_eviction_leaves_the_newer_entry_alone() -> None:
    bench = Bench(soft_hints=True)
    one = await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    await bench.keeper.keep(scope("c", 2), TOKENS, bench.engine.hold("b", 8, 60.0))
    assert one.lease is not None
    await bench.keeper.lost(one.lease)
    entry = (await bench.directory.lookup(scope().scope)).entry
    assert entry is not None
    assert (entry.lease_id, entry.held) == ("b", True)


async def test_without_soft_hints_an_evicted_lease_is_not_named() -> None:
    bench = Bench()
    kept = await bench.keeper.keep(scope(), TOKENS, bench.engine.hold("a", 8, 60.0))
    assert kept.lease is not None
    await bench.keeper.lost(kept.lease)
    assert await bench.standing(scope()) is None
