"""A prefill and a decode worker over simulated engines, on loopback, and a player of turns between them.

The player does what a router does, no more: look up, prefill, decode. Scopes are spelled out by the tests.
"""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.fabric import Fabric
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.metastore.factory import Store, open_store
from kvloop.prefill.app import PrefillApp
from kvloop.prefill.settings import PrefillSettings
from kvloop.runtime import tokens
from kvloop.runtime.channels import open_channel
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    lease_pb2,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    sampling_pb2,
    turn_pb2,
)

BLOCK = 16
THRESHOLD = 32
DEADLINE_S = 20.0

_serial = itertools.count()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids that differ by seed from the first one on."""
    return [3 + (seed * 7919 + i * 31 + 5) % 31_000 for i in range(length)]


def scope_of(conversation: str, tenant: str = "t", start: int = 0) -> turn_pb2.TurnScope:
    """Return the scope of a conversation's turn; digest key and salt are the tenant's."""
    return turn_pb2.TurnScope(
        scope=hashlib.sha256(f"{tenant}/{conversation}".encode()).digest(),
        digest_key=hashlib.sha256(tenant.encode()).digest(),
        cache_salt=f"salt-{tenant}",
        conversation_id=conversation,
        tenant=tenant,
        turn_start_us=start,
    )


@dataclass(slots=True)
class Answer:
    """One played turn."""

    ids: list[int]
    text: str
    summary: decode_service_pb2.DecodeSummary
    reuse: turn_pb2.Reuse
    chunks: int

    @property
    def verdict(self) -> str:
        return turn_pb2.Verdict.Name(self.reuse.verdict).removeprefix("VERDICT_")

    @property
    def reason(self) -> str:
        return turn_pb2.ReuseReason.Name(self.reuse.reason).removeprefix("REUSE_REASON_")


@dataclass(slots=True)
class Pair:
    """The running workers."""

    decode_engine: SimulatedEngine
    prefill_engine: SimulatedEngine
    decode_app: DecodeApp
    prefill_app: PrefillApp
    store: Store
    decode: Any
    prefill: Any
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def source(self, scope: turn_pb2.TurnScope) -> lease_pb2.ReadSource | None:
        """Look a conversation up, and take the turn's start from the directory."""
        found = await self.store.directory.lookup(scope.scope)
        scope.turn_start_us = scope.turn_start_us or found.turn_start_us
        return read_source(found.entry) if found.entry is not None else None

    async def play(
        self,
        ids: Sequence[int],
        conversation: str = "c",
        *,
        scope: turn_pb2.TurnScope | None = None,
        source: lease_pb2.ReadSource | None = None,
        sampling: sampling_pb2.SamplingParams | None = None,
        retention: turn_pb2.Retention | None = None,
    ) -> Answer:
        """Play a turn; source: None looks up."""
        scope = scope or scope_of(conversation)
        found = await self.source(scope)
        prefilled = await self.run_prefill(ids, scope, source or found, sampling)
        return await self.run_decode(ids, scope, prefilled, sampling, retention)

    async def cold(self, ids: Sequence[int], sampling: sampling_pb2.SamplingParams | None = None) -> Answer:
        """Play a turn that can reuse nothing, of a tenant of its own, and leaves nothing."""
        scope = scope_of("cold", f"cold-{next(_serial)}")
        nothing = turn_pb2.Retention(hold=False)
        return await self.play(ids, scope=scope, sampling=sampling, retention=nothing)

    async def run_prefill(
        self,
        ids: Sequence[int],
        scope: turn_pb2.TurnScope,
        source: lease_pb2.ReadSource | None,
        sampling: sampling_pb2.SamplingParams | None = None,
        **extra: Any,
    ) -> prefill_service_pb2.PrefillResponse:
        request = prefill_request(ids, scope, source, sampling, **extra)
        answer: prefill_service_pb2.PrefillResponse = await failing(
            self.prefill.Prefill(request, timeout=DEADLINE_S)
        )
        return answer

    async def run_decode(
        self,
        ids: Sequence[int],
        scope: turn_pb2.TurnScope,
        prefilled: prefill_service_pb2.PrefillResponse | None,
        sampling: sampling_pb2.SamplingParams | None = None,
        retention: turn_pb2.Retention | None = None,
    ) -> Answer:
        request = decode_request(ids, scope, prefilled, sampling, retention)
        return await read_answer(self.decode.Decode(request, timeout=DEADLINE_S), prefilled)

    async def leases(self) -> list[turn_pb2.Lease]:
        got = await self.decode.ListLeases(decode_service_pb2.ListLeasesRequest(), timeout=DEADLINE_S)
        return list(got.leases)

    async def entry(self, conversation: str = "c") -> lease_pb2.DirectoryEntry | None:
        return (await self.store.directory.lookup(scope_of(conversation).scope)).entry

    async def close_conversation(self, conversation: str = "c") -> bool:
        request = decode_service_pb2.ReleaseLeaseRequest(scope=scope_of(conversation).scope)
        return bool((await self.decode.ReleaseLease(request, timeout=DEADLINE_S)).released)

    async def all_free(self) -> bool:
        """Tell whether both pools have all their blocks."""
        pools = [await self.decode_engine.pool(), await self.prefill_engine.pool()]
        return all(pool.free_blocks == pool.total_blocks for pool in pools)

    async def decode_is_free(self) -> bool:
        pool = await self.decode_engine.pool()
        return pool.free_blocks == pool.total_blocks


def read_source(entry: lease_pb2.DirectoryEntry) -> lease_pb2.ReadSource:
    return lease_pb2.ReadSource(
        decode_endpoint=entry.decode_endpoint,
        lease_id=entry.lease_id,
        epoch=entry.epoch,
        num_tokens=entry.num_tokens,
        block_size=entry.block_size,
    )


def prefill_request(
    ids: Sequence[int],
    scope: turn_pb2.TurnScope,
    source: lease_pb2.ReadSource | None = None,
    sampling: sampling_pb2.SamplingParams | None = None,
    **extra: Any,
) -> prefill_service_pb2.PrefillRequest:
    return prefill_service_pb2.PrefillRequest(
        request_id=f"p-{next(_serial)}",
        scope=scope,
        prompt_token_ids=tokens.pack(ids),
        sampling=sampling or sampling_pb2.SamplingParams(max_tokens=24, ignore_eos=True),
        read_source=source,
        **({"cold_reason": turn_pb2.REUSE_REASON_NOT_FOUND} | extra),
    )


def decode_request(
    ids: Sequence[int],
    scope: turn_pb2.TurnScope,
    prefilled: prefill_service_pb2.PrefillResponse | None = None,
    sampling: sampling_pb2.SamplingParams | None = None,
    retention: turn_pb2.Retention | None = None,
) -> decode_service_pb2.DecodeRequest:
    return decode_service_pb2.DecodeRequest(
        request_id=f"d-{next(_serial)}",
        scope=scope,
        prompt_token_ids=tokens.pack(ids),
        sampling=sampling or sampling_pb2.SamplingParams(max_tokens=24, ignore_eos=True),
        handle=prefilled.handle if prefilled is not None else None,
        retention=retention,
    )


async def read_answer(call: Any, prefilled: prefill_service_pb2.PrefillResponse | None = None) -> Answer:
    ids: list[int] = []
    text = ""
    chunks = 0
    summary: decode_service_pb2.DecodeSummary | None = None
    try:
        async for response in call:
            assert summary is None, "the summary is the last"
            if response.HasField("summary"):
                summary = response.summary
            else:
                chunks += 1
                ids += tokens.unpack(response.chunk.token_ids)
                text += response.chunk.text
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED) from None
    assert summary is not None
    assert summary.output_tokens == len(ids)
    reuse = prefilled.reuse if prefilled is not None else turn_pb2.Reuse()
    return Answer(ids, text, summary, reuse, chunks)


async def failing(call: Any) -> Any:
    """Await a call; raise its Failure."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED) from None


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = 10.0) -> Any:
    """Return the condition's first true value."""
    async with asyncio.timeout(within_s):
        while True:
            value = await condition()
            if value:
                return value
            await asyncio.sleep(0.005)


@asynccontextmanager
async def open_pair(
    *,
    store: Store | None = None,
    engine: dict[str, Any] | None = None,
    decode_engine: dict[str, Any] | None = None,
    prefill_engine: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
) -> AsyncIterator[Pair]:
    """Open a pair of workers; the dicts are settings of both engines, of each, and of each worker.

    P has no prefix cache unless told so: what it does not compute, it has read.
    """
    both: dict[str, Any] = {
        "block_size": BLOCK,
        "max_model_len": 4096,
        "num_blocks": 1024,
        "kv_recompute_threshold": THRESHOLD,
        "decoder_kv_blocks_ttl": 60.0,
    } | (engine or {})
    fabric = Fabric()
    d_engine = SimulatedEngine(SimulatedSettings(**both | (decode_engine or {})), "decode", fabric=fabric)
    p_engine = SimulatedEngine(
        SimulatedSettings(**both | {"enable_prefix_caching": False} | (prefill_engine or {})),
        "prefill",
        fabric=fabric,
    )
    common = {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0.0}
    store = store or open_store("memory://")
    d_app = DecodeApp(
        DecodeSettings.load(flags=common | {"decoder_kv_blocks_ttl": 60.0} | (decode or {})),
        engine=d_engine,
        store=store,
    )
    p_app = PrefillApp(PrefillSettings.load(flags=common | (prefill or {})), engine=p_engine, store=store)
    channels: list[grpc.aio.Channel] = []
    try:
        await d_app.start()
        await p_app.start()
        channels = [open_channel(d_app.endpoint), open_channel(p_app.endpoint)]
        for channel in channels:
            await channel.channel_ready()
        yield Pair(
            decode_engine=d_engine,
            prefill_engine=p_engine,
            decode_app=d_app,
            prefill_app=p_app,
            store=store,
            decode=decode_service_pb2_grpc.DecodeServiceStub(channels[0]),
            prefill=prefill_service_pb2_grpc.PrefillServiceStub(channels[1]),
            channels=channels,
        )
    finally:
        for channel in channels:
            await channel.close()
        await p_app.stop()
        await d_app.stop()
        await store.close()
