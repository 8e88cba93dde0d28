"""A worker whose methods do as a test says, reached over attached streams on real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvloop.runtime.channels import open_channel
from kvloop.runtime.mux.caller import Caller, CallFailed
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.server import GrpcServer
from kvloop.runtime.servicing import stream, unary
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    turn_pb2,
)

LIMIT_S = 20.0


class Failed(Exception):
    """A call failed."""

    def __init__(self, failed: CallFailed) -> None:
        super().__init__(failed.code)
        self.status = failed.status
        self.code = failed.code


@dataclass
class Answering:
    """One call of Decode, as the worker sees it."""

    request: decode_service_pb2.DecodeRequest
    context: Any
    sent: int = 0


Script = Callable[[Answering], AsyncIterator[bytes]]


class Worker(decode_service_pb2_grpc.DecodeServiceServicer):
    """Answers Decode by a script: texts of chunks."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: dict[str, Answering] = {}
        self.cancelled: set[str] = set()
        self.streams = 0
        self.ended = 0
        """Streams that are over."""
        self._made: list[decode_service_pb2.DecodeServiceAttachResponse] = []
        self.carrier = Carrier(self.Decode, decode_service_pb2.DecodeRequest, self._batch)

    @property
    def batches(self) -> list[int]:
        """Frames of each message that went out."""
        return [len(batch.frames) for batch in self._made]

    def _batch(self) -> decode_service_pb2.DecodeServiceAttachResponse:
        self._made.append(decode_service_pb2.DecodeServiceAttachResponse())
        return self._made[-1]

    @stream
    async def Decode(  # noqa: N802
        self, request: decode_service_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        call = self.calls[request.request_id] = Answering(request, context)
        try:
            async with aclosing(self.script(call)) as texts:  # type: ignore[type-var]
                async for text in texts:
                    call.sent += 1
                    yield decode_service_pb2.DecodeResponse(chunk=turn_pb2.Chunk(token_ids=text))
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(request.request_id)
            raise

    @stream
    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        try:
            async with aclosing(self.carrier.serve(request_iterator, context)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self.ended += 1

    BeginRead = EndRead = ReleaseLease = ListLeases = GetInfo = None  # type: ignore[assignment]


class Prefiller(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Answers Prefill with the request's own id as handle."""

    def __init__(self) -> None:
        self.carrier = Carrier(
            self.Prefill, prefill_service_pb2.PrefillRequest, prefill_service_pb2.PrefillServiceAttachResponse
        )

    @unary
    async def Prefill(  # noqa: N802
        self, request: prefill_service_pb2.PrefillRequest, context: Any
    ) -> prefill_service_pb2.PrefillResponse:
        response = prefill_service_pb2.PrefillResponse()
        response.handle.params_json = request.request_id
        return response

    @stream
    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async with aclosing(self.carrier.serve(request_iterator, context)) as batches:
            async for batch in batches:
                yield batch

    ReleasePrefill = GetInfo = None  # type: ignore[assignment]


@dataclass
class Rig:
    """A worker, served, and a caller of it."""

    worker: Worker
    server: GrpcServer
    port: int
    channel: grpc.aio.Channel
    caller: Caller
    stack: AsyncExitStack

    def call(self, name: str, timeout_s: float = LIMIT_S, **fields: Any) -> Any:
        """Begin a call; yields serialized responses."""
        request = decode_service_pb2.DecodeRequest(request_id=name, **fields)
        return self.caller.call(request.SerializeToString(), timeout_s)

    async def run(self, name: str, take: Callable[[bytes], None], timeout_s: float = LIMIT_S) -> None:
        """Run a call to its end."""
        request = decode_service_pb2.DecodeRequest(request_id=name)
        await self.caller.run(request.SerializeToString(), timeout_s, take)

    async def texts(self, name: str) -> list[bytes]:
        """Return all that a call answers."""
        return [text_of(raw) async for raw in self.call(name)]

    async def serve_again(self) -> None:
        """Start another server of the same worker on the same port."""
        self.server = GrpcServer([])
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self.worker, self.server.server)
        await self.server.start(f"127.0.0.1:{self.port}")
        self.stack.push_async_callback(self.server.stop, None)


def text_of(raw: bytes) -> bytes:
    """Return the text of a serialized response."""
    return decode_service_pb2.DecodeResponse.FromString(raw).chunk.token_ids


def attach_decode(channel: grpc.aio.Channel) -> Caller:
    stub: Any = decode_service_pb2_grpc.DecodeServiceStub(channel)
    return Caller(stub.Attach, decode_service_pb2.DecodeServiceAttachRequest, Failed)


@asynccontextmanager
async def rig(script: Script) -> AsyncIterator[Rig]:
    """Serve a script."""
    async with AsyncExitStack() as stack:
        worker, server = Worker(script), GrpcServer([])
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server.server)
        port = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, None)
        channel = open_channel(f"127.0.0.1:{port}")
        stack.push_async_callback(channel.close)
        caller = attach_decode(channel)
        stack.push_async_callback(caller.close)
        yield Rig(worker, server, port, channel, caller, stack)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - conditions in other tasks have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


async def within(work: Awaitable[Any]) -> Any:
    """Return what comes in time."""
    return await asyncio.wait_for(work, LIMIT_S)
