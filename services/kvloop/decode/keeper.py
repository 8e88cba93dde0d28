"""The keeper: what D keeps of its turns, who finds it, and who may read it.

The engine owns the blocks; the keeper owns the leases on them. A turn's hold becomes a lease, the lease is
published, and the one it supersedes is let go. Every way out of LIVE (superseded, released, evicted,
expired, revoked) takes the directory's entry away by compare-and-delete, so that a newer one survives.

Changes of one conversation's entry happen one after another, under a lock per scope: the directory's
order and the table's are the same, and an eviction that comes while its lease is being published finds
either nothing to remove yet (and publishing sees that the lease is over) or the entry itself.

Nothing here waits for an engine step, and nothing fails a turn: a lease that can't be published is
retried in the background for a bounded time, then let go.
"""

import asyncio
import contextlib
import random
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from kvloop.decode.lease import Ended, Lease, LeaseTable
from kvloop.decode.publishing import Publisher
from kvloop.engine.port import Engine, Hold, HoldTerms
from kvloop.metastore.port import DirectoryUnavailable, Published
from kvloop.runtime import background, logs
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import Failure
from kvloop.runtime.tokens import TOKEN_BYTES, count
from kvloop.v1alpha1 import lease_pb2, turn_pb2

PATIENCE_S = 300.0
"""How long a turn may take to end in the engine before its hold is left to its own deadline."""

_log = logs.get("decode")


@dataclass(frozen=True, slots=True)
class Policy:
    """For how long things are kept and tried. Seconds."""

    ttl_s: float = 480.0
    max_ttl_s: float = 3600.0
    publish_bound_s: float = 30.0
    """An unpublished lease is let go after this."""
    publish_retry_s: float = 0.1
    """First pause between attempts; doubles up to 2 s."""
    watch_retry_s: float = 1.0
    soft_hints: bool = False
    """Whether an evicted lease stays in the directory, as one that the prefix cache may still have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a turn's hold."""

    lease: Lease | None = None
    displaced: lease_pb2.DirectoryEntry | None = None
    """Another worker's lease whose entry was replaced."""


class Keeper:
    """Leases of one decode worker."""

    def __init__(self, engine: Engine, publisher: Publisher, clock: Clock, policy: Policy = Policy()) -> None:
        self.table = LeaseTable()
        self.publications: Counter[str] = Counter()
        """By outcome: won, lost, deferred, given_up."""
        self.on_lease: Callable[[Lease], None] = lambda _lease: None
        """Told of every new lease."""
        self.tell_published: Callable[[float], None] = lambda _: None
        """Told the seconds that a publication took, the directory's answer or its failure included."""
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._policy = policy
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def ttl_s(self, retention: turn_pb2.Retention) -> float:
        """Return how long a turn is held: as asked, up to the cap."""
        asked = retention.ttl.ToNanoseconds() / 1e9 if retention.HasField("ttl") else self._policy.ttl_s
        return min(asked, self._policy.max_ttl_s)

    async def keep(self, scope: turn_pb2.TurnScope, tokens: bytes, hold: Hold) -> Kept:
        """Make a finished turn's hold a lease and publish it.

        tokens: prompt and answer, packed. Waits for the directory no longer than one publication takes.
        """
        # Past a stop string, the engine may hold tokens that nobody was told.
        num_tokens = min(hold.num_tokens, count(tokens))
        now = self._clock.monotonic()
        lease = Lease(
            lease_id=hold.lease_id,
            scope=scope.scope,
            digest_key=scope.digest_key,
            conversation_id=scope.conversation_id,
            tenant=scope.tenant,
            turn_start_us=scope.turn_start_us,
            tokens=tokens[: num_tokens * TOKEN_BYTES],
            num_tokens=num_tokens,
            num_blocks=hold.num_blocks,
            deadline=now + hold.remaining_s,
            begun=now,
            publish_wall=self._clock.wall(),
        )
        self.table.add(lease)
        self.on_lease(lease)
        try:
            return await self._publish(lease)
        except DirectoryUnavailable as error:
            self.publications["deferred"] += 1
            _log.info("publish_deferred", lease_id=lease.lease_id, outage=str(error))
            give_up = min(now + self._policy.publish_bound_s, lease.deadline)
            self._spawn(self._publish_later(lease, give_up))
            return Kept(lease)
        except BaseException:
            # Whatever happened, an unpublished hold must not outlive the turn unseen.
            await self._let_go(lease, Ended.UNPUBLISHED)
            raise

    async def publish_again(self, lease: Lease) -> None:
        """Publish a lease whose entry the directory has lost; a store that is away is left alone."""
        with contextlib.suppress(DirectoryUnavailable, ValueError):
            await self._publish(lease)

    async def keep_cancelled(
        self, scope: turn_pb2.TurnScope, tokens: Callable[[], bytes], lease_id: str
    ) -> Kept:
        """Make a lease of what the engine kept of a cancelled turn, if anything.

        It counts as older than its turn: an attempt that was completed elsewhere has more.
        """
        hold = await self._engine.settle(lease_id)
        if hold is None:
            self.discard_later(lease_id)
            return Kept()
        older = turn_pb2.TurnScope()
        older.CopyFrom(scope)
        older.turn_start_us = max(0, scope.turn_start_us - 1)
        return await self.keep(older, tokens(), hold)

    async def discard(self, terms: HoldTerms) -> None:
        """Let go of a hold that never became a lease."""
        await self._release_hold(terms.lease_id)

    def discard_later(self, lease_id: str) -> None:
        """Let go, in the background, of what the engine may keep of a turn that it has yet to end."""
        self._spawn(self._discard_settled(lease_id))

    async def release(self, lease_id: str) -> bool:
        """Let go of a lease; False when it is not live."""
        lease = self.table.get(lease_id)
        if lease is None:
            return False
        if lease.ended is Ended.EVICTED and self._policy.soft_hints:
            # Nothing is held, but the directory may still name it.
            async with self._lock(lease.scope):
                await self._publisher.remove(lease)
        return await self._retire([lease], Ended.RELEASED)

    async def release_scope(self, scope: bytes) -> bool:
        """Let go of all that is held for a conversation; False when nothing is."""
        done = await self._retire(self.table.live(scope), Ended.RELEASED)
        if self._policy.soft_hints:
            # What is no longer held is still named.
            async with self._lock(scope):
                await self._publisher.remove_soft(scope)
        return done

    async def revoke_all(self) -> None:
        """Let go of every lease: before weights are reloaded, and at the end of a drain."""
        await self._retire(self.table.held(), Ended.REVOKED)
        try:
            # Holds that never became leases, too.
            await self._engine.revoke_all()
        except Failure as failure:
            _log.warning("revoke_failed", reason=failure.reason_name)

    async def watch(self) -> None:
        """Follow the engine's own endings of holds, for ever."""
        broken = False
        while True:
            try:
                await self.reconcile()
                broken = False
                async for event in self._engine.hold_events():
                    lease = self.table.get(event.lease_id)
                    if lease is not None:
                        await self._ended(lease, _why(event.reason))
            except Exception as error:  # noqa: BLE001 - without this watch, leases outlive their holds
                if not broken:
                    _log.warning("hold_events_broken", error=type(error).__name__, exc_info=error)
                broken = True
            await asyncio.sleep(self._policy.watch_retry_s)

    async def reconcile(self) -> None:
        """Give up leases that the engine no longer holds, in case an event was missed."""
        known = [lease for lease in self.table.held() if lease.is_live()]
        if not known:
            return
        held = {hold.lease_id for hold in await self._engine.holds()}
        now = self._clock.monotonic()
        for lease in known:
            if lease.lease_id not in held:
                await self._ended(lease, Ended.EXPIRED if lease.deadline <= now else Ended.EVICTED)

    async def lost(self, lease: Lease) -> None:
        """Take note that the engine did not find a lease's hold."""
        await self._ended(lease, Ended.EVICTED)

    async def settled(self) -> None:
        """Return when no background work is left."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Stop background work."""
        for task in list(self._tasks):
            task.cancel()
        await self.settled()

    async def _publish(self, lease: Lease) -> Kept:
        """Publish, then let the loser go. Raises DirectoryUnavailable."""
        async with self._lock(lease.scope):
            if not lease.is_live():
                return Kept()
            newer = [other for other in self.table.live(lease.scope) if _later(other, lease)]
            published = None if newer else await self._write(lease)
            won = published is not None and published.won
            self.publications["won" if won else "lost"] += 1
            if not won:
                self.table.end(lease, Ended.LOST, self._clock.monotonic())
                losers = [lease]
            else:
                losers = self._supersede(lease)
                if not lease.is_live():
                    # It ended while its entry was being written.
                    await self._publisher.remove(lease)
        for loser in losers:
            await self._release_hold(loser.lease_id)
        if not won:
            return Kept()
        return Kept(lease if lease.is_live() else None, self._elsewhere(published))

    async def _write(self, lease: Lease) -> Published:
        begun = self._clock.monotonic()
        try:
            return await self._publisher.publish(lease)
        finally:
            self.tell_published(self._clock.monotonic() - begun)

    def _supersede(self, lease: Lease) -> list[Lease]:
        now = self._clock.monotonic()
        others = [other for other in self.table.live(lease.scope) if other is not lease]
        losers = [other for other in others if not _later(other, lease)]
        for loser in losers:
            self.table.end(loser, Ended.SUPERSEDED, now)
        return losers

    def _elsewhere(self, published: Published | None) -> lease_pb2.DirectoryEntry | None:
        displaced = published.displaced if published is not None else None
        if displaced is None or displaced.decode_endpoint == self._publisher.endpoint:
            return None
        return displaced

    async def _publish_later(self, lease: Lease, give_up: float) -> None:
        pause = self._policy.publish_retry_s
        while lease.is_live():
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                kept = await self._publish(lease)
                if kept.displaced is not None:
                    # The turn's summary, by which routers learn of it, is gone: its own deadline ends it.
                    _log.info("displaced_untold", lease_id=kept.displaced.lease_id)
                return
            except ValueError:
                await self._let_go(lease, Ended.UNPUBLISHED)
                raise
            except DirectoryUnavailable:
                if self._clock.monotonic() >= give_up:
                    self.publications["given_up"] += 1
                    _log.warning("publish_given_up", lease_id=lease.lease_id)
                    await self._let_go(lease, Ended.UNPUBLISHED)
                    return
            pause = min(pause * 2, 2.0)

    async def _retire(self, leases: Iterable[Lease], why: Ended) -> bool:
        """End leases; take their entries away, then their holds. False when none was live."""
        now = self._clock.monotonic()
        ended = [lease for lease in leases if self.table.end(lease, why, now)]
        if not ended:
            return False
        # For a lease that has ended nobody comes back: the call that asked for it may be gone by now.
        await asyncio.shield(self._spawn(self._give_up(ended)))
        return True

    async def _give_up(self, leases: list[Lease]) -> None:
        for lease in leases:
            async with self._lock(lease.scope):
                await self._publisher.remove(lease)
            await self._release_hold(lease.lease_id)

    async def _discard_settled(self, lease_id: str) -> None:
        await self._release_hold(lease_id)
        with contextlib.suppress(Failure):
            if await self._engine.settle(lease_id, PATIENCE_S) is not None:
                await self._release_hold(lease_id)

    async def _let_go(self, lease: Lease, why: Ended) -> None:
        if self.table.end(lease, why, self._clock.monotonic()):
            await self._release_hold(lease.lease_id)

    async def _ended(self, lease: Lease, why: Ended) -> None:
        now = self._clock.monotonic()
        was_live = self.table.end(lease, why, now)
        # While a read is in progress the engine keeps the blocks and reports the end of the hold alone.
        self.table.sweep(now)
        if was_live:
            _log.debug("lease_ended", lease_id=lease.lease_id, why=why.value)
            async with self._lock(lease.scope):
                if why is Ended.EVICTED and self._policy.soft_hints:
                    await self._publisher.soften(lease)
                else:
                    await self._publisher.remove(lease)

    async def _release_hold(self, lease_id: str) -> None:
        try:
            await self._engine.release(lease_id)
        except Failure as failure:
            # Without an engine there are no blocks either; otherwise the hold's own deadline ends it.
            _log.warning("release_failed", lease_id=lease_id, reason=failure.reason_name)

    def _lock(self, scope: bytes) -> asyncio.Lock:
        lock = self._locks.get(scope)
        if lock is None:
            self._locks[scope] = lock = asyncio.Lock()
        return lock

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return background.spawn(self._tasks, work)


def _later(one: Lease, other: Lease) -> bool:
    return one.turn_start_us > other.turn_start_us


def _why(reason: str) -> Ended:
    return Ended(reason) if reason in {ended.value for ended in Ended} else Ended.EVICTED
