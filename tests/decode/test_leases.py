"""Leases seen from outside: sharing, succession, time, and a directory that fails (C6, D, E, F, G5)."""

import asyncio
from typing import Any

import pytest
from worker_kit import Pair, failing, open_pair, prompt, read_source, scope_of, until

from kvloop.metastore.factory import open_store
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.runtime.digests import prefix_digests, proof_lengths
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, turn_pb2

HISTORY = prompt(150, 1)
SUFFIX = prompt(40, 2)


def begin_request(
    pair: Pair, lease_id: str, ids: list[int] = HISTORY, tenant: str = "t", **change: Any
) -> decode_service_pb2.BeginReadRequest:
    scope = scope_of("c", tenant)
    lengths = proof_lengths(len(ids), 16)
    facts = pair.decode_engine.facts
    request = decode_service_pb2.BeginReadRequest(
        lease_id=lease_id,
        epoch=facts.epoch,
        scope=scope,
        prefix_lengths=lengths,
        prefix_digests=b"".join(prefix_digests(scope.digest_key, pack(ids), lengths)),
        compatibility=facts.compatibility,
    )
    for name, value in change.items():
        if isinstance(value, list):
            request.ClearField(name)  # type: ignore[arg-type]
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)
    return request


async def begin(pair: Pair, *args: Any, **kwargs: Any) -> decode_service_pb2.BeginReadResponse:
    answer: decode_service_pb2.BeginReadResponse = await failing(
        pair.decode.BeginRead(begin_request(pair, *args, **kwargs), timeout=10)
    )
    return answer


async def end(pair: Pair, lease_id: str, read_id: str) -> None:
    request = decode_service_pb2.EndReadRequest(lease_id=lease_id, read_id=read_id)
    await failing(pair.decode.EndRead(request, timeout=10))


async def refused(call: Any) -> str:
    with pytest.raises(Failure) as raised:
        await call
    return raised.value.reason_name


async def found(pair: Pair, conversation: str = "c") -> lease_pb2.ReadSource:
    entry = await pair.entry(conversation)
    assert entry is not None
    return read_source(entry)


def ttl(seconds: float) -> turn_pb2.Retention:
    retention = turn_pb2.Retention()
    retention.ttl.FromNanoseconds(int(seconds * 1e9))
    return retention


async def test_c6_an_entry_of_an_old_epoch(pair: Pair) -> None:
    await pair.play(HISTORY)
    entry = await pair.entry()
    assert entry is not None
    entry.epoch = "before"
    await pair.store.directory.publish(scope_of("c").scope, entry, 60)
    answer = await pair.play([*HISTORY, *SUFFIX])
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", "EPOCH")
    assert answer.ids == (await pair.cold([*HISTORY, *SUFFIX])).ids


async def test_d1_d2_reads_do_not_consume(pair: Pair) -> None:
    await pair.play(HISTORY)
    source = await found(pair)
    forks = [[*HISTORY, *prompt(30, seed)] for seed in range(7)]
    one = [await pair.play(ids, f"fork{i}", source=source) for i, ids in enumerate(forks[:2])]
    more = await asyncio.gather(*(pair.play(ids, f"f{i}", source=source) for i, ids in enumerate(forks[2:])))
    for ids, answer in zip(forks, [*one, *more], strict=True):
        assert (answer.verdict, answer.reason) == ("READBACK", "PROVEN")
        assert answer.ids == (await pair.cold(ids)).ids


async def test_d3_a_superseded_lease_is_served_by_its_successor(pair: Pair) -> None:
    await pair.play(HISTORY)
    source = await found(pair)
    forks = [[*HISTORY, *prompt(30, seed)] for seed in range(3)]
    first = await pair.play(forks[0])
    assert first.summary.lease.lease_id != source.lease_id
    assert [lease.lease_id for lease in await pair.leases()] == [first.summary.lease.lease_id]
    for ids in forks[1:]:
        answer = await pair.play(ids, scope=scope_of("other"), source=source)
        assert (answer.verdict, answer.reason) == ("READBACK", "PROVEN")
        assert answer.reuse.tokens.readback >= len(HISTORY) // 16 * 16
        assert answer.ids == (await pair.cold(ids)).ids

    async def unpinned() -> bool:
        return all(lease.pins == 0 for lease in await pair.leases())

    await until(unpinned)


@pytest.mark.parametrize("later_first", [True, False])
async def test_d4_the_later_started_turn_s_lease_stands(pair: Pair, later_first: bool) -> None:
    starts = [2, 1] if later_first else [1, 2]
    left = []
    for start in starts:
        one = await pair.play([*HISTORY, start], scope=scope_of("c", start=start))
        left.append(one.summary.HasField("lease"))
    assert left == [True, not later_first]
    entry = await pair.entry()
    assert entry is not None
    assert entry.turn_start_us == 2
    assert [lease.lease_id for lease in await pair.leases()] == [entry.lease_id]
    await pair.close_conversation()
    await until(pair.all_free)


async def test_d5_two_turns_at_once_leave_one_lease(pair: Pair) -> None:
    turns = [[*HISTORY, seed] for seed in range(6)]
    answers = await asyncio.gather(*(pair.play(ids) for ids in turns))
    for ids, answer in zip(turns, answers, strict=True):
        assert answer.ids == (await pair.cold(ids)).ids
    [lease] = await pair.leases()
    entry = await pair.entry()
    assert entry is not None
    assert entry.lease_id == lease.lease_id
    await pair.close_conversation()
    await until(pair.all_free)


async def test_another_worker_s_displaced_lease_is_reported(pair: Pair) -> None:
    await pair.play(HISTORY)
    entry = await pair.entry()
    assert entry is not None
    entry.lease_id, entry.decode_endpoint = "elsewhere", "127.0.0.1:9"
    await pair.store.directory.publish(scope_of("c").scope, entry, 60)
    answer = await pair.run_decode([*HISTORY, 5], scope_of("c", start=entry.turn_start_us + 1), None)
    assert answer.summary.displaced.lease_id == "elsewhere"
    assert answer.summary.displaced.decode_endpoint == "127.0.0.1:9"
    # The older lease of this worker is superseded all the same.
    assert [lease.lease_id for lease in await pair.leases()] == [answer.summary.lease.lease_id]


async def test_e1_time_over_before_lookup() -> None:
    async with open_pair(decode={"directory_margin_s": 0.0}) as pair:
        await pair.play(HISTORY, retention=ttl(0.2))

        async def gone() -> bool:
            return await pair.entry() is None

        await until(gone)
        answer = await pair.play([*HISTORY, *SUFFIX])
        assert (answer.verdict, answer.reason) == ("RECOMPUTE", "NOT_FOUND")


async def test_e2_time_over_between_lookup_and_read(pair: Pair) -> None:
    await pair.play(HISTORY)
    source = await found(pair)
    pair.decode_engine.faults.jump_clock(100)

    async def forgotten() -> bool:
        return await pair.entry() is None

    await until(forgotten)
    answer = await pair.play([*HISTORY, *SUFFIX], source=source)
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", "EXPIRED")
    assert answer.ids == (await pair.cold([*HISTORY, *SUFFIX])).ids


async def test_a_lost_event_of_an_ending_costs_nothing(pair: Pair) -> None:
    await pair.play(HISTORY)
    pair.decode_engine.faults.drop_hold_events = 1
    pair.decode_engine.faults.jump_clock(100)
    answer = await pair.play([*HISTORY, *SUFFIX])
    assert answer.verdict == "RECOMPUTE"
    assert answer.reason in {"NOT_FOUND", "EXPIRED"}
    # The keeper learned of it when it asked for a read.
    assert [lease.lease_id for lease in await pair.leases()] == [answer.summary.lease.lease_id]


async def test_ttl_is_capped() -> None:
    async with open_pair(decode={"max_ttl_s": 90.0}) as pair:
        one = await pair.play(HISTORY, retention=ttl(10_000))
        assert one.summary.lease.remaining_time.seconds <= 90


async def test_e5_released_while_pinned(pair: Pair) -> None:
    one = await pair.play(HISTORY)
    lease_id = one.summary.lease.lease_id
    grant = await begin(pair, lease_id)
    release = decode_service_pb2.ReleaseLeaseRequest(lease_id=lease_id)
    assert (await failing(pair.decode.ReleaseLease(release, timeout=10))).released
    [lease] = await pair.leases()
    assert (lease.state, lease.pins) == (turn_pb2.LEASE_STATE_DOOMED, 1)
    assert await pair.entry() is None
    assert await refused(begin(pair, lease_id)) == "LEASE_NOT_FOUND"
    assert not await pair.decode_is_free()
    assert not (await failing(pair.decode.ReleaseLease(release, timeout=10))).released
    for _ in range(2):
        await end(pair, lease_id, grant.read_id)
    assert await pair.leases() == []
    await until(pair.decode_is_free)


async def test_e7_mixed_deadlines_are_reaped_in_order(pair: Pair) -> None:
    order = [(i * 37) % 50 for i in range(50)]
    for i in order:
        await pair.play(prompt(20, i), f"c{i}", retention=ttl(100.0 + 10 * i))
    listed = await pair.leases()
    assert [lease.conversation_id for lease in listed] == [f"c{i}" for i in range(50)]
    pair.decode_engine.faults.jump_clock(99.0)
    for left in (35, 10, 0):
        pair.decode_engine.faults.jump_clock(10.0 * (len(await pair.leases()) - left))

        async def reaped(left: int = left) -> bool:
            return len(await pair.leases()) == left

        await until(reaped)
        assert [lease.conversation_id for lease in await pair.leases()] == [
            f"c{i}" for i in range(50 - left, 50)
        ]
    await until(pair.decode_is_free)


async def test_lists_are_paged(pair: Pair) -> None:
    for i in range(7):
        await pair.play(prompt(20, i), f"c{i}", retention=ttl(100.0 + i))
    token, names, pages = "", [], 0
    while True:
        request = decode_service_pb2.ListLeasesRequest(page_size=3, page_token=token)
        page = await failing(pair.decode.ListLeases(request, timeout=10))
        names += [lease.conversation_id for lease in page.leases]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert (names, pages) == ([f"c{i}" for i in range(7)], 3)


async def test_f5_a_lost_entry(pair: Pair) -> None:
    one = await pair.play(HISTORY)
    await pair.store.directory.remove(scope_of("c").scope, one.summary.lease.lease_id)
    two = await pair.play([*HISTORY, *SUFFIX])
    assert (two.verdict, two.reason) == ("RECOMPUTE", "NOT_FOUND")
    # The lease that nobody could find any more went with its successor's publication.
    assert [lease.lease_id for lease in await pair.leases()] == [two.summary.lease.lease_id]


class Moody:
    """A directory that is down when told to be."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self.down = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._directory, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def guarded(*args: Any) -> Any:
            if self.down:
                raise DirectoryUnavailable
            return await method(*args)

        return guarded


@pytest.mark.parametrize("recovers", [True, False])
async def test_f7_directory_down_at_publish(recovers: bool) -> None:
    store = open_store("memory://")
    moody = Moody(store.directory)
    object.__setattr__(store, "directory", moody)
    async with open_pair(store=store, decode={"publish_bound_s": 60.0 if recovers else 0.2}) as pair:
        scope = scope_of("c", start=5)
        prefilled = await pair.run_prefill(HISTORY, scope, None)
        moody.down = True
        one = await pair.run_decode(HISTORY, scope, prefilled)
        assert len(one.ids) == 24
        if recovers:
            moody.down = False
            entry = await until(pair.entry)
            assert entry.lease_id == one.summary.lease.lease_id
            two = await pair.play([*HISTORY, *SUFFIX])
            assert two.verdict == "READBACK"
        else:
            await until(pair.decode_is_free)
            moody.down = False
            two = await pair.play([*HISTORY, *SUFFIX])
            assert (two.verdict, two.reason) == ("RECOMPUTE", "NOT_FOUND")


async def test_g5_an_eviction_leaves_the_newer_entry(pair: Pair) -> None:
    await pair.play(HISTORY)
    old = await found(pair)
    pair.decode_engine.faults.evict(old.lease_id)
    two = await pair.play([*HISTORY, *SUFFIX])
    entry = await pair.entry()
    assert entry is not None
    assert entry.lease_id == two.summary.lease.lease_id


async def test_an_evicted_lease_leaves_the_directory(pair: Pair) -> None:
    await pair.play(HISTORY)
    source = await found(pair)
    pair.decode_engine.faults.evict(source.lease_id)

    async def removed() -> bool:
        return await pair.entry() is None

    await until(removed)
    answer = await pair.play([*HISTORY, *SUFFIX], source=source)
    assert (answer.verdict, answer.reason) == ("RECOMPUTE", "NOT_FOUND")
    await until(pair.leases)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": ""}, "LEASE_EPOCH"),
        ({"compatibility": "another"}, "INCOMPATIBLE_ENGINES"),
        ({"tenant": "other"}, "LEASE_NOT_FOUND"),
        ({"ids": prompt(100, 77)}, "PREFIX_DIVERGED"),
        ({"prefix_lengths": []}, "INVALID_FIELD"),
        ({"prefix_lengths": [0, 16]}, "INVALID_FIELD"),
        ({"prefix_lengths": [32, 16]}, "INVALID_FIELD"),
        ({"prefix_lengths": [16, 16]}, "INVALID_FIELD"),
        ({"prefix_digests": b"short"}, "INVALID_FIELD"),
    ],
)
async def test_reads_that_are_refused(pair: Pair, change: dict[str, Any], reason: str) -> None:
    one = await pair.play(HISTORY)
    lease_id = one.summary.lease.lease_id
    assert await refused(begin(pair, lease_id, **change)) == reason
    [lease] = await pair.leases()
    assert lease.pins == 0
    assert (await begin(pair, lease_id)).num_tokens == len(HISTORY)


async def test_pins_are_capped_and_lapse_by_themselves(pair: Pair) -> None:
    one = await pair.play(HISTORY)
    request = begin_request(pair, one.summary.lease.lease_id)
    request.pin_time.FromSeconds(100_000)
    grant = await failing(pair.decode.BeginRead(request, timeout=10))
    assert grant.pin_time.seconds <= 120
    await pair.close_conversation()
    assert [lease.state for lease in await pair.leases()] == [turn_pb2.LEASE_STATE_DOOMED]
    pair.decode_engine.faults.jump_clock(121)
    await until(pair.decode_is_free)
    assert await pair.leases() == []


async def test_a_draining_worker_serves_leases_until_the_limit() -> None:
    async with open_pair(decode={"drain_limit_s": 0.5}) as pair:
        await pair.play(HISTORY)
        source = await found(pair)
        draining = asyncio.create_task(pair.decode_app.drain())

        async def closed() -> bool:
            try:
                await pair.run_decode(HISTORY, scope_of("x", start=1), None)
            except Failure as failure:
                return failure.reason == Reason.ERROR_REASON_DRAINING
            return False

        await until(closed)
        answer = await pair.run_prefill([*HISTORY, *SUFFIX], scope_of("c"), source)
        assert answer.reuse.verdict == turn_pb2.VERDICT_READBACK
        await draining
        assert await pair.entry() is None
        await until(pair.decode_is_free)


async def test_stopping_takes_the_entries_away() -> None:
    async with open_pair() as pair:
        await pair.play(HISTORY)
        await pair.decode_app.stop()
        assert await pair.entry() is None
        assert not [
            worker for worker in (await pair.store.registry.workers()).values() if worker.role == "decode"
        ]
