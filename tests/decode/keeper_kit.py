"""A table of holds and a directory under a test's thumb, for the keeper alone."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvloop.decode.keeper import Keeper, Policy
from kvloop.decode.prolonging import Prolonger
from kvloop.decode.publishing import Publisher
from kvloop.decode.reading import Reading
from kvloop.engine.port import EngineFacts, Hold, HoldEnded, ReadGrant
from kvloop.metastore.memory import MemoryDirectory
from kvloop.metastore.port import DirectoryUnavailable, Published, Renewal, Standing
from kvloop.runtime.digests import prefix_digests
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.tokens import pack
from kvloop.v1alpha1 import decode_service_pb2, lease_pb2, turn_pb2

TOKENS = pack(range(1, 10))
ENDPOINT = "127.0.0.1:7"
FACTS = EngineFacts(
    engine="table",
    version="1",
    epoch="e",
    model_name="m",
    model_revision="",
    adapters=(),
    max_model_len=4096,
    vocab_size=1000,
    block_size=4,
    compatibility="k",
    bidirectional_kv_xfer=True,
    kv_recompute_threshold=0,
)


class ManualClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now


class HoldTable:
    """The part of an engine that a keeper sees. Every call yields to other tasks once, as a socket would."""

    def __init__(self, clock: ManualClock) -> None:
        self.facts = FACTS
        self.clock = clock
        self.held: dict[str, float] = {}
        self.pinned: dict[str, set[str]] = {}
        self.gone = False
        self.releasing: asyncio.Event | None = None
        """Until it is set, releases wait."""
        self.patience: list[float | None] = []
        """For how long turns were to be waited for."""
        self.settling = asyncio.Event()
        self.events: asyncio.Queue[HoldEnded] = asyncio.Queue()
        self._serial = itertools.count()

    def hold(self, lease_id: str, num_tokens: int, ttl_s: float) -> Hold:
        self.held[lease_id] = self.clock.now + ttl_s
        return Hold(lease_id, num_tokens, num_blocks=1, remaining_s=ttl_s)

    def end(self, lease_id: str, reason: str) -> None:
        if self.held.pop(lease_id, None) is not None:
            self.events.put_nowait(HoldEnded(lease_id, reason))

    async def begin_read(self, lease_id: str, num_tokens: int, pin_s: float) -> ReadGrant:
        await asyncio.sleep(0)
        if lease_id not in self.held:
            raise Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "no such hold")
        read_id = f"r{next(self._serial)}"
        self.pinned.setdefault(lease_id, set()).add(read_id)
        return ReadGrant(read_id, "{}", num_tokens, pin_s)

    async def end_read(self, lease_id: str, read_id: str) -> None:
        await asyncio.sleep(0)
        self.pinned.get(lease_id, set()).discard(read_id)

    async def release(self, lease_id: str) -> bool:
        await asyncio.sleep(0)
        if self.releasing is not None:
            await self.releasing.wait()
        return self.held.pop(lease_id, None) is not None

    async def extend(self, lease_id: str, ttl_s: float) -> bool:
        await asyncio.sleep(0)
        if self.gone:
            raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine is gone")
        if lease_id not in self.held:
            return False
        self.held[lease_id] = max(self.held[lease_id], self.clock.now + ttl_s)
        return True

    async def revoke_all(self) -> None:
        await asyncio.sleep(0)
        self.held.clear()

    async def settle(self, lease_id: str, patience_s: float | None = None) -> Hold | None:
        self.patience.append(patience_s)
        self.settling.set()
        await asyncio.sleep(0)
        if lease_id not in self.held:
            return None
        return Hold(lease_id, 8, num_blocks=2, remaining_s=self.held[lease_id] - self.clock.now)

    async def holds(self) -> list[Hold]:
        await asyncio.sleep(0)
        return [Hold(lease_id, 8, 2, until - self.clock.now) for lease_id, until in self.held.items()]

    async def hold_events(self) -> AsyncIterator[HoldEnded]:
        while True:
            yield await self.events.get()


class GatedDirectory(MemoryDirectory):
    """A memory directory that can be down, or stop publications before or after they are written."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.down = False
        self.lags: list[int] = []
        """For how many turns of the loop each next answer is late."""
        self.before: asyncio.Event | None = None
        self.after: asyncio.Event | None = None
        self.publishing = asyncio.Event()
        self.renewals: list[list[Renewal]] = []
        """What was asked to be prolonged, by call."""

    async def publish(self, scope: bytes, entry: lease_pb2.DirectoryEntry, ttl_s: float) -> Published:
        self.publishing.set()
        await asyncio.sleep(0)
        if self.before is not None:
            await self.before.wait()
        if self.down:
            raise DirectoryUnavailable
        published = await super().publish(scope, entry, ttl_s)
        for _ in range(self.lags.pop(0) if self.lags else 0):
            await asyncio.sleep(0)
        if self.after is not None:
            await self.after.wait()
        return published

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        await asyncio.sleep(0)
        if self.down:
            raise DirectoryUnavailable
        return await super().remove(scope, lease_id)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Standing]:
        self.renewals.append(list(renewals))
        await asyncio.sleep(0)
        if self.down:
            return [Standing.UNKNOWN] * len(renewals)
        return await super().renew(renewals)


class Bench:
    """A keeper with everything around it."""

    def __init__(self, **policy: Any) -> None:
        self.clock = ManualClock()
        self.engine = HoldTable(self.clock)
        self.directory = GatedDirectory(self.clock)
        publisher = Publisher(self.directory, ENDPOINT, lambda: FACTS, self.clock, margin_s=5.0)
        quick = {"publish_retry_s": 0.001, "watch_retry_s": 0.001} | policy
        self.keeper = Keeper(self.engine, publisher, self.clock, Policy(**quick))  # type: ignore[arg-type]
        self.prolonger = Prolonger(self.engine, self.keeper, publisher, self.clock)  # type: ignore[arg-type]
        self.keeper.on_lease = self.prolonger.add
        self.reading = Reading(self.engine, self.keeper, self.clock)  # type: ignore[arg-type]

    async def standing(self, scope: turn_pb2.TurnScope) -> str | None:
        entry = (await self.directory.lookup(scope.scope)).entry
        return entry.lease_id if entry is not None else None


def scope(conversation: str = "c", start: int = 1) -> turn_pb2.TurnScope:
    return turn_pb2.TurnScope(
        scope=conversation.encode().ljust(16, b"."),
        digest_key=b"k" * 32,
        conversation_id=conversation,
        turn_start_us=start,
    )


def begin(lease_id: str, lengths: tuple[int, ...] = (4, 8)) -> decode_service_pb2.BeginReadRequest:
    return decode_service_pb2.BeginReadRequest(
        lease_id=lease_id,
        epoch=FACTS.epoch,
        compatibility=FACTS.compatibility,
        scope=scope(),
        prefix_lengths=lengths,
        prefix_digests=b"".join(prefix_digests(b"k" * 32, TOKENS, lengths)),
    )
