"""One read of another engine's blocks, with the guard around it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvloop.engine.port import TransferFacts
from kvloop.engine.simulated.clock import ShiftedClock, Timer, sleep
from kvloop.engine.simulated.cost import CostModel
from kvloop.engine.simulated.fabric import Dead, Fabric, KvSource
from kvloop.engine.simulated.faults import Faults
from kvloop.engine.simulated.handle import Address, Handle, Refused
from kvloop.engine.simulated.kv import Kv

HANDSHAKE_S = 5.0
"""Time for the other engine to say hello."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read."""

    handle: Handle
    block_ids: list[int]
    margin_s: float
    """Time that the handle must still have."""
    corrupt: bool = False


class Reader:
    """Reads for one life of one engine."""

    def __init__(
        self,
        fabric: Fabric,
        clock: ShiftedClock,
        cost: CostModel,
        faults: Faults,
        *,
        time_scale: float,
        block_size: int,
        compatibility: Callable[[], str],
        running: Callable[[], Awaitable[None]],
    ) -> None:
        self._fabric = fabric
        self._clock = clock
        self._cost = cost
        self._faults = faults
        self._scale = time_scale
        self._block_size = block_size
        self._compatibility = compatibility
        self._running = running
        """Waits while this engine is paused."""
        self._known: set[str] = set()

    async def read(self, wanted: Wanted) -> tuple[list[Kv], TransferFacts]:
        """Return the blocks' KV as it is when the transfer ends. Raises Refused.

        A holder that stops answering costs the reader at most the time that the blocks are held anyway.
        """
        start = self._clock.monotonic()
        try:
            source = await self._fabric.open(wanted.handle.address)
        except Dead:
            await self._mourn(wanted.handle.address)
            raise Refused("transfer") from None
        limit = _Limit(self._clock, HANDSHAKE_S)
        try:
            kvs = await self._transfer(source, wanted, limit)
        except Dead:
            raise Refused("transfer") from None
        except asyncio.CancelledError:
            if limit.struck():
                raise Refused("deadline") from None
            raise
        finally:
            limit.lift()
            await source.close()
        if wanted.corrupt:
            kvs = [kv._replace(content=bytes(byte ^ 1 for byte in kv.content)) for kv in kvs]
        blocks = len(wanted.block_ids)
        facts = TransferFacts(
            duration_ms=(self._clock.monotonic() - start) * 1000.0,
            bytes=self._bytes(blocks),
            descriptors=blocks * self._cost.descriptors_per_block,
        )
        return kvs, facts

    async def _transfer(self, source: KvSource, wanted: Wanted, limit: "_Limit") -> list[Kv]:
        faults = self._faults
        hello = await source.hello()
        self._known.add(wanted.handle.address.engine_id)
        if hello.compatibility != self._compatibility() or faults.take("fail_reads"):
            raise Refused("transfer")
        self._check_deadline(wanted, hello.now, wanted.margin_s)
        ahead = self._clock.monotonic() - hello.now
        limit.lift()
        if faults.guard.deadline and wanted.handle.expiry is not None:
            limit.set(wanted.handle.expiry - hello.now)
        await sleep(self._clock, self._seconds(len(wanted.block_ids)))
        await self._running()
        kvs = await source.fetch(wanted.block_ids)
        await faults.stalled("end")
        if kvs is None:
            raise Refused("transfer")
        self._check_deadline(wanted, self._clock.monotonic() - ahead, 0.0)
        if not faults.take("drop_read_notices"):
            await source.done(wanted.handle.request_id)
        return kvs

    def _seconds(self, blocks: int) -> float:
        faults = self._faults
        seconds = self._cost.read(self._bytes(blocks), blocks * self._cost.descriptors_per_block)
        seconds = seconds * self._scale * faults.network_slowdown + faults.network_delay_s
        return seconds + (faults.stall_s if faults.take("stall_reads") else 0.0)

    def _bytes(self, blocks: int) -> int:
        return blocks * self._block_size * self._cost.bytes_per_token

    def _check_deadline(self, wanted: Wanted, holder_now: float, margin_s: float) -> None:
        """Raise Refused when the holder may not hold the blocks any more."""
        if not self._faults.guard.deadline:
            return
        expiry = wanted.handle.expiry
        if expiry is None or expiry - holder_now <= margin_s:
            raise Refused("deadline")

    async def notify(self, handle: Handle) -> None:
        """Tell a holder that its blocks are not needed; a dead one need not know."""
        if self._faults.take("drop_read_notices"):
            return
        try:
            source = await self._fabric.open(handle.address)
        except Dead:
            return
        try:
            await source.done(handle.request_id)
        except Dead:
            pass
        finally:
            await source.close()

    async def _mourn(self, address: Address) -> None:
        known = address.engine_id in self._known
        wait = self._cost.dead_known_s if known else self._cost.dead_unknown_s
        await sleep(self._clock, wait * self._scale)


class _Limit:
    """Cancels the task that made it when time is up."""

    def __init__(self, clock: ShiftedClock, seconds: float) -> None:
        self._clock = clock
        self._task = asyncio.current_task()
        self._timer: Timer | None = None
        self._struck = False
        self.set(seconds)

    def set(self, seconds: float) -> None:
        self._timer = self._clock.call_later(seconds, self._strike)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def struck(self) -> bool:
        if self._struck and self._task is not None:
            return self._task.uncancel() == 0
        return False

    def _strike(self) -> None:
        if self._task is not None:
            self._struck = True
            self._task.cancel()
