"""The keeper alone: what holds whatever happens, in whatever order."""

import asyncio
from collections.abc import Coroutine

from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_kit import TOKENS, Bench, begin, scope

from kvloop.runtime.errors import Failure
from kvloop.v1alpha1 import decode_service_pb2

KINDS = ("keep", "keep", "evict", "release", "close", "read", "end", "down", "up", "lag", "pass", "settle")
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 19), st.integers(1, 5)), max_size=40)


class Play:
    """Actions on a keeper that overlap as they like."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.tasks: list[asyncio.Task[object]] = []
        self.made: list[str] = []
        self.reads: list[tuple[str, str]] = []
        self.was_down = False

    def start(self, work: Coroutine[object, object, object]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def keep(self, pick: int, start: int) -> None:
        lease_id = f"l{len(self.made)}"
        self.made.append(lease_id)
        hold = self.bench.engine.hold(lease_id, 8, 1e6)
        self.start(self.bench.keeper.keep(scope("xy"[pick % 2], start), TOKENS, hold))

    def evict(self, pick: int, _: int) -> None:
        if self.made:
            self.bench.engine.end(self.made[pick % len(self.made)], "evicted")

    def release(self, pick: int, _: int) -> None:
        if self.made:
            self.start(self.bench.keeper.release(self.made[pick % len(self.made)]))

    def close(self, pick: int, _: int) -> None:
        self.start(self.bench.keeper.release_scope(scope("xy"[pick % 2]).scope))

    def read(self, pick: int, _: int) -> None:
        if self.made:
            self.start(self._read(self.made[pick % len(self.made)]))

    async def _read(self, lease_id: str) -> None:
        try:
            grant = await self.bench.reading.begin(begin(lease_id))
        except Failure:
            return
        self.reads.append((lease_id, grant.read_id))

    def end(self, pick: int, _: int) -> None:
        if self.reads:
            self.start(self._end(*self.reads[pick % len(self.reads)]))

    async def _end(self, lease_id: str, read_id: str) -> None:
        await self.bench.reading.end(decode_service_pb2.EndReadRequest(lease_id=lease_id, read_id=read_id))

    def down(self, *_: int) -> None:
        self.bench.directory.down = self.was_down = True

    def lag(self, _: int, turns: int) -> None:
        self.bench.directory.lags.append(turns)

    def up(self, *_: int) -> None:
        self.bench.directory.down = False

    async def rest(self) -> None:
        """Let everything come to an end."""
        self.up()
        await asyncio.gather(*self.tasks)
        await self.bench.keeper.settled()
        await self.bench.keeper.reconcile()
        for lease_id, read_id in self.reads:
            await self._end(lease_id, read_id)
        # What the watch has begun goes on beside all this.
        for _ in range(100):
            await asyncio.sleep(0)
        self.bench.keeper.table.sweep(self.bench.clock.now)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_holds_and_leases_agree(actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(played(actions))


async def played(actions: list[tuple[str, int, int]]) -> None:
    play = Play()
    bench = play.bench
    watching = asyncio.create_task(bench.keeper.watch())
    for kind, pick, number in actions:
        if kind == "pass":
            for _ in range(number):
                await asyncio.sleep(0)
        elif kind == "settle":
            await asyncio.gather(*play.tasks)
        else:
            getattr(play, kind)(pick, number)
    await play.rest()
    live = {one.lease_id for one in bench.keeper.table.held()}
    assert live == set(bench.engine.held), "every hold has a live lease or is released"
    assert not any(bench.engine.pinned.values()), "every pin is taken off"
    for conversation in "xy":
        leases = bench.keeper.table.live(scope(conversation).scope)
        assert len(leases) <= 1, "never two live leases of one conversation"
        # A directory that was down may have kept the entry of a lease that ended meanwhile.
        if not play.was_down:
            expected = leases[0].lease_id if leases else None
            assert await bench.standing(scope(conversation)) == expected
    watching.cancel()
