"""The directory against a model: random turns, forks, retries, expiries and concurrent publications.

KVLOOP_STORE_STEPS sets how many steps are run per store (`make test-store`: 10,000).
"""

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    rule,
    run_state_machine_as_test,
)
from store_servers import Store as Servers

from kvloop.metastore import keys, port
from kvloop.metastore.factory import StoreOptions, open_store
from kvloop.metastore.scripts import MAX_HINT_SCOPES
from kvloop.v1alpha1 import lease_pb2

STEPS = int(os.environ.get("KVLOOP_STORE_STEPS", "300"))
STEPS_PER_RUN = 50
SCOPES = [bytes([number]) * 32 for number in range(4)]
DIGESTS = [bytes([number]) * 16 for number in range(5)]
GROUP = b"g" * 32
LONG_S, SHORT_S = 1000.0, 500.0

T = TypeVar("T")


class ManualClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000 + self.now


@dataclass
class Standing:
    """What the model expects under a scope."""

    lease_id: str
    start: int
    short: bool


class DirectoryMachine(RuleBasedStateMachine):
    """Four conversations, their turns, and a store that forgets what is short-lived when told to."""

    turns: Bundle[tuple[int, int]] = Bundle("turns")
    leases: Bundle[tuple[int, str]] = Bundle("leases")
    backing: Servers | None = None
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.runner = asyncio.Runner()
        url = "memory://" if self.backing is None else self.backing.url
        self.store = open_store(url, options=StoreOptions(deadline_s=20, connect_s=20), clock=self.clock)
        self.standing: dict[bytes, Standing] = {}
        self.alive: dict[bytes, bool] = {}
        self.hints: dict[bytes, list[bytes]] = {}
        self.count = 0

    def wait(self, operation: Coroutine[Any, Any, T]) -> T:
        type(self).steps += 1
        return self.runner.run(operation)

    @initialize()
    def empty(self) -> None:
        if self.backing is not None:
            self.backing.clear()

    def lease(self) -> str:
        self.count += 1
        return f"lease-{self.count}"

    def entry(self, lease_id: str, start: int) -> lease_pb2.DirectoryEntry:
        return lease_pb2.DirectoryEntry(
            version=1, lease_id=lease_id, decode_endpoint="d:1", turn_start_us=start, num_tokens=start % 97
        )

    @rule(target=turns, index=st.integers(0, 3))
    def begin_turn(self, index: int) -> tuple[int, int]:
        """Look up: the entry is the model's; the time is the turn's start."""
        found = self.wait(self.store.directory.lookup(SCOPES[index]))
        expected = self.standing.get(SCOPES[index])
        assert (found.entry is None) == (expected is None)
        if expected is not None:
            assert found.entry == self.entry(expected.lease_id, expected.start)
            assert 0 < found.remaining_s <= (SHORT_S if expected.short else LONG_S)
        self.clock.now += 0.000_001
        return index, found.turn_start_us

    @rule(target=leases, turn=consumes(turns), short=st.booleans())
    def finish_turn(self, turn: tuple[int, int], short: bool) -> tuple[int, str]:
        return self.publish(turn, self.lease(), short)

    @rule(target=leases, turn=turns, short=st.booleans())
    def finish_an_attempt(self, turn: tuple[int, int], short: bool) -> tuple[int, str]:
        """A retried turn publishes more than once, from the same start."""
        return self.publish(turn, self.lease(), short)

    @rule(target=leases, turn=turns, index=st.integers(0, 3))
    def fork(self, turn: tuple[int, int], index: int) -> tuple[int, str]:
        """A turn that began in one conversation ends in another."""
        return self.publish((index, turn[1]), self.lease(), False)

    @rule(lease=leases, start=st.integers(0, 5), short=st.booleans())
    def refresh(self, lease: tuple[int, str], start: int, short: bool) -> None:
        """A holder publishes its lease again, even with another start, even though it was replaced."""
        self.publish((lease[0], start), lease[1], short)

    def publish(self, turn: tuple[int, int], lease_id: str, short: bool) -> tuple[int, str]:
        index, start = turn
        scope = SCOPES[index]
        before = self.standing.get(scope)
        answer = self.wait(
            self.store.directory.publish(scope, self.entry(lease_id, start), SHORT_S if short else LONG_S)
        )
        won = before is None or before.lease_id == lease_id or before.start <= start
        assert answer.won == won
        replaced = before if won and before is not None and before.lease_id != lease_id else None
        assert (answer.displaced.lease_id if answer.displaced else None) == (
            replaced.lease_id if replaced else None
        )
        if won:
            self.standing[scope] = Standing(lease_id, start, short)
        return index, lease_id

    @rule(index=st.integers(0, 3), several=st.lists(turns, min_size=2, max_size=6))
    def finish_at_once(self, index: int, several: list[tuple[int, int]]) -> None:
        """Turns of one conversation end together: the latest stands, and everybody knows the outcome."""
        scope, before = SCOPES[index], self.standing.get(SCOPES[index])
        entries = [self.entry(self.lease(), start) for _, start in several]

        async def all_of_them() -> list[Any]:
            publish = self.store.directory.publish
            return await asyncio.gather(*(publish(scope, entry, LONG_S) for entry in entries))

        answers = self.wait(all_of_them())
        found = self.wait(self.store.directory.lookup(scope)).entry
        assert found is not None
        candidates = {entry.lease_id: entry.turn_start_us for entry in entries}
        if before is not None:
            candidates[before.lease_id] = before.start
        assert candidates[found.lease_id] == max(candidates.values())
        winners = {entry.lease_id for entry, answer in zip(entries, answers, strict=True) if answer.won}
        displaced = [answer.displaced.lease_id for answer in answers if answer.displaced]
        assert len(displaced) == len(set(displaced))
        # Whoever won and does not stand was displaced by a winner, and so was what stood before.
        former = {before.lease_id} if before is not None else set()
        assert set(displaced) == (winners | former) - {found.lease_id}
        self.standing[scope] = Standing(
            found.lease_id,
            found.turn_start_us,
            before.short if before is not None and before.lease_id == found.lease_id else False,
        )

    @rule(lease=leases)
    def remove(self, lease: tuple[int, str]) -> None:
        scope = SCOPES[lease[0]]
        before = self.standing.get(scope)
        mine = before is not None and before.lease_id == lease[1]
        assert self.wait(self.store.directory.remove(scope, lease[1])) == mine
        if mine:
            del self.standing[scope]

    @rule(index=st.integers(0, 3), short=st.booleans())
    def session(self, index: int, short: bool) -> None:
        self.wait(self.store.directory.set_alive(SCOPES[index], SHORT_S if short else LONG_S))
        self.alive[SCOPES[index]] = short

    @rule(index=st.integers(0, 3))
    def ask_alive(self, index: int) -> None:
        assert self.wait(self.store.directory.is_alive(SCOPES[index])) == (SCOPES[index] in self.alive)

    @rule(several=st.lists(leases, max_size=4), short=st.booleans())
    def renew(self, several: list[tuple[int, str]], short: bool) -> None:
        """A holder asks for several leases at once, also for those that were replaced."""
        ttl_s = SHORT_S if short else LONG_S
        renewals = [port.Renewal(SCOPES[index], lease_id, ttl_s) for index, lease_id in several]
        answers = self.wait(self.store.directory.renew(renewals))
        assert answers == [self.renewed(renewal, short) for renewal in renewals]

    def renewed(self, renewal: port.Renewal, short: bool) -> port.Standing:
        standing = self.standing.get(renewal.scope)
        if renewal.scope not in self.alive:
            return port.Standing.IDLE
        if standing is None:
            return port.Standing.MISSING
        if standing.lease_id != renewal.lease_id:
            return port.Standing.REPLACED
        standing.short = standing.short and short
        return port.Standing.RENEWED

    @rule(index=st.integers(0, 3), some=st.sets(st.sampled_from(DIGESTS), max_size=5))
    def hint(self, index: int, some: set[bytes]) -> None:
        digests = sorted(some)
        self.wait(self.store.directory.publish_hints(GROUP, digests, SCOPES[index], 1000 * LONG_S))
        for digest in digests:
            others = [scope for scope in self.hints.get(digest, []) if scope != SCOPES[index]]
            self.hints[digest] = [SCOPES[index], *others][:MAX_HINT_SCOPES]

    @rule(
        some=st.sets(st.sampled_from(DIGESTS), min_size=1, max_size=5),
        names=st.lists(st.sampled_from(SCOPES), max_size=2, unique=True),
    )
    def find(self, some: set[bytes], names: list[bytes]) -> None:
        """A name comes before all hints, the longest prefix before shorter ones."""
        digests = sorted(some)
        named = [(scope, -1) for scope in names if scope in self.standing]
        hinted = [
            (scope, position)
            for position in reversed(range(len(digests)))
            for scope in self.hints.get(digests[position], [])
            if scope in self.standing
        ]
        expected = next(iter(named + hinted), (b"", -1))
        found = self.wait(self.store.directory.find_by_prefix(GROUP, digests, names))
        assert (found.scope, found.position) == expected
        if expected[0]:
            standing = self.standing[expected[0]]
            assert found.found.entry == self.entry(standing.lease_id, standing.start)

    @rule()
    def time_passes(self) -> None:
        """Half of a long time goes by: on a real store, keys are moved by hand."""
        self.clock.now += SHORT_S
        for scope in SCOPES:
            standing = self.standing.get(scope)
            if standing is not None:
                self.age(keys.lease_key(scope), standing.short)
                if standing.short:
                    del self.standing[scope]
                standing.short = True
            if scope in self.alive:
                self.age(keys.alive_key(scope), self.alive[scope])
                if self.alive[scope]:
                    del self.alive[scope]
                else:
                    self.alive[scope] = True

    def age(self, name: bytes, over: bool) -> None:
        if self.backing is not None:
            self.backing.owner(name).pexpire(name, 0 if over else int(SHORT_S * 1000))

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        if self.backing is not None:
            assert not self.backing.keys_without_ttl()


# No coroutine: the machine has a loop of its own.
@pytest.mark.timeout(900)
def test_the_directory_behaves_as_its_model(backing: Servers | None) -> None:
    class Machine(DirectoryMachine):
        pass

    Machine.backing = backing
    while Machine.steps < STEPS:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                # The first example of a run is the smallest one, and has no steps at all.
                max_examples=max(10, (STEPS - Machine.steps) // STEPS_PER_RUN),
                stateful_step_count=STEPS_PER_RUN,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            ),
        )


@pytest.mark.parametrize("elapsed", [SHORT_S - 0.002, SHORT_S, SHORT_S + 0.002])
async def test_memory_forgets_by_its_clock(elapsed: float) -> None:
    clock = ManualClock()
    store = open_store("memory://", clock=clock)
    entry = lease_pb2.DirectoryEntry(lease_id="a", decode_endpoint="d:1")
    await store.directory.publish(SCOPES[0], entry, SHORT_S)
    await store.directory.set_alive(SCOPES[0], SHORT_S)
    clock.now += elapsed
    found = await store.directory.lookup(SCOPES[0])
    assert (found.entry is not None) == (elapsed < SHORT_S)
    assert await store.directory.is_alive(SCOPES[0]) == (elapsed < SHORT_S)
