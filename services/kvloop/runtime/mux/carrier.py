"""The end that serves: every call runs in a task of its own, through the service's own method.

The method does not notice: it gets a context that tells the time left and the metadata, and ends the call by
abort_with_status, as on a call of its own. A stream that carries no call ends once the worker drains; when a
stream breaks, its calls are cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol

import grpc
from google.rpc import code_pb2, status_pb2

from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason, to_status
from kvloop.runtime.mux.frames import MAX_CALLS, PAYLOAD_BYTES, WINDOW_BYTES, Outbox
from kvloop.runtime.security import unauthenticated
from kvloop.runtime.servicing import check_parsed, lenient
from kvloop.v1alpha1 import attach_pb2

_log = logs.get("servicing")


class Batch(Protocol):
    """A message that holds frames."""

    @property
    def frames(self) -> Iterable[attach_pb2.CallFrame]:
        """Return the frames, in order."""
        ...


class _Aborted(grpc.aio.AbortError):
    """A method ended its call."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__()
        self.status = status


class CallContext:
    """What a method knows of its call; the rest is the stream's."""

    def __init__(
        self,
        stream: Any,
        frame: attach_pb2.CallOpen,
        write: Callable[[bytes], Awaitable[None]],
        offer: Callable[[bytes], bool],
    ) -> None:
        """Take the stream's context, how the call began, and what sends serialized answers.

        write: waits for room after it; offer: sends only where there is room, and says whether it did.
        """
        self.write = write
        self.offer = offer
        self._stream = stream
        self._deadline = asyncio.get_running_loop().time() + frame.left_time.ToNanoseconds() / 1e9
        self._metadata = tuple(frame.metadata.items())

    def time_remaining(self) -> float:
        """Return the seconds until the caller's deadline."""
        return self._deadline - asyncio.get_running_loop().time()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the stream's metadata and the call's."""
        return (*(self._stream.invocation_metadata() or ()), *self._metadata)

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the call."""
        for key, value in status.trailing_metadata or ():
            if key == "grpc-status-details-bin":
                raise _Aborted(status_pb2.Status.FromString(value))
        raise _Aborted(status_pb2.Status(code=status.code.value[0], message=status.details))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Answer(NamedTuple):
    """A frame to go out."""

    number: int
    message: bytes
    status: bytes | None
    """At the end, instead of a message."""


class _Room:
    """How much more of a call's messages may be sent."""

    __slots__ = ("_more", "left")

    def __init__(self) -> None:
        self.left = WINDOW_BYTES
        self._more = asyncio.Event()
        self._more.set()

    async def wait(self) -> None:
        await self._more.wait()

    def sent(self, size: int) -> None:
        self.left -= size
        if self.left <= 0:
            self._more.clear()

    def taken(self, size: int) -> None:
        self.left += size
        if self.left > 0:
            self._more.set()


class _Stream:
    """One attached stream and its calls."""

    def __init__(self, carrier: "Carrier", context: Any) -> None:
        self._carrier = carrier
        self._context = context
        self._calls: dict[int, tuple[asyncio.Task[None], _Room]] = {}
        self._read_to_end = False
        self.out: Outbox[_Answer] = Outbox()

    async def read(self, batches: AsyncIterator[Batch]) -> None:
        try:
            async for batch in batches:
                check_parsed(batch)
                for frame in batch.frames:
                    self._take(frame)
        except Exception:
            self.out.close()
            raise
        self._read_to_end = True
        self.end_if_idle()

    def end_if_idle(self) -> None:
        if not self._calls and (self._read_to_end or self._carrier.draining):
            self.out.close()

    async def cancel_calls(self) -> None:
        tasks = [task for task, _ in self._calls.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _take(self, frame: attach_pb2.CallFrame) -> None:
        event = frame.WhichOneof("event")
        if event == "open":
            admits = self._carrier.admits
            if admits is not None and not admits(self._context.invocation_metadata() or ()):
                self._end(frame.call, to_status(unauthenticated()))
                return
            if len(self._calls) >= MAX_CALLS or frame.call in self._calls:
                refusal = Failure(Reason.ERROR_REASON_OVERLOADED, "too many calls on one stream")
                self._end(frame.call, to_status(refusal))
                return
            room = _Room()
            task = asyncio.create_task(self._serve(frame.call, frame.open, room))
            self._calls[frame.call] = (task, room)
            task.add_done_callback(lambda done: self._served(frame.call, done))
            return
        call = self._calls.get(frame.call)
        if call is None:
            return
        if event == "cancel":
            call[0].cancel()
        elif event == "taken_bytes":
            call[1].taken(frame.taken_bytes)

    async def _serve(self, number: int, opened: attach_pb2.CallOpen, room: _Room) -> None:
        status = status_pb2.Status()
        try:
            write, offer = partial(self._write, number, room), partial(self._offer, number, room)
            context = CallContext(self._context, opened, write, offer)
            async with asyncio.timeout(max(0.0, context.time_remaining())):
                await self._carry(number, opened.request, context, room)
        except _Aborted as aborted:
            status = aborted.status
        except TimeoutError:
            status = status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED)
        except Exception as error:  # noqa: BLE001 - the boundary of the call
            _log.error("call_failed", error=type(error).__name__, exc_info=error)
            status = status_pb2.Status(code=code_pb2.INTERNAL)
        # In the same step as the last message, so that both go out in one.
        self._end(number, status)

    def _served(self, number: int, call: "asyncio.Task[None]") -> None:
        # A callback of the task, since one that is cancelled before its first step never runs.
        del self._calls[number]
        if call.cancelled():
            self._end(number, status_pb2.Status(code=code_pb2.CANCELLED))
        self.end_if_idle()

    async def _carry(self, number: int, request: bytes, context: CallContext, room: _Room) -> None:
        parsed = self._carrier.parse(request)
        answers = self._carrier.method(parsed, context)
        if not hasattr(answers, "__anext__"):
            # None: the method has written its answers itself.
            if (answer := await answers) is not None:
                self._send(number, answer.SerializeToString(), room)
            return
        async with aclosing(answers):
            async for answer in answers:
                await self._write(number, room, answer.SerializeToString())

    def _offer(self, number: int, room: _Room, message: bytes) -> bool:
        if there_is := room.left > 0:
            self._send(number, message, room)
        return there_is

    async def _write(self, number: int, room: _Room, message: bytes) -> None:
        self._send(number, message, room)
        await room.wait()

    def _send(self, number: int, message: bytes, room: _Room) -> None:
        if len(message) > PAYLOAD_BYTES:
            raise _Aborted(status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED))
        room.sent(len(message))
        self.out.put(_Answer(number, message, None), len(message))

    def _end(self, number: int, status: status_pb2.Status) -> None:
        self.out.put(_Answer(number, b"", status.SerializeToString()))


class Carrier:
    """Serves attached streams by one method: unary, streaming, or one that writes its answers itself."""

    def __init__(
        self, method: Callable[[Any, Any], Any], request: type[Any], make_batch: Callable[..., Any]
    ) -> None:
        """Take the method, the class of its requests, and the class of the messages that go out."""
        self.method = method
        self.parse = lenient(request.FromString)
        self.draining = False
        self.admits: Callable[[Any], bool] | None = None
        """Tells by its metadata whether a stream may carry one more call; None: any may."""
        self._make_batch = make_batch
        self._streams: set[_Stream] = set()

    async def serve(self, batches: AsyncIterator[Batch], context: Any) -> AsyncGenerator[Any, None]:
        """Yield what goes out on a stream, until its calls are over or it breaks."""
        stream = _Stream(self, context)
        self._streams.add(stream)
        reading = asyncio.create_task(stream.read(batches))
        try:
            while answers := await stream.out.take():
                batch = self._make_batch()
                for number, message, status in answers:
                    frame = batch.frames.add()
                    frame.call = number
                    if status is None:
                        frame.message = message
                    else:
                        frame.status = status
                yield batch
            if reading.done():
                reading.result()
        finally:
            self._streams.discard(stream)
            reading.cancel()
            # Also takes notice of what reading failed of, which the stream's own end tells.
            await asyncio.gather(reading, return_exceptions=True)
            await stream.cancel_calls()

    def drain(self) -> None:
        """End streams as soon as they carry no call."""
        self.draining = True
        for stream in list(self._streams):
            stream.end_if_idle()
