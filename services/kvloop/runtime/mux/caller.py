"""The caller's end: calls as async generators, on a stream that is opened when it is needed.

A stream that breaks ends every call on it; the next call opens another one. Nobody's call
waits for another's: frames are sorted as they come, and each caller takes its own at its own pace.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.rpc import status_pb2

from kvloop.runtime import logs
from kvloop.runtime.mux.frames import PAYLOAD_BYTES, WINDOW_BYTES, Outbox
from kvloop.v1alpha1 import attach_pb2

_log = logs.get("mux")


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Why a call has no answer."""

    status: status_pb2.Status | None
    """With which the other end ended it; None when the stream broke, or the time was over."""
    code: str = ""
    """Without a status: the name of the gRPC code that says it best."""


class Batch(Protocol):
    """A message that holds frames."""

    @property
    def frames(self) -> Sequence[attach_pb2.AnswerFrame]:
        """Return the frames, in order."""
        ...


Attach = Callable[[], Any]
"""Opens a stream: a stub's method."""


Fill = Callable[[attach_pb2.CallFrame], None]
"""Writes a frame where it goes out: a large request is copied once, not once per message around it."""


def _taken(number: int, size: int) -> Fill:
    def fill(frame: attach_pb2.CallFrame) -> None:
        frame.call, frame.taken_bytes = number, size

    return fill


def _cancelled(number: int) -> Fill:
    def fill(frame: attach_pb2.CallFrame) -> None:
        frame.call = number
        frame.cancel.SetInParent()

    return fill


class _Call:
    """One call, as its stream's reader sees it."""

    __slots__ = ("_waiter", "broken", "messages", "number", "status", "untold")

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages: deque[bytes] = deque()
        self.status: bytes | None = None
        """How the other end ended it."""
        self.broken = ""
        """Why nothing follows, if the other end did not say so."""
        self.untold = 0
        """Bytes taken that the other end has not been told of."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self.status is not None or bool(self.broken)

    def stir(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def expire(self) -> None:
        if not self.over:
            self.broken = "DEADLINE_EXCEEDED"
            self.stir()

    async def news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class _Session:
    """The life of one stream."""

    def __init__(
        self, stream: "grpc.aio.StreamStreamCall[Any, Batch]", make_batch: Callable[..., Any]
    ) -> None:
        self._stream = stream
        self._make_batch = make_batch
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self.out: Outbox[Fill] = Outbox()
        self.ended = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def open(self, request: bytes, timeout_s: float, metadata: Iterable[tuple[str, str]]) -> _Call:
        call = _Call(next(self._numbers))
        self._calls[call.number] = call

        def fill(frame: attach_pb2.CallFrame) -> None:
            frame.call = call.number
            opened = frame.open
            opened.request = request
            opened.left_time.seconds, opened.left_time.nanos = int(timeout_s), int(timeout_s % 1 * 1e9)
            if metadata:
                opened.metadata.update(metadata)

        self.out.put(fill, len(request))
        return call

    def took(self, call: _Call, size: int) -> None:
        call.untold += size
        if call.untold >= WINDOW_BYTES // 2 and not call.over:
            self.out.put(_taken(call.number, call.untold))
            call.untold = 0

    def leave(self, call: _Call) -> None:
        if self._calls.pop(call.number, None) is not None and call.status is None:
            self.out.put(_cancelled(call.number))

    async def _read(self) -> None:
        why = "UNAVAILABLE"
        try:
            async for batch in self._stream:
                for frame in batch.frames:
                    call = self._calls.get(frame.call)
                    if call is None:
                        continue
                    if frame.HasField("message"):
                        call.messages.append(frame.message)
                    else:
                        call.status = frame.status
                        del self._calls[call.number]
                    call.stir()
        except grpc.aio.AioRpcError as error:
            why = error.code().name
        except grpc.aio.BaseError as error:
            _log.warning("attached_stream_broke", error=type(error).__name__)
        finally:
            self._end(why)

    async def _write(self) -> None:
        try:
            while fills := await self.out.take():
                batch = self._make_batch()
                for fill in fills:
                    fill(batch.frames.add())
                await self._stream.write(batch)
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The reader is told why.
            pass
        finally:
            self._stream.cancel()

    def _end(self, why: str) -> None:
        self.ended = True
        self.out.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.broken = call.broken or why
            call.stir()

    async def close(self) -> None:
        self._stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        # A reader that was cancelled before its first step has ended nothing.
        self._end("UNAVAILABLE")


class Caller:
    """Calls one worker's method."""

    def __init__(
        self, attach: Attach, make_batch: Callable[..., Any], failed: Callable[[CallFailed], Exception]
    ) -> None:
        """Take what opens a stream, the class of its messages, and what makes a failed call's exception."""
        self._attach = attach
        self._make_batch = make_batch
        self._failed = failed
        self._closed = False
        self._session: _Session | None = None
        self._former: set[asyncio.Task[None]] = set()

    async def call(
        self, request: bytes, timeout_s: float, metadata: Iterable[tuple[str, str]] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield the serialized responses; closing early cancels the call."""
        if self._closed:
            raise self._failed(CallFailed(None, "UNAVAILABLE"))
        if len(request) > PAYLOAD_BYTES:
            raise self._failed(CallFailed(None, "RESOURCE_EXHAUSTED"))
        session = self._current()
        call = session.open(request, timeout_s, metadata)
        timer = asyncio.get_running_loop().call_later(timeout_s, call.expire)
        messages = call.messages
        try:
            while True:
                while messages:
                    message = messages.popleft()
                    session.took(call, len(message))
                    yield message
                if call.status is not None:
                    if call.status:
                        raise self._failed(CallFailed(status_pb2.Status.FromString(call.status)))
                    return
                if call.broken:
                    raise self._failed(CallFailed(None, call.broken))
                await call.news()
        finally:
            timer.cancel()
            session.leave(call)

    async def close(self) -> None:
        """End the stream; calls on it break, and so do later ones."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
        if self._former:
            await asyncio.wait(self._former)

    def _current(self) -> _Session:
        session = self._session
        if session is None or session.ended:
            if session is not None:
                task = asyncio.create_task(session.close())
                self._former.add(task)
                task.add_done_callback(self._former.discard)
            session = self._session = _Session(self._attach(), self._make_batch)
        return session
