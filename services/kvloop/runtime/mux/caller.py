"""The caller's end, on a stream that is opened when it is needed.

A stream that breaks ends every call on it; the next call opens another one. Nobody's call waits for
another's: frames are sorted as they come. A caller is handed its messages at once (run), which costs the
least, or takes them at its own pace (call), which holds up its own source alone.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.rpc import status_pb2

from kvloop.runtime import logs
from kvloop.runtime.errors import code_of
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

Take = Callable[[bytes], None]
"""Is given a serialized response."""


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

    __slots__ = ("_waiter", "broken", "eager", "error", "number", "status", "take", "untold")

    def __init__(self, number: int, take: Take, *, eager: bool) -> None:
        self.number = number
        self.take = take
        self.eager = eager
        """Whether what was given to take counts as taken; otherwise the caller is told of it, and says so."""
        self.status: bytes | None = None
        """How the other end ended it."""
        self.broken = ""
        """Why nothing follows, if the other end did not say so."""
        self.error: Exception | None = None
        """What take raised."""
        self.untold = 0
        """Bytes taken that the other end has not been told of."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self.status is not None or bool(self.broken) or self.error is not None

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
        self._idle = asyncio.Event()
        """Set whenever the last call under way is over."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def open(
        self,
        request: bytes,
        timeout_s: float,
        metadata: Iterable[tuple[str, str]],
        take: Take,
        *,
        eager: bool,
    ) -> _Call:
        number = next(self._numbers)
        call = self._calls[number] = _Call(number, take, eager=eager)

        def fill(frame: attach_pb2.CallFrame) -> None:
            frame.call = number
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
        if call.number in self._calls:
            self._forget(call)
            if call.status is None:
                self.out.put(_cancelled(call.number))

    def _forget(self, call: _Call) -> None:
        del self._calls[call.number]
        if not self._calls:
            self._idle.set()

    async def _read(self) -> None:
        why = "UNAVAILABLE"
        calls = self._calls
        try:
            async for batch in self._stream:
                for frame in batch.frames:
                    call = calls.get(frame.call)
                    if call is None:
                        continue
                    message = frame.message
                    if message or frame.HasField("message"):
                        self._give(call, message)
                    else:
                        call.status = frame.status
                        self._forget(call)
                        call.stir()
        except grpc.aio.AioRpcError as error:
            why = code_of(error).name
        except grpc.aio.BaseError as error:
            _log.warning("attached_stream_broke", error=type(error).__name__)
        finally:
            self._end(why)

    def _give(self, call: _Call, message: bytes) -> None:
        if call.error is not None:
            return
        try:
            call.take(message)
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            call.error = error
            call.stir()
            return
        if call.eager:
            self.took(call, len(message))
        else:
            call.stir()

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
        for call in self._calls.values():
            call.broken = call.broken or why
            call.stir()
        self._calls.clear()
        self._idle.set()

    async def finish(self) -> None:
        """Close once the calls under way are over."""
        while self._calls:
            self._idle.clear()
            await self._idle.wait()
        await self.close()

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
        self,
        attach: Attach,
        make_batch: Callable[..., Any],
        failed: Callable[[CallFailed], Exception],
        shows: Callable[[], str] = str,
    ) -> None:
        """Take what opens a stream, the class of its messages, and what makes a failed call's exception.

        shows: what a stream that is opened now shows of who calls; once that is another, so is the stream.
        """
        self._shows = shows
        self._shown = ""
        self._attach = attach
        self._make_batch = make_batch
        self._failed = failed
        self._closed = False
        self._session: _Session | None = None
        self._former: dict[asyncio.Task[None], _Session] = {}
        self._opened = 0
        """Streams so far."""

    async def run(
        self, request: bytes, timeout_s: float, take: Take, metadata: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Give take each serialized response as it comes; return at the end of the call.

        Cancelling cancels the call, and so does what take raises, which is raised here.
        """
        session = self._session_for(request)
        call = session.open(request, timeout_s, metadata, take, eager=True)
        timer = asyncio.get_running_loop().call_later(timeout_s, call.expire)
        try:
            while not call.over:
                await call.news()
            if call.error is not None:
                raise call.error
            self._check(call)
        finally:
            timer.cancel()
            session.leave(call)

    async def call(
        self, request: bytes, timeout_s: float, metadata: Iterable[tuple[str, str]] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield the serialized responses; closing early cancels the call."""
        session = self._session_for(request)
        messages: deque[bytes] = deque()
        call = session.open(request, timeout_s, metadata, messages.append, eager=False)
        timer = asyncio.get_running_loop().call_later(timeout_s, call.expire)
        try:
            while True:
                while messages:
                    message = messages.popleft()
                    session.took(call, len(message))
                    yield message
                if call.over:
                    break
                await call.news()
            self._check(call)
        finally:
            timer.cancel()
            session.leave(call)

    def _check(self, call: _Call) -> None:
        """Raise what a call that is over failed of."""
        if call.status:
            raise self._failed(CallFailed(status_pb2.Status.FromString(call.status)))
        if call.status is None:
            raise self._failed(CallFailed(None, call.broken))

    @property
    def stream(self) -> int:
        """Return the number of the stream over which a call goes that is made now."""
        return self._opened + (self._session is None or self._session.ended)

    def renew(self, stream: int) -> None:
        """Have later calls go over a new stream, if this one is still in use; calls under way end on it."""
        if self._session is not None and self._opened == stream:
            self._retire(self._session, self._session.finish())
            self._session = None

    async def close(self) -> None:
        """End all streams; calls on them break, and so do later ones."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
        former = dict(self._former)
        for session in former.values():
            await session.close()
        if former:
            await asyncio.wait(former)

    def _retire(self, session: _Session, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._former[task] = session
        task.add_done_callback(lambda done: self._former.pop(done, None))

    def _session_for(self, request: bytes) -> _Session:
        """Return the stream that is to carry a request."""
        if self._closed:
            raise self._failed(CallFailed(None, "UNAVAILABLE"))
        if len(request) > PAYLOAD_BYTES:
            raise self._failed(CallFailed(None, "RESOURCE_EXHAUSTED"))
        shown, session = self._shows(), self._session
        if session is not None and shown != self._shown:
            self.renew(self._opened)
            session = self._session
        if session is None or session.ended:
            self._shown = shown
            if session is not None:
                self._retire(session, session.close())
            session = self._session = _Session(self._attach(), self._make_batch)
            self._opened += 1
        return session
