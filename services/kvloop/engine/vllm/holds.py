"""The half of the port that is the connector's table of holds, over its control socket."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, TypeVar

from kvloop.connector.control import ControlClient, ControlError, Grant
from kvloop.engine.port import Hold, HoldEnded, ReadGrant
from kvloop.engine.vllm import outputs
from kvloop.runtime import background
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import worker_pb2

SETTLE_S = 5.0
"""How long an aborted turn may take to become a hold: the longest engine step, and some."""

_REMEMBERED = 4096

_T = TypeVar("_T")


class HoldTable:
    """Methods of kvloop.engine.port.Engine about holds; see there for what they promise."""

    def __init__(self) -> None:
        self._control: ControlClient | None = None
        # Tokens that the services know of a cancelled turn, until it is settled.
        self._known: OrderedDict[str, int] = OrderedDict()
        self._asking: set[asyncio.Task[Any]] = set()
        """Questions on their way, and pins that are taken off again."""

    async def settle(self, lease_id: str, patience_s: float | None = None) -> Hold | None:
        """Return the hold of a cancelled turn once the engine has it."""
        known = self._known.pop(lease_id, None)
        wait_s = SETTLE_S if patience_s is None else patience_s
        info = await self._call(self._client().hold(lease_id, wait_s))
        return None if info is None else outputs.hold(info, at_most=known)

    async def begin_read(self, lease_id: str, num_tokens: int, pin_s: float) -> ReadGrant:
        """Pin a hold and return a handle cut to its first num_tokens tokens."""
        asking = asyncio.create_task(self._client().begin_read(lease_id, num_tokens, pin_s))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            grant = await self._call(asyncio.shield(asking))
        except asyncio.CancelledError:
            # The engine pins all the same, and nobody else will know under which id.
            asking.add_done_callback(partial(self._end_unwanted, lease_id))
            raise
        return ReadGrant(
            read_id=grant["read_id"],
            handle_json=outputs.handle_json(grant["params"]),
            num_tokens=grant["num_tokens"],
            pin_s=grant["pin_s"],
        )

    def _end_unwanted(self, lease_id: str, asking: "asyncio.Task[Grant]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            background.spawn(self._asking, self.end_read(lease_id, asking.result()["read_id"]))

    async def end_read(self, lease_id: str, read_id: str) -> None:
        """Take a pin off."""
        with contextlib.suppress(Failure):
            await self._call(self._client().end_read(lease_id, read_id))

    async def release(self, lease_id: str) -> bool:
        """End a hold; while pinned it is doomed instead."""
        return await self._call(self._client().release(lease_id))

    async def prefill_ended(self, request_id: str, patience_s: float) -> bool:
        """Return whether a cancelled prefill is over in the engine, at most patience_s from now."""
        return await self._call(self._client().report(request_id, patience_s)) is not None

    async def release_prefill(self, request_id: str) -> bool:
        """Let go of a prefill outcome that nobody will read."""
        return await self.release(request_id)

    async def revoke_all(self) -> None:
        """End every decode turn's hold; pinned ones are doomed instead."""
        await self._call(self._client().revoke_all())

    async def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a live hold's deadline to ttl_s from now, never earlier."""
        return await self._call(self._client().extend(lease_id, ttl_s))

    async def holds(self) -> list[Hold]:
        """Return the table, soonest deadline first."""
        return [outputs.hold(info) for info in await self._call(self._client().list())]

    async def hold_events(self) -> AsyncIterator[HoldEnded]:
        """Yield holds that ended by deadline or eviction, until the engine stops."""
        try:
            async for event in self._client().subscribe():
                yield HoldEnded(lease_id=event["lease_id"], reason=event["reason"])
        except ControlError as error:
            raise outputs.control_failure(error) from None

    async def pool(self) -> worker_pb2.PoolState:
        """Return the state of the block pool."""
        info = await self._call(self._client().pool())
        return worker_pb2.PoolState(
            total_blocks=info["total"],
            free_blocks=info["free"],
            held_blocks=info["held"],
            leases=info["leases"],
        )

    def _remember(self, lease_id: str, known_tokens: int) -> None:
        self._known[lease_id] = known_tokens
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _client(self) -> ControlClient:
        if self._control is None:
            raise gone()
        return self._control

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except ControlError as error:
            raise outputs.control_failure(error) from None


def gone() -> Failure:
    """Return the failure of an engine that is dead or stopped."""
    return Failure(Reason.ERROR_REASON_WORKER_FAILED, "the engine is gone")
