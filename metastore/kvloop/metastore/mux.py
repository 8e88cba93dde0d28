"""Many operations on one connection.

redis-py gives each operation a connection of its own for its time: a burst of 64 lookups then needs 64
connections, and some 50 ms of the loop, more than the deadline of any of them. Here all operations of a
tick go out in one write, and answers are handed out in order. So one connection per node is all the pool
there is, and connecting is nobody's own: it goes on though whoever began it ran out of time.

An operation that ran out of time leaves its place in the order; its late answer is dropped.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

STALL_S = 0.005

Command = tuple[bytes | int | str, ...]


class Mux:
    """One node's connection, made anew when it broke."""

    def __init__(self, make: Callable[[], AbstractConnection], connect_s: float) -> None:
        """Take what makes an unconnected connection, and the time that connecting may take."""
        self._make = make
        self._connect_s = connect_s
        self._session: _Session | None = None
        self._connecting: asyncio.Task[_Session] | None = None
        self._closed = False
        self._ending: set[asyncio.Task[None]] = set()

    async def execute(self, command: Command, until: float, *, asking: bool = False) -> Any:
        """Return the answer of one command; raises what redis-py raises.

        until is the loop's time by which TimeoutError is raised. asking precedes the command with ASKING,
        with nothing in between.
        """
        session = self._session
        if session is None or session.ended:
            async with asyncio.timeout_at(until):
                session = await self._connect()
        try:
            return await session.submit(command, until, asking)
        except ReadOnlyError:
            # The server was demoted: behind a name or Sentinel, a new connection finds the new primary.
            session.end(RedisConnectionError("demoted"))
            raise

    async def reset(self) -> None:
        """Connect anew: a connection that gives no answer may never break by itself."""
        if self._session is not None:
            self._session.end(RedisConnectionError("reset"))
        await self._connect()

    async def _connect(self) -> "_Session":
        if self._closed:
            raise RedisConnectionError("closed")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open(), name="store-connect")
            self._connecting.add_done_callback(self._opened)
        return await asyncio.shield(self._connecting)

    async def _open(self) -> "_Session":
        connection = self._make()
        try:
            async with asyncio.timeout(self._connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._session = _Session(connection, self._ended)
        return self._session

    def _ended(self, session: "_Session") -> None:
        task = asyncio.create_task(session.gone(), name="store-disconnect")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _opened(self, task: "asyncio.Task[_Session]") -> None:
        self._connecting = None
        if not task.cancelled():
            # Retrieved here, since nobody may be left to do so.
            task.exception()

    async def close(self) -> None:
        """Close the connection; operations on the way fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._session is not None:
            self._session.end(RedisConnectionError("closed"))
        await asyncio.gather(*self._ending, return_exceptions=True)


class _Session:
    """The life of one connection: what is on its way, in order."""

    def __init__(self, connection: AbstractConnection, on_end: "Callable[[_Session], None]") -> None:
        self._connection = connection
        self._on_end = on_end
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._out: list[bytes] = []
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.ended = False
        self._tasks = [
            asyncio.create_task(self._read(), name="store-read"),
            asyncio.create_task(self._write(), name="store-write"),
        ]

    async def submit(self, command: Command, until: float, asking: bool) -> Any:
        """Send a command with the others of this tick, and return its answer."""
        if self.ended:
            raise RedisConnectionError("broken")
        alone = not self._pending and not asking
        if asking:
            self._add(("ASKING",)).add_done_callback(_retrieve)
        answer = self._add(command)
        timer = self._loop.call_at(until, self._expire, answer, until)
        try:
            if alone:
                # Nobody to share a write with; the writer's turn would only come later. Nor does it wait for
                # room: with nothing on its way nothing is buffered, and operations are far below 64 KiB.
                await self._send()
            else:
                self._wake.set()
            return await answer
        finally:
            timer.cancel()

    def _add(self, command: Command) -> "asyncio.Future[Any]":
        self._out.extend(self._connection.pack_command(*command))
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append(future)
        return future

    def _expire(self, answer: "asyncio.Future[Any]", until: float) -> None:
        if answer.done():
            return
        now = self._loop.time()
        if now - until > STALL_S:
            # It was this loop that stood still, maybe not the store: the answer may lie in the socket.
            self._loop.call_at(now + STALL_S, self._expire, answer, now + STALL_S)
        else:
            answer.set_exception(TimeoutError())

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.ended:
                return
            await self._send()

    async def _send(self) -> None:
        try:
            out, self._out = self._out, []
            await self._connection.send_packed_command(out, check_health=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the connection is over
            self.end(error)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    answer = await self._connection.read_response()
                except ResponseError as error:
                    self._answer(error)
                else:
                    self._answer(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the connection is over
            self.end(error)

    def _answer(self, answer: Any) -> None:
        if not self._pending:
            raise RedisConnectionError("an answer without a question")
        future = self._pending.popleft()
        if future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def end(self, error: Exception) -> None:
        """Give the connection up: whatever is on its way fails."""
        if self.ended:
            return
        self.ended = True
        # The reader ends with the stream, the writer by itself: cancelling would leave the socket behind.
        self._wake.set()
        self._on_end(self)
        failure = error if isinstance(error, RedisError) else RedisConnectionError(type(error).__name__)
        for future in self._pending:
            if not future.done():
                future.set_exception(failure)
        self._pending.clear()

    async def gone(self) -> None:
        """Disconnect, and return when nothing of the session runs any more."""
        with contextlib.suppress(RedisError, OSError):
            await self._connection.disconnect()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _retrieve(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
