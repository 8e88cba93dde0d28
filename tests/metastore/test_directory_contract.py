"""What every directory does, on every store."""

import asyncio

import pytest
from store_servers import until

from kvloop.metastore import codec
from kvloop.metastore.factory import Store
from kvloop.metastore.port import (
    DirectoryUnavailable,
    LeaseDirectory,
    Outage,
    Renewal,
    Standing,
)
from kvloop.v1alpha1 import lease_pb2

SCOPE = b"\x00\xff" * 16
OTHER = b"\x01" * 32
GROUP = b"\x02" * 32


def entry(lease_id: str, start_us: int = 1, **fields: object) -> lease_pb2.DirectoryEntry:
    made = lease_pb2.DirectoryEntry(
        version=codec.ENTRY_VERSION,
        lease_id=lease_id,
        conversation_id="c",
        decode_endpoint="[::1]:50052",
        epoch="e",
        num_tokens=100,
        block_size=16,
        turn_start_us=start_us,
        held=True,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def _gone(directory: LeaseDirectory) -> bool:
    return (await directory.lookup(SCOPE)).entry is None


async def _lapsed(directory: LeaseDirectory) -> bool:
    return not await directory.is_alive(SCOPE)


@pytest.fixture
def directory(store: Store) -> LeaseDirectory:
    return store.directory


async def test_an_empty_directory_has_nothing_but_the_time(directory: LeaseDirectory) -> None:
    first = await directory.lookup(SCOPE)
    second = await directory.lookup(SCOPE)
    assert first.entry is None
    assert first.remaining_s == 0
    assert 0 < first.turn_start_us <= second.turn_start_us


async def test_what_was_published_is_found_whole(directory: LeaseDirectory) -> None:
    published = entry("a")
    published.digests.add(num_tokens=100, digest=b"\x00\x80\xff12345")
    answer = await directory.publish(SCOPE, published, 60)
    assert answer.won
    assert answer.displaced is None
    found = await directory.lookup(SCOPE)
    assert found.entry == published
    assert 0 < found.remaining_s <= 60
    assert (await directory.lookup(OTHER)).entry is None


async def test_the_version_is_set_for_the_caller(directory: LeaseDirectory) -> None:
    published = entry("a", version=0)
    await directory.publish(SCOPE, published, 60)
    assert published.version == 0
    found = (await directory.lookup(SCOPE)).entry
    assert found is not None
    assert found.version == codec.ENTRY_VERSION


@pytest.mark.parametrize(
    ("standing", "coming", "won"),
    [(1000, 999, False), (1000, 1000, True), (1000, 1001, True), (1000, 0, False), (0, 0, True)],
)
async def test_the_turn_that_started_later_wins(
    directory: LeaseDirectory, standing: int, coming: int, won: bool
) -> None:
    first, second = entry("a", standing), entry("b", coming)
    await directory.publish(SCOPE, first, 60)
    answer = await directory.publish(SCOPE, second, 60)
    assert answer.won == won
    assert answer.displaced == (first if won else None)
    assert (await directory.lookup(SCOPE)).entry == (second if won else first)


async def test_the_same_lease_may_refresh_and_change(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a", 5), 60)
    changed = entry("a", 4, held=False)
    answer = await directory.publish(SCOPE, changed, 600)
    assert answer.won
    assert answer.displaced is None
    found = await directory.lookup(SCOPE)
    assert found.entry == changed
    assert found.remaining_s > 60


async def test_a_start_ahead_of_the_clock_does_not_block_later_turns(directory: LeaseDirectory) -> None:
    now_us = (await directory.lookup(SCOPE)).turn_start_us
    ahead = entry("a", now_us + 3_600_000_000)
    await directory.publish(SCOPE, ahead, 60)
    answer = await directory.publish(SCOPE, entry("b", now_us), 60)
    assert answer.won
    assert answer.displaced == ahead


async def test_a_lease_without_time_left_is_not_published(directory: LeaseDirectory) -> None:
    for ttl_s in (0, -1, 0.0009, float("-inf")):
        answer = await directory.publish(SCOPE, entry("a"), ttl_s)
        assert not answer.won
    assert (await directory.lookup(SCOPE)).entry is None


async def test_no_lease_is_for_ever(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a"), float("inf"))
    assert (await directory.lookup(SCOPE)).remaining_s <= 7 * 24 * 3600


async def test_a_lease_goes_when_its_time_is_over(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a"), 0.05)
    await until(lambda: _gone(directory))
    assert (await directory.publish(SCOPE, entry("b", 0), 60)).displaced is None


async def test_removal_is_the_lease_s_own(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a"), 60)
    assert not await directory.remove(SCOPE, "b")
    assert not await directory.remove(OTHER, "a")
    assert (await directory.lookup(SCOPE)).entry is not None
    assert await directory.remove(SCOPE, "a")
    assert (await directory.lookup(SCOPE)).entry is None
    assert not await directory.remove(SCOPE, "a")


async def test_sessions_are_alive_for_a_while(directory: LeaseDirectory) -> None:
    assert not await directory.is_alive(SCOPE)
    await directory.set_alive(SCOPE, 60)
    assert await directory.is_alive(SCOPE)
    assert not await directory.is_alive(OTHER)
    assert (await directory.lookup(SCOPE)).entry is None
    await directory.set_alive(SCOPE, 0.05)
    await until(lambda: _lapsed(directory))


async def test_an_entry_is_prolonged_while_a_session_is_open(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a"), 30)
    assert await directory.renew([Renewal(SCOPE, "a", 60)]) == [Standing.IDLE]
    assert (await directory.lookup(SCOPE)).remaining_s <= 30
    await directory.set_alive(SCOPE, 60)
    assert await directory.renew([Renewal(SCOPE, "a", 60)]) == [Standing.RENEWED]
    found = await directory.lookup(SCOPE)
    assert found.entry == entry("a")
    assert 30 < found.remaining_s <= 60
    assert await directory.renew([Renewal(SCOPE, "a", 1)]) == [Standing.RENEWED]
    assert (await directory.lookup(SCOPE)).remaining_s > 30


async def test_renewals_are_answered_in_order_whatever_became_of_the_entry(directory: LeaseDirectory) -> None:
    scopes = [number.to_bytes(2, "big") * 16 for number in range(1, 301)]
    for number, scope in enumerate(scopes):
        await directory.set_alive(scope, 60)
        if number % 3:
            await directory.publish(scope, entry("mine" if number % 3 == 1 else "other"), 30)
    by_rest = {0: Standing.MISSING, 1: Standing.RENEWED, 2: Standing.REPLACED}
    expected = [by_rest[number % 3] for number in range(len(scopes))]
    assert await directory.renew([Renewal(scope, "mine", 60) for scope in scopes]) == expected
    assert (await directory.lookup(scopes[2])).remaining_s <= 30
    assert await directory.renew([]) == []


async def test_of_concurrent_turns_the_latest_stands(directory: LeaseDirectory) -> None:
    answers = await asyncio.gather(
        *(directory.publish(SCOPE, entry(f"l{number}", number), 60) for number in range(1, 65))
    )
    found = (await directory.lookup(SCOPE)).entry
    assert found is not None
    assert found.lease_id == "l64"
    assert answers[-1].won
    # Every lease was told what it replaced: nobody is displaced twice, and nobody but the last stays.
    displaced = [answer.displaced.lease_id for answer in answers if answer.displaced is not None]
    winners = [f"l{number}" for number, answer in enumerate(answers, 1) if answer.won]
    assert sorted(displaced) == sorted(set(winners) - {"l64"})


@pytest.mark.parametrize(
    "broken",
    [
        entry(""),
        entry("a", decode_endpoint=""),
        entry("a", -1),
        entry("a", conversation_id="x" * codec.MAX_BYTES),
    ],
    ids=["no lease", "no endpoint", "negative start", "huge"],
)
async def test_senseless_entries_are_refused(
    directory: LeaseDirectory, broken: lease_pb2.DirectoryEntry
) -> None:
    with pytest.raises(ValueError, match=r"an entry|turn_start_us"):
        await directory.publish(SCOPE, broken, 60)


@pytest.mark.parametrize("scope", [b"", b"x" * 65])
async def test_senseless_scopes_are_refused(directory: LeaseDirectory, scope: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        await directory.lookup(scope)
    with pytest.raises(ValueError, match="number"):
        await directory.publish(SCOPE, entry("a"), float("nan"))
    with pytest.raises(ValueError, match="millisecond"):
        await directory.set_alive(SCOPE, 0)


async def test_hints_lead_to_the_longest_held_prefix(directory: LeaseDirectory) -> None:
    nothing = await directory.find_by_prefix(GROUP, [b"d1", b"d2"])
    assert (nothing.scope, nothing.position, nothing.found.entry) == (b"", -1, None)
    assert nothing.found.turn_start_us > 0
    await directory.publish(SCOPE, entry("long"), 60)
    await directory.publish_hints(GROUP, [b"d1", b"d2", b"d3"], SCOPE, 60)
    await directory.publish(OTHER, entry("fork"), 60)
    await directory.publish_hints(GROUP, [b"d1", b"d2", b"f3"], OTHER, 60)
    found = await directory.find_by_prefix(GROUP, [b"d1", b"d2", b"d3", b"d4"])
    assert (found.scope, found.position) == (SCOPE, 2)
    assert found.found.entry == entry("long")
    assert 0 < found.found.remaining_s <= 60
    # The latest fork first where both share the prefix; the other one when that is gone.
    assert (await directory.find_by_prefix(GROUP, [b"d1", b"d2"])).scope == OTHER
    await directory.remove(OTHER, "fork")
    assert (await directory.find_by_prefix(GROUP, [b"d1", b"d2", b"f3"])).scope == SCOPE
    await directory.remove(SCOPE, "long")
    assert (await directory.find_by_prefix(GROUP, [b"d1", b"d2", b"d3"])).found.entry is None


async def test_hints_stay_within_their_group(directory: LeaseDirectory) -> None:
    await directory.publish(SCOPE, entry("a"), 60)
    await directory.publish_hints(GROUP, [b"d1"], SCOPE, 60)
    assert (await directory.find_by_prefix(b"another", [b"d1"])).scope == b""


async def test_hints_of_many_forks_keep_the_latest_few(directory: LeaseDirectory) -> None:
    scopes = [bytes([number]) * 32 for number in range(1, 8)]
    for scope in scopes:
        await directory.publish(scope, entry(scope.hex()), 60)
        await directory.publish_hints(GROUP, [b"d1"], scope, 60)
    for scope in reversed(scopes[-4:]):
        assert (await directory.find_by_prefix(GROUP, [b"d1"])).scope == scope
        await directory.remove(scope, scope.hex())
    assert (await directory.find_by_prefix(GROUP, [b"d1"])).scope == b""


async def test_names_come_before_hints_in_their_order(directory: LeaseDirectory) -> None:
    third = b"\x03" * 32
    await directory.publish(OTHER, entry("hinted"), 60)
    await directory.publish_hints(GROUP, [b"d1", b"d2"], OTHER, 60)
    nothing = await directory.find_by_prefix(GROUP, [], [SCOPE, third])
    assert (nothing.scope, nothing.position, nothing.found.entry) == (b"", -1, None)
    assert nothing.found.turn_start_us > 0
    hinted = await directory.find_by_prefix(GROUP, [b"d1", b"d2", b"d3"], [SCOPE, third])
    assert (hinted.scope, hinted.position, hinted.found.entry) == (OTHER, 1, entry("hinted"))
    await directory.publish(third, entry("third"), 60)
    parent = await directory.find_by_prefix(GROUP, [b"d1"], [SCOPE, third])
    assert (parent.scope, parent.position, parent.found.entry) == (third, -1, entry("third"))
    assert 0 < parent.found.remaining_s <= 60
    await directory.publish(SCOPE, entry("own"), 60)
    own = await directory.find_by_prefix(GROUP, [b"d1"], [SCOPE, third])
    assert (own.scope, own.position, own.found.entry) == (SCOPE, -1, entry("own"))
    # As from a lookup: its time is the start of the turn that asks.
    assert nothing.found.turn_start_us <= own.found.turn_start_us
    assert own.found.turn_start_us <= (await directory.lookup(SCOPE)).turn_start_us


async def test_past_a_lease_that_is_gone_hints_lead_to_a_shorter_one(
    directory: LeaseDirectory,
) -> None:
    await directory.publish(SCOPE, entry("short"), 60)
    await directory.publish_hints(GROUP, [b"d1"], SCOPE, 60)
    await directory.publish(OTHER, entry("long"), 60)
    await directory.publish_hints(GROUP, [b"d1", b"d2"], OTHER, 60)
    assert (await directory.find_by_prefix(GROUP, [b"d1", b"d2"])).scope == OTHER
    await directory.remove(OTHER, "long")
    found = await directory.find_by_prefix(GROUP, [b"d1", b"d2"])
    assert (found.scope, found.position) == (SCOPE, 0)


async def test_hints_need_digests_and_time(directory: LeaseDirectory) -> None:
    with pytest.raises(ValueError, match="digest"):
        await directory.find_by_prefix(GROUP, [])
    await directory.publish_hints(GROUP, [], SCOPE, 60)
    await directory.publish_hints(GROUP, [b"d1"], SCOPE, 0)
    assert (await directory.find_by_prefix(GROUP, [b"d1"])).scope == b""


async def test_a_check_says_what_the_store_is(directory: LeaseDirectory) -> None:
    report = await directory.check()
    assert report.fit
    assert report.server.split()[0] in {"memory", "valkey", "redis"}


async def test_a_closed_directory_is_unavailable(directory: LeaseDirectory) -> None:
    await directory.lookup(SCOPE)
    await directory.close()
    await directory.close()
    with pytest.raises(DirectoryUnavailable) as caught:
        await directory.lookup(SCOPE)
    assert caught.value.outage is Outage.CLOSED
    assert await directory.renew([Renewal(SCOPE, "a", 60)]) == [Standing.UNKNOWN]
