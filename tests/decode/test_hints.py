"""What D tells the directory beyond the conversation's name: hints, after the entry, and never in its way."""

from collections.abc import Sequence
from typing import Any

import pytest
from keeper_kit import FACTS, Bench, scope

from kvloop.decode.publishing import Publisher
from kvloop.metastore.hints import WRITTEN, hint_lengths, written_lengths
from kvloop.metastore.port import DirectoryUnavailable
from kvloop.runtime.digests import hint_group, prefix_digests
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import lease_pb2

KEY = b"k" * 32
GROUP = hint_group(KEY)


async def keep(bench: Bench, num_tokens: int, conversation: str = "c", start: int = 1) -> Any:
    tokens = pack(range(1, num_tokens + 1))
    hold = bench.engine.hold(f"{conversation}-{start}", num_tokens, 60.0)
    return await bench.keeper.keep(scope(conversation, start), tokens, hold)


def digests(num_tokens: int, prompt_tokens: int) -> list[bytes]:
    """Return what a prompt asks for that begins with so many of the tokens that `keep` holds."""
    shared = list(range(1, num_tokens + 1))
    rest = [999] * (prompt_tokens - num_tokens)
    return prefix_digests(KEY, pack([*shared, *rest]), hint_lengths(prompt_tokens))


@pytest.mark.parametrize(("shared", "found"), [(63, False), (64, True), (100, True), (300, True)])
async def test_a_prompt_that_begins_alike_is_led_to_the_lease(shared: int, found: bool) -> None:
    bench = Bench()
    await keep(bench, 300)
    answer = await bench.directory.find_by_prefix(GROUP, digests(shared, 320))
    assert (answer.scope == scope().scope) == found
    assert 0 <= answer.found.remaining_s <= 55


async def test_what_shares_less_than_an_eighth_is_not_hinted_at() -> None:
    assert written_lengths(63) == []
    assert written_lengths(64) == [64]
    for length in (65, 1_000, 24_000, 140_000):
        written = written_lengths(length)
        assert written == hint_lengths(length)[-WRITTEN:]
        assert written[-1] > length * 3 // 4
        assert len(written) <= WRITTEN


async def test_hints_are_written_after_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    inner = bench.directory.publish_hints
    standing: list[str | None] = []

    async def watched(group: bytes, names: Sequence[bytes], to: bytes, ttl_s: float) -> None:
        standing.append(await bench.standing(scope()))
        await inner(group, names, to, ttl_s)

    monkeypatch.setattr(bench.directory, "publish_hints", watched)
    await keep(bench, 100)
    assert standing == ["c-1"]
    # Too short, and nothing to say.
    await keep(bench, 63, "short")
    assert len(standing) == 1


async def test_hints_that_can_t_be_written_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    async def away(*_: Any) -> None:
        raise DirectoryUnavailable

    monkeypatch.setattr(bench.directory, "publish_hints", away)
    kept = await keep(bench, 100)
    assert kept.lease is not None
    assert await bench.standing(scope()) == "c-1"
    assert bench.keeper.publications == {"won": 1}
    assert (await bench.directory.find_by_prefix(GROUP, digests(100, 120))).scope == b""


async def test_hints_stand_as_long_as_a_session_keeps_the_lease() -> None:
    bench = Bench()
    await keep(bench, 100)
    await bench.directory.set_alive(scope().scope, 1e5)
    for second in range(0, 300, 5):
        bench.clock.now = 1000.0 + second
        await bench.prolonger.sweep()
        found = await bench.directory.find_by_prefix(GROUP, digests(100, 120))
        assert found.scope == scope().scope, second
    assert bench.prolonger.prolonged >= 4


async def test_hints_of_a_lease_without_session_end_with_it() -> None:
    bench = Bench()
    await keep(bench, 100)
    bench.clock.now = 1054.0
    await bench.prolonger.sweep()
    hinted = await bench.directory.find_by_prefix(GROUP, digests(100, 120))
    assert hinted.scope == scope().scope
    # Another worker publishes the same conversation: nothing of the old hints leads there.
    bench.clock.now = 1056.0
    await bench.prolonger.sweep()
    await bench.directory.publish(scope().scope, entry_of_another(), 60.0)
    assert (await bench.directory.find_by_prefix(GROUP, digests(100, 120))).scope == b""


async def test_hints_that_can_t_be_prolonged_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    await keep(bench, 100)
    await bench.directory.set_alive(scope().scope, 1e5)

    async def away(*_: Any) -> None:
        raise DirectoryUnavailable

    monkeypatch.setattr(bench.directory, "publish_hints", away)
    bench.clock.now = 1050.0
    await bench.prolonger.sweep()
    assert bench.prolonger.prolonged == 1
    assert await bench.standing(scope()) == "c-1"


def entry_of_another() -> lease_pb2.DirectoryEntry:
    return lease_pb2.DirectoryEntry(
        version=1, lease_id="other", decode_endpoint="127.0.0.1:8", turn_start_us=9, held=True
    )


async def test_a_lost_publication_hints_at_nothing() -> None:
    bench = Bench()
    # A later-started turn of another worker stands.
    foreign = Publisher(bench.directory, "127.0.0.1:8", lambda: FACTS, bench.clock, margin_s=5.0, hints=False)
    other = Bench()
    later = (await keep(other, 90, start=500)).lease
    await foreign.publish(later)
    assert (await keep(bench, 100, start=499)).lease is None
    assert (await bench.directory.find_by_prefix(GROUP, digests(100, 120))).scope == b""
    assert later.lease_id == await bench.standing(scope())
    assert bench.keeper.publications == {"lost": 1}


async def test_groups_of_other_keys_are_others() -> None:
    bench = Bench()
    await keep(bench, 100)
    found = await bench.directory.find_by_prefix(hint_group(b"K" * 32), digests(100, 120))
    assert found.scope == b""
    assert hint_group(KEY) != KEY[:16]
