"""Small prefill and decode workers on real gRPC, with hooks to fail where a test wants them to."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvloop.metastore.memory import MemoryDirectory
from kvloop.metastore.port import DirectoryUnavailable, LeaseDirectory
from kvloop.router.app import RouterApp
from kvloop.router.settings import RouterSettings
from kvloop.runtime import tokens
from kvloop.runtime.channels import open_channel
from kvloop.runtime.digests import COARSE_BYTES, coarse_lengths, prefix_digests
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import stream, unary
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    lease_pb2,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
    sampling_pb2,
    turn_pb2,
    worker_pb2,
)

VOCAB = 1000
MAX_LEN = 4096
BLOCK = 16
SECRET = "a secret of the whole fleet"
Hook = Callable[[], Any]


def make_info(role: "worker_pb2.WorkerRole.ValueType", name: str) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        role=role,
        worker_id=name,
        epoch=secrets.token_hex(8),
        model=turn_pb2.ModelRef(name="m", revision="r1"),
        adapters=["lora"],
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        block_size=BLOCK,
        engine="fake",
        compatibility="c1",
        bidirectional_kv_xfer=True,
        kv_recompute_threshold=2 * BLOCK,
        attach=True,
    )


class Served:
    """A gRPC server that can be killed and started again on its port."""

    def __init__(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._add = add
        self.server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._add(server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self.server = server

    async def kill(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)


class FakePrefill(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Reads back what it is told to, in name only."""

    def __init__(self, name: str) -> None:
        self.info = make_info(worker_pb2.WORKER_ROLE_PREFILL, name)
        self.requests: list[prefill_service_pb2.PrefillRequest] = []
        self.released: list[str] = []
        self.held: set[str] = set()
        self.missing: set[str] = set()
        """Leases that no holder knows."""
        self.on_prefill: Hook | None = None
        """Called (and awaited) ahead of each answer; what it raises is the answer."""
        self.first: turn_pb2.Chunk | None = None
        self.cancelled = 0
        self.streams = 0
        self._carrier = Carrier(
            self.Prefill, prefill_service_pb2.PrefillRequest, prefill_service_pb2.PrefillServiceAttachResponse
        )
        self.host = Served(lambda s: prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(self, s))

    @stream
    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        async with aclosing(self._carrier.serve(request_iterator, context)) as batches:
            async for batch in batches:
                yield batch

    @unary
    async def Prefill(  # noqa: N802
        self, request: prefill_service_pb2.PrefillRequest, context: Any
    ) -> prefill_service_pb2.PrefillResponse:
        self.requests.append(request)
        try:
            if self.on_prefill is not None:
                await self.on_prefill()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        source = request.read_source
        length = tokens.count(request.prompt_token_ids)
        if (
            request.HasField("read_source")
            and source.lease_id in self.missing
            and request.report_missing_lease
        ):
            raise Failure(Reason.ERROR_REASON_LEASE_NOT_FOUND, "no such lease")
        self.held.add(request.request_id)
        response = prefill_service_pb2.PrefillResponse(held_ms=30_000)
        handle = {"at": self.host.endpoint, "id": request.request_id}
        response.handle.params_json = json.dumps(handle)
        if request.first_token and self.first is not None:
            response.first.CopyFrom(self.first)
        if request.HasField("read_source"):
            read = min(source.num_tokens, length - 1)
            response.reuse.verdict = turn_pb2.VERDICT_READBACK
            response.reuse.reason = turn_pb2.REUSE_REASON_PROVEN
            response.reuse.tokens.readback = read
            response.reuse.tokens.computed = length - read
            response.reuse.readback.bytes = read
        else:
            response.reuse.verdict = turn_pb2.VERDICT_RECOMPUTE
            response.reuse.reason = request.cold_reason
            response.reuse.tokens.computed = length
        return response

    @unary
    async def ReleasePrefill(  # noqa: N802
        self, request: prefill_service_pb2.ReleasePrefillRequest, context: Any
    ) -> prefill_service_pb2.ReleasePrefillResponse:
        self.released.append(request.request_id)
        held = request.request_id in self.held
        self.held.discard(request.request_id)
        return prefill_service_pb2.ReleasePrefillResponse(released=held)

    @unary
    async def GetInfo(  # noqa: N802
        self, request: prefill_service_pb2.PrefillServiceGetInfoRequest, context: Any
    ) -> prefill_service_pb2.PrefillServiceGetInfoResponse:
        return prefill_service_pb2.PrefillServiceGetInfoResponse(info=self.info)


class FakeDecode(decode_service_pb2_grpc.DecodeServiceServicer):
    """Answers with the prompt's first token plus one, and so on; leaves leases."""

    def __init__(self, name: str, directory: LeaseDirectory, prefills: list[FakePrefill]) -> None:
        self.info = make_info(worker_pb2.WORKER_ROLE_DECODE, name)
        self.requests: list[decode_service_pb2.DecodeRequest] = []
        self.released: list[tuple[str, bytes]] = []
        self.leases: set[str] = set()
        self.on_chunk: Callable[[int], Any] | None = None
        """Called (and awaited) ahead of each chunk with its number; what it raises ends the stream."""
        self.on_summary: Hook | None = None
        self.drifts = False
        """Whether each answer begins with another token than the last one."""
        self.siblings = [self]
        self.cancelled = 0
        self.finished = 0
        self.displaces: tuple[str, str] | None = None
        self.ttl_s = 60.0
        self.padding = ""
        """Added to the text of every chunk."""
        self._directory = directory
        self._prefills = prefills
        self.streams = 0
        self._carrier = Carrier(
            self.Decode, decode_service_pb2.DecodeRequest, decode_service_pb2.DecodeServiceAttachResponse
        )
        self.host = Served(lambda s: decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self, s))

    @stream
    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        async with aclosing(self._carrier.serve(request_iterator, context)) as batches:
            async for batch in batches:
                yield batch

    @stream
    async def Decode(  # noqa: N802
        self, request: decode_service_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        self.requests.append(request)
        answer = expected_answer(request.prompt_token_ids, request.sampling.max_tokens or 4)
        if self.drifts:
            served = sum(len(decode.requests) for decode in self.siblings)
            answer = [(token + served - 1) % VOCAB for token in answer]
        try:
            for number, token in enumerate(answer):
                if self.on_chunk is not None:
                    await self.on_chunk(number)
                if number == 0:
                    self._read(request.handle.params_json)
                chunk = turn_pb2.Chunk(token_ids=tokens.pack([token]), text=f"<{token}>{self.padding}")
                if number == len(answer) - 1:
                    chunk.finish_reason = turn_pb2.FINISH_REASON_LENGTH
                yield decode_service_pb2.DecodeResponse(chunk=chunk)
            if self.on_summary is not None:
                await self.on_summary()
            summary = decode_service_pb2.DecodeSummary(
                finish_reason=turn_pb2.FINISH_REASON_LENGTH, output_tokens=len(answer)
            )
            summary.handoff.bytes = 7
            if request.scope.scope and (not request.retention.HasField("hold") or request.retention.hold):
                await self._publish(request, answer, summary)
            if self.displaces is not None:
                summary.displaced.decode_endpoint, summary.displaced.lease_id = self.displaces
            self.finished += 1
            yield decode_service_pb2.DecodeResponse(summary=summary)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    def _read(self, params_json: str) -> None:
        handle = json.loads(params_json)
        for prefill in self._prefills:
            if prefill.host.endpoint == handle["at"]:
                prefill.held.discard(handle["id"])

    async def _publish(
        self,
        request: decode_service_pb2.DecodeRequest,
        answer: list[int],
        summary: decode_service_pb2.DecodeSummary,
    ) -> None:
        history = request.prompt_token_ids + tokens.pack(answer[:-1])
        entry = make_entry(
            request.scope.digest_key,
            history,
            endpoint=self.host.endpoint,
            epoch=self.info.epoch,
            turn_start_us=request.scope.turn_start_us,
        )
        try:
            published = await self._directory.publish(request.scope.scope, entry, self.ttl_s)
        except DirectoryUnavailable:
            published = None
        if published is not None and not published.won:
            return
        self.leases.add(entry.lease_id)
        if published is not None and published.displaced is not None:
            self.leases.discard(published.displaced.lease_id)
        summary.lease.lease_id = entry.lease_id
        summary.lease.num_tokens = entry.num_tokens

    async def BeginRead(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def EndRead(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListLeases(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    @unary
    async def ReleaseLease(  # noqa: N802
        self, request: decode_service_pb2.ReleaseLeaseRequest, context: Any
    ) -> decode_service_pb2.ReleaseLeaseResponse:
        self.released.append((request.lease_id, request.scope))
        held = request.lease_id in self.leases
        self.leases.discard(request.lease_id)
        if request.scope:
            await self._directory.remove(request.scope, request.lease_id)
        return decode_service_pb2.ReleaseLeaseResponse(released=held)

    @unary
    async def GetInfo(  # noqa: N802
        self, request: decode_service_pb2.DecodeServiceGetInfoRequest, context: Any
    ) -> decode_service_pb2.DecodeServiceGetInfoResponse:
        return decode_service_pb2.DecodeServiceGetInfoResponse(info=self.info)


def make_entry(
    key: bytes, history: bytes, *, endpoint: str, epoch: str, turn_start_us: int = 1
) -> lease_pb2.DirectoryEntry:
    length = tokens.count(history)
    lengths = coarse_lengths(length, BLOCK)
    entry = lease_pb2.DirectoryEntry(
        version=1,
        lease_id=secrets.token_hex(8),
        conversation_id="c",
        decode_endpoint=endpoint,
        epoch=epoch,
        num_tokens=length,
        block_size=BLOCK,
        turn_start_us=turn_start_us,
        held=True,
    )
    for at, digest in zip(lengths, prefix_digests(key, history, lengths), strict=True):
        entry.digests.add(num_tokens=at, digest=digest[:COARSE_BYTES])
    return entry


def expected_answer(prompt: bytes, count: int) -> list[int]:
    first = tokens.unpack(prompt[:4])[0]
    return [(first + number) % VOCAB for number in range(1, count + 1)]


class FlakyDirectory(MemoryDirectory):
    """A directory that can be switched off, or stopped in the middle of a lookup."""

    down = False
    stuck: asyncio.Event | None = None
    lookups = 0
    on_lookup: Hook | None = None

    async def lookup(self, scope: bytes) -> Any:
        return await self._asked(super().lookup(scope))

    async def find_by_prefix(self, group: bytes, digests: Any, scopes: Any = ()) -> Any:
        return await self._asked(super().find_by_prefix(group, digests, scopes))

    async def _asked(self, answer: Coroutine[Any, Any, Any]) -> Any:
        self.lookups += 1
        with contextlib.closing(answer):
            if self.stuck is not None:
                await self.stuck.wait()
            if self.down:
                raise DirectoryUnavailable
            found = await answer
        if self.on_lookup is not None:
            self.on_lookup()
        return found

    async def publish(self, scope: bytes, entry: Any, ttl_s: float) -> Any:
        if self.down:
            raise DirectoryUnavailable
        return await super().publish(scope, entry, ttl_s)

    async def remove(self, scope: bytes, lease_id: str) -> bool:
        if self.down:
            raise DirectoryUnavailable
        return await super().remove(scope, lease_id)


@dataclass
class Answer:
    """What a client got of a turn."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chunks: int = 0
    logprobs: int = 0
    summary: turn_pb2.Summary | None = None

    @property
    def reuse(self) -> turn_pb2.Reuse:
        assert self.summary is not None
        return self.summary.reuse

    @property
    def way(self) -> tuple[str, str]:
        """Verdict and reason, without prefixes."""
        verdict = turn_pb2.Verdict.Name(self.reuse.verdict).removeprefix("VERDICT_")
        return verdict, turn_pb2.ReuseReason.Name(self.reuse.reason).removeprefix("REUSE_REASON_")


class Client:
    """A client of one router."""

    def __init__(self, endpoint: str, token: str | None = None, *, narrow: bool = False) -> None:
        # Narrow: the transport takes in little ahead of the reader, and doesn't grow to take more.
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
        self.channel = (
            grpc.aio.insecure_channel(endpoint, options=options) if narrow else open_channel(endpoint)
        )
        self.stub: Any = router_service_pb2_grpc.RouterServiceStub(self.channel)
        self.metadata = [("authorization", f"Bearer {token}")] if token else []

    def generate(
        self, request: router_service_pb2.GenerateRequest, timeout: float | None = 30.0
    ) -> "grpc.aio.UnaryStreamCall[Any, Any]":
        call: grpc.aio.UnaryStreamCall[Any, Any] = self.stub.Generate(
            request, timeout=timeout, metadata=self.metadata
        )
        return call

    async def turn(self, request: router_service_pb2.GenerateRequest, timeout: float | None = 30.0) -> Answer:
        return await collect(self.generate(request, timeout))

    async def say(self, prompt: list[int], conversation: str = "c", **fields: Any) -> Answer:
        return await self.turn(make_request(prompt, conversation, **fields))


async def collect(call: Any, into: Answer | None = None) -> Answer:
    answer = into if into is not None else Answer()
    try:
        async for response in call:
            assert answer.summary is None, "nothing comes after the summary"
            if response.WhichOneof("event") == "summary":
                answer.summary = response.summary
            else:
                answer.chunks += 1
                answer.token_ids += tokens.unpack(response.chunk.token_ids)
                answer.text += response.chunk.text
                answer.logprobs += len(response.chunk.logprobs)
    finally:
        # A reader that is cancelled as its first answer comes in leaves grpc.aio's call going.
        call.cancel()
    return answer


def make_request(
    prompt: list[int], conversation: str = "c", *, max_tokens: int = 4, **fields: Any
) -> router_service_pb2.GenerateRequest:
    return router_service_pb2.GenerateRequest(
        conversation_id=conversation,
        prompt_token_ids=tokens.pack(prompt),
        sampling=fields.pop("sampling", None)
        or sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        **fields,
    )


@dataclass
class FakeFleet:
    """Workers and routers of one test."""

    directory: FlakyDirectory
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    stack: AsyncExitStack

    def settings(self, **changes: Any) -> RouterSettings:
        values: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "prefill_endpoints": tuple(p.host.endpoint for p in self.prefills),
            "decode_endpoints": tuple(d.host.endpoint for d in self.decodes),
            "fleet_secret": SECRET,
            "info_interval_s": 0.05,
            "directory_timeout_ms": 2000.0,
            # The way that limits leave open, so that a test knows which.
            "direct": False,
            "by_cost": False,
        }
        return RouterSettings(**(values | changes))

    async def router(self, **changes: Any) -> RouterApp:
        app = RouterApp(self.settings(**changes), directory=self.directory)
        self.stack.push_async_callback(app.stop)
        await app.start()
        return app

    async def client(
        self, app: RouterApp | None = None, token: str | None = None, *, narrow: bool = False
    ) -> Client:
        app = app or await self.router()
        client = Client(app.endpoint, token, narrow=narrow)
        self.stack.push_async_callback(client.channel.close)
        return client


@asynccontextmanager
async def fake_fleet(prefills: int = 1, decodes: int = 1) -> AsyncIterator[FakeFleet]:
    async with AsyncExitStack() as stack:
        directory = FlakyDirectory()
        ps = [FakePrefill(f"p{n}") for n in range(prefills)]
        ds = [FakeDecode(f"d{n}", directory, ps) for n in range(decodes)]
        for decode in ds:
            decode.siblings = ds
        for host in [*(p.host for p in ps), *(d.host for d in ds)]:
            await host.start()
            stack.push_async_callback(host.kill)
        yield FakeFleet(directory, ps, ds, stack)


async def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - conditions in other tasks have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None
