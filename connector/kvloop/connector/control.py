"""The control socket: how a front end talks to the table of holds inside its engine core.

JSON lines over a unix socket of mode 0600. A request is {"id": n, "op": name, ...}; its reply is
{"id": n, "ok": result} or {"id": n, "error": code, "message": text}, in any order. After "subscribe",
lines {"event": {...}} come too. Calls never wait for an engine step, except `pool`, which waits until
blocks let go of are really back in the pool.

This module needs the standard library only; the engine adapter imports the client from here.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, cast

LINE_LIMIT = 64 * 1024 * 1024
"""Bytes of one line; block lists of a million tokens fit."""

ErrorCode = Literal["not_found", "expired", "bad_request", "internal", "closed"]


class Grant(TypedDict):
    """Leave to read a hold."""

    read_id: str
    params: dict[str, Any]
    """kv_transfer_params for the reading engine, cut to num_tokens."""
    num_tokens: int
    pin_s: float
    """Seconds for which the blocks stay for this read."""


class HoldInfo(TypedDict):
    """One hold of the table."""

    lease_id: str
    kind: Literal["decode", "prefill"]
    num_tokens: int
    num_blocks: int
    remaining_s: float
    pins: int
    doomed: bool


class PoolInfo(TypedDict):
    """State of the engine's block pool, in blocks."""

    total: int
    """Blocks that can be given out."""
    free: int
    held: int
    """Unique blocks kept by holds."""
    leases: int
    """Holds of decode turns that can be read."""


class TransferInfo(TypedDict):
    """One completed read."""

    ms: float
    bytes: int
    descriptors: int


class TurnHold(TypedDict):
    """What is held of a turn; begin_read is the way to its handle."""

    num_tokens: int
    num_blocks: int
    remaining_s: float


class Report(TypedDict):
    """How a turn's prompt came to be, and what is held of it."""

    local: int
    external: int
    computed: int
    transfer: TransferInfo | None
    hold: TurnHold | None
    held_s: float
    """Prefill turns: seconds for which the prompt's blocks are held for one reader."""
    refused: str | None
    """Why the read was refused or failed: "deadline", "hash", "counts", "fields", "transfer"."""


class Event(TypedDict):
    """A hold that ended without being released."""

    lease_id: str
    reason: Literal["expired", "evicted", "revoked"]


class ControlError(Exception):
    """A call that the engine core refused, or that did not reach it (code "closed")."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class ControlClient:
    """One connection to one engine core; any number of calls at once. Use from one event loop.

    Every call raises ControlError: "not_found" (no such hold), "expired" (its deadline has passed),
    "bad_request" (malformed arguments), "closed" (the engine core is gone).
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._closed = False
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, path: str | Path, timeout_s: float = 10.0) -> Self:
        """Connect, waiting up to timeout_s for the socket to appear."""
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_LIMIT)
            except OSError as error:
                if time.monotonic() >= give_up:
                    raise ControlError("closed", "no control socket") from error
                await asyncio.sleep(0.02)
            else:
                return cls(reader, writer)

    async def close(self) -> None:
        """Close the connection; calls in flight fail with "closed". Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._fail_all()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def begin_read(self, lease_id: str, num_tokens: int, pin_s: float) -> Grant:
        """Pin a decode turn's hold for pin_s and return a handle to its first num_tokens tokens.

        num_tokens is cut to what is held. Reads don't consume: any number may run at once.
        """
        grant = await self._call("begin_read", lease_id=lease_id, num_tokens=num_tokens, pin_s=pin_s)
        return cast("Grant", grant)

    async def end_read(self, lease_id: str, read_id: str) -> bool:
        """Take a pin off; False when it was gone already."""
        return bool(await self._call("end_read", lease_id=lease_id, read_id=read_id))

    async def release(self, lease_id: str) -> bool:
        """End a hold (of a decode turn, or of a prefill turn by its id); doomed while pinned.

        False when there is none. A prefill turn's reader has no pin that would protect it: release one only
        when no decode engine can be reading it any more, else leave it to its deadline.
        """
        return bool(await self._call("release", lease_id=lease_id))

    async def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a live hold's deadline to ttl_s from now, never earlier; False when there is none."""
        return bool(await self._call("extend", lease_id=lease_id, ttl_s=ttl_s))

    async def cancel(self, turn_id: str) -> None:
        """Say that the coming abort of this turn is the client's wish.

        Call it before the abort. An abort that was not announced, of a turn with stop strings, counts as
        ended by a stop string and is held; one that was announced is held only if on_cancel says so.
        """
        await self._call("cancel", turn_id=turn_id)

    async def hold(self, lease_id: str, wait_s: float = 1.0) -> HoldInfo | None:
        """Return what is held of a turn once it has ended; None when nothing is, or after wait_s."""
        return cast("HoldInfo | None", await self._call("hold", lease_id=lease_id, wait_s=wait_s))

    async def report(self, turn_id: str, wait_s: float = 1.0) -> Report | None:
        """Return the report of a turn that has ended, however it ended; None after wait_s.

        For turns that ended by abort or error, whose last output carries no kv_transfer_params.
        """
        return cast("Report | None", await self._call("report", turn_id=turn_id, wait_s=wait_s))

    async def list(self) -> "list[HoldInfo]":
        """Return all holds, soonest deadline first; expired ones left out unless pinned."""
        return cast("list[HoldInfo]", await self._call("list"))

    async def pool(self) -> PoolInfo:
        """Return the pool's state, after blocks already let go of are back in it."""
        return cast("PoolInfo", await self._call("pool"))

    async def revoke_all(self) -> int:
        """End all holds, pinned ones doomed; return how many. Each becomes an event "revoked"."""
        return int(await self._call("revoke_all"))

    async def reloaded(self, weights_version: str) -> None:
        """Say that the engine's weights are others now: handles of other versions are refused from now on."""
        await self._call("reloaded", weights_version=weights_version)

    async def guard(self, name: Literal["deadline", "hash", "counts"], enabled: bool) -> None:
        """Switch a single guard (tests only: needs the extra-config kvloop_test_hooks)."""
        await self._call("guard", name=name, enabled=enabled)

    async def stall(self, where: Literal["start", "end"] | None) -> None:
        """Have this engine's reads wait, see kvloop.connector.hooks; None lets them go on (tests only)."""
        await self._call("stall", where=where)

    async def spoil(self, how: Literal["short", "range", "twice", "other", "elsewhere"] | None) -> None:
        """Have this engine give out bad handles, see kvloop.connector.hooks; None ends it (tests only)."""
        await self._call("spoil", how=how)

    async def evict(self, lease_id: str) -> bool:
        """End a hold as the pool's pressure would; False when there is none (tests only)."""
        return bool(await self._call("evict", lease_id=lease_id))

    async def subscribe(self) -> AsyncIterator[Event]:
        """Yield holds that end by deadline, eviction or revocation from now on, until closed."""
        await self._call("subscribe")
        while (event := await self._events.get()) is not None:
            yield event

    async def _call(self, op: str, **arguments: object) -> Any:
        if self._closed:
            raise ControlError("closed")
        self._next += 1
        number = self._next
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _receive(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "event" in message:
                    self._events.put_nowait(message["event"])
                    continue
                future = self._waiting.get(message["id"])
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(ControlError(message["error"], message.get("message", "")))
                else:
                    future.set_result(message["ok"])
        except (OSError, ValueError):
            pass
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ControlError("closed"))
        self._events.put_nowait(None)
