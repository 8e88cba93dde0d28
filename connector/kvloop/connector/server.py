"""The control socket's server: one thread with an event loop, next to the engine's own.

It touches the locked table only. What belongs to the engine's thread (giving blocks back to the pool) is
left in the table, and the engine is woken through `wake`. The thread also lets deadlines pass on an idle
engine, and has the engine step now and then while another engine may be reading, so that notices arrive.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvloop.connector.control import LINE_LIMIT, HoldInfo, Report
from kvloop.connector.guard import SWITCHES
from kvloop.connector.hold import Hold
from kvloop.connector.hooks import SPOILS, STALLS, Hooks
from kvloop.connector.table import HoldTable, NotHeld, Snapshot
from kvloop.connector.turns import TurnLog

_log = logging.getLogger("vllm.kvloop")

_MAX_PIN_S = 3600.0
_MAX_TTL_S = 7 * 24 * 3600.0
_TICK_S = 0.05
"""How often the engine steps for readers elsewhere whose notices or transfers wait for it."""
_POOL_WAIT_S = 5.0

Handle = Callable[[Hold, int, str, float], dict[str, Any]]
"""(hold, number of tokens, read id, pin's deadline) -> kv_transfer_params for the reader."""


class BadRequestError(ValueError):
    """Arguments of a call are malformed or not allowed."""


class ControlServer:
    """Serves the table of holds on a unix socket; without a path it only keeps the deadlines."""

    def __init__(
        self,
        table: HoldTable,
        turns: TurnLog,
        *,
        path: Path | None,
        handle: Handle,
        wake: Callable[[], None],
        pool: Callable[[], tuple[int, int]],
        reloaded: Callable[[str], None] = lambda _version: None,
        hooks: Hooks | None = None,
    ) -> None:
        """handle makes kv_transfer_params; wake makes the engine step; pool returns (total, free) blocks.

        reloaded is told the version of new weights. hooks: what tests may change, or None where they may not.
        """
        self._table = table
        self._turns = turns
        self._path = path
        self._handle = handle
        self._wake = wake
        self._pool = pool
        self._reloaded = reloaded
        self._hooks = hooks
        self._loop = asyncio.new_event_loop()
        self._settled: dict[str, set[asyncio.Future[None]]] = {}
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._operations: dict[str, Callable[[Mapping[str, Any]], object]] = {
            "begin_read": self._begin_read,
            "end_read": self._end_read,
            "release": self._release,
            "extend": self._extend,
            "cancel": self._cancel,
            "hold": self._hold,
            "report": self._report,
            "list": self._list,
            "pool": self._pool_state,
            "revoke_all": self._revoke_all,
            "reloaded": self._note_reload,
            "guard": self._switch,
            "stall": self._stall,
            "spoil": self._spoil,
            "evict": self._evict,
        }
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        """What ended the thread."""
        self._thread = threading.Thread(target=self._run, name="kvloop-control", daemon=True)

    def start(self) -> None:
        """Start; returns once the socket listens. Raises RuntimeError when it can't."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise RuntimeError("the control socket could not be opened") from self._failure

    def stop(self) -> None:
        """Stop and remove the socket. Idempotent; any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=5)

    def turn_settled(self, turn_id: str) -> None:
        """Tell those who wait for a turn's end; any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake_waiters, turn_id)

    # -- life of the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            # Before the event: whoever waits for it looks here.
            self._failure = error
            _log.exception("kvloop: control socket failed")
        finally:
            self._loop.close()
            self._ready.set()

    async def _main(self) -> None:
        server = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            door = socket.socket(socket.AF_UNIX)
            try:
                door.bind(str(self._path))
                self._path.chmod(0o600)  # before it listens
                server = await asyncio.start_unix_server(self._serve, sock=door, limit=LINE_LIMIT)
            except BaseException:
                door.close()
                raise
        self._table.on_change = self._note_change
        self._ready.set()
        ticker = asyncio.create_task(self._keep_deadlines())
        await self._stop.wait()
        ticker.cancel()
        if server is not None and self._path is not None:
            server.close()
            self._path.unlink(missing_ok=True)
        for task in [*self._calls, *self._connections]:
            task.cancel()
        await asyncio.gather(ticker, *self._calls, *self._connections, return_exceptions=True)

    def _note_change(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _keep_deadlines(self) -> None:
        """Let holds expire, pass events on, and keep readers' notices coming."""
        while True:
            self._changed.clear()
            try:
                wait = self._tick()
            except Exception:  # noqa: BLE001 - without this loop nothing ends at its deadline
                _log.exception("kvloop: deadlines could not be kept")
                wait = _TICK_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)

    def _tick(self) -> float | None:
        """Do what is due; return in how many seconds there is more, None for with the next change."""
        self._table.expire()
        self._after_change()
        readers_in_s = self._table.readers_in_s
        if readers_in_s == 0:
            self._wake()
            readers_in_s = _TICK_S
        due = self._table.next_deadline()
        waits = [readers_in_s, None if due is None else max(0.0, due - self._table.clock())]
        return min((wait for wait in waits if wait is not None), default=None)

    def _after_change(self) -> None:
        if self._table.has_freeable:
            self._wake()
        for lease_id, reason in self._table.take_events():
            line = json.dumps({"event": {"lease_id": lease_id, "reason": reason}}).encode() + b"\n"
            for writer in list(self._subscribers):
                if writer.transport.get_write_buffer_size() > LINE_LIMIT:
                    self._subscribers.discard(writer)  # nobody reads there any more
                    continue
                writer.write(line)

    def _wake_waiters(self, turn_id: str) -> None:
        for future in self._settled.pop(turn_id, ()):
            if not future.done():
                future.set_result(None)

    # -- connections ----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while line := await reader.readline():
                call = asyncio.create_task(self._answer(line, writer))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        except (OSError, ValueError):
            pass
        finally:
            self._connections.discard(task)
            self._subscribers.discard(writer)
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        number = None
        try:
            message = json.loads(line)
            number = message["id"]
            answer: dict[str, Any] = {"ok": await self._do(message, writer)}
        except NotHeld as error:
            answer = {"error": "expired" if error.expired else "not_found"}
        except (BadRequestError, KeyError, TypeError, json.JSONDecodeError) as error:
            answer = {"error": "bad_request", "message": type(error).__name__}
        except Exception:  # noqa: BLE001 - one bad call must not end the connection
            _log.exception("kvloop: control operation failed")
            answer = {"error": "internal"}
        if not writer.is_closing():
            writer.write(json.dumps({"id": number, **answer}).encode() + b"\n")

    async def _do(self, message: Mapping[str, Any], writer: asyncio.StreamWriter) -> object:
        if message["op"] == "subscribe":
            self._subscribers.add(writer)
            return None
        operation = self._operations.get(message["op"])
        if operation is None:
            raise BadRequestError
        result = operation(message)
        if inspect.isawaitable(result):
            result = await result
        self._after_change()
        return result

    # -- operations -----------------------------------------------------------------------------------

    def _end_read(self, message: Mapping[str, Any]) -> bool:
        return self._table.unpin(_text(message, "lease_id"), _text(message, "read_id"))

    def _release(self, message: Mapping[str, Any]) -> bool:
        return self._table.release(_text(message, "lease_id"))

    def _extend(self, message: Mapping[str, Any]) -> bool:
        return self._table.extend(_text(message, "lease_id"), _seconds(message, "ttl_s", _MAX_TTL_S))

    def _cancel(self, message: Mapping[str, Any]) -> None:
        self._turns.cancel(_text(message, "turn_id"))

    async def _hold(self, message: Mapping[str, Any]) -> HoldInfo | None:
        lease_id = _text(message, "lease_id")
        await self._until_settled(lease_id, _seconds(message, "wait_s", _MAX_PIN_S))
        found = self._table.snapshot(lease_id)
        return None if found is None else _info(found)

    async def _report(self, message: Mapping[str, Any]) -> Report | None:
        turn_id = _text(message, "turn_id")
        await self._until_settled(turn_id, _seconds(message, "wait_s", _MAX_PIN_S))
        return self._turns.report(turn_id)

    def _list(self, _message: Mapping[str, Any]) -> list[HoldInfo]:
        return [_info(found) for found in self._table.snapshots()]

    def _revoke_all(self, _message: Mapping[str, Any]) -> int:
        return self._table.revoke_all()

    def _begin_read(self, message: Mapping[str, Any]) -> dict[str, Any]:
        wanted = message["num_tokens"]
        if not isinstance(wanted, int) or wanted < 1:
            raise BadRequestError
        pin_s = _seconds(message, "pin_s", _MAX_PIN_S)
        lease_id = _text(message, "lease_id")
        read_id, deadline, hold = self._table.pin(lease_id, pin_s)
        try:
            num_tokens = min(wanted, hold.num_tokens)
            params = self._handle(hold, num_tokens, read_id, deadline)
        except BaseException:
            self._table.unpin(lease_id, read_id)
            raise
        self._changed.set()
        return {"read_id": read_id, "params": params, "num_tokens": num_tokens, "pin_s": pin_s}

    async def _until_settled(self, turn_id: str, wait_s: float) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        waiters = self._settled.setdefault(turn_id, set())
        waiters.add(future)
        try:
            if self._turns.report(turn_id) is None:
                await asyncio.wait_for(future, wait_s)
        except TimeoutError:
            pass
        finally:
            waiters.discard(future)
            if not waiters and self._settled.get(turn_id) is waiters:
                del self._settled[turn_id]

    async def _pool_state(self, _message: Mapping[str, Any]) -> dict[str, int]:
        self._table.expire()
        give_up = self._loop.time() + _POOL_WAIT_S
        while self._table.has_freeable and self._loop.time() < give_up:
            self._after_change()
            await asyncio.sleep(0.001)
        total, free = self._pool()
        return {
            "total": total,
            "free": free,
            "held": self._table.held_blocks,
            "leases": self._table.leases,
        }

    def _note_reload(self, message: Mapping[str, Any]) -> None:
        self._reloaded(_text(message, "weights_version"))

    # -- what tests may break -------------------------------------------------------------------------

    def _allowed(self) -> Hooks:
        if self._hooks is None:
            raise BadRequestError
        return self._hooks

    def _switch(self, message: Mapping[str, Any]) -> None:
        off = self._allowed().guards_off
        if message["name"] not in SWITCHES:
            raise BadRequestError
        if message["enabled"]:
            off.discard(message["name"])
        else:
            off.add(message["name"])

    def _stall(self, message: Mapping[str, Any]) -> None:
        hooks, where = self._allowed(), message["where"]
        if where is not None and where not in STALLS:
            raise BadRequestError
        hooks.stall = where
        self._wake()

    def _spoil(self, message: Mapping[str, Any]) -> None:
        hooks, how = self._allowed(), message["how"]
        if how is not None and how not in SPOILS:
            raise BadRequestError
        hooks.spoil = how

    def _evict(self, message: Mapping[str, Any]) -> bool:
        self._allowed()
        return self._table.evict(_text(message, "lease_id"))


def _info(found: Snapshot) -> HoldInfo:
    return {
        "lease_id": found.lease_id,
        "kind": found.kind,
        "num_tokens": found.num_tokens,
        "num_blocks": found.num_blocks,
        "remaining_s": found.remaining_s,
        "pins": found.pins,
        "doomed": found.doomed,
    }


def _text(message: Mapping[str, Any], key: str) -> str:
    value = message[key]
    if not isinstance(value, str) or not value or len(value) > 512:
        raise BadRequestError
    return value


def _seconds(message: Mapping[str, Any], key: str, most: float) -> float:
    value = message[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequestError
    return float(value)
