"""What the never-wrong cases run on: turns through real routers, compared with cold ones.

A case plays its turns through `Case`. Each turn is repeated cold (no reuse, a salt of its own, so no cache
of any kind) and must have the same token ids and log probabilities. When a case ends, a second request with
the same prefix must equal cold too, and once its conversations are closed, every block is back.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvloop.runtime import channels, tokens
from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
    sampling_pb2,
    turn_pb2,
    worker_pb2,
)

DEADLINE_S = 120.0
SETTLE_S = 45.0
INFO_S = 30.0
"""Longer than P keeps a prompt whose decode worker died: such a worker may be reading to its last moment."""
LOGPROB_TOLERANCE = 2e-3
COMING_BACK = {"NO_WORKER", "WORKER_FAILED", "INTERNAL"}
"""Reasons of turns while a process restarts; INTERNAL stands for a router that is not there."""

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """One served turn."""

    ids: list[int]
    text: str
    logprobs: list[float]
    summary: turn_pb2.Summary

    @property
    def verdict(self) -> str:
        return turn_pb2.Verdict.Name(self.summary.reuse.verdict).removeprefix("VERDICT_")

    @property
    def reason(self) -> str:
        return turn_pb2.ReuseReason.Name(self.summary.reuse.reason).removeprefix("REUSE_REASON_")

    @property
    def sources(self) -> turn_pb2.TokenSources:
        return self.summary.reuse.tokens

    @property
    def readback_bytes(self) -> int:
        return self.summary.reuse.readback.bytes


class Endpoint:
    """A channel and the stubs of whatever serves there."""

    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        """options: of the channel, beside those of every other one."""
        self.address = address
        self.channel = (
            grpc.aio.insecure_channel(address, options=[*channels.CHANNEL_OPTIONS, *options])
            if options
            else channels.open_channel(address)
        )
        self.router = router_service_pb2_grpc.RouterServiceStub(self.channel)
        self.prefill = prefill_service_pb2_grpc.PrefillServiceStub(self.channel)
        self.decode = decode_service_pb2_grpc.DecodeServiceStub(self.channel)


@dataclass(slots=True)
class Stack:
    """A running fleet, seen from outside. Routers: `main` (P with a prefix cache), `bare` (P without),
    `twin` (a second replica of main), `direct` (as bare, and D may go on from what it holds), `pair` (every
    P and D), `small` (P without a prefix cache and a second D with few blocks), `small-direct` (P with a
    prefix cache and that D, which may go on from what it holds)."""

    routers: dict[str, Endpoint]
    prefills: dict[str, Endpoint]
    decodes: dict[str, Endpoint]
    block_size: int
    block_bytes: int
    """Bytes of one KV block, all layers."""
    threshold: int
    eos: int
    tenants: dict[str, str]
    """Tenant name -> bearer token."""
    tokenizer: Any
    fleet: Any
    parts: dict[str, str]
    """Engine -> part of the fleet."""
    controls: dict[str, Path]
    """Engine -> its control socket."""
    model: Path | None = None
    """The checkpoint, a folder of links; None for simulated engines."""

    async def info(self, engine: str) -> worker_pb2.WorkerInfo:
        """Return what an engine's worker says of itself; raises when it does not answer."""
        if engine in self.prefills:
            asked = prefill_service_pb2.PrefillServiceGetInfoRequest()
            got = await self.prefills[engine].prefill.GetInfo(asked, timeout=INFO_S, wait_for_ready=True)
            return got.info
        asking = decode_service_pb2.DecodeServiceGetInfoRequest()
        answer = await self.decodes[engine].decode.GetInfo(asking, timeout=INFO_S, wait_for_ready=True)
        return answer.info

    async def pools(self) -> dict[str, worker_pb2.PoolState]:
        """Return the state of every engine's block pool."""
        return {name: (await self.info(name)).pool for name in (*self.prefills, *self.decodes)}

    async def free_blocks(self) -> dict[str, int]:
        """Return free blocks by engine."""
        return {name: state.free_blocks for name, state in (await self.pools()).items()}

    async def leases(self, decode: str = "d1") -> list[turn_pb2.Lease]:
        """Return what a decode worker lists."""
        got = await self.decodes[decode].decode.ListLeases(decode_service_pb2.ListLeasesRequest(), timeout=10)
        return list(got.leases)

    async def ready(self, *routers: str) -> None:
        """Return once these routers, or all, serve again, after a worker or router came back."""
        for router in routers or self.routers:

            async def serves(router: str = router) -> bool:
                try:
                    await self.turn(self.ids_of("Are you there?"), router=router, max_tokens=1)
                except Failure as failure:
                    if failure.reason_name not in COMING_BACK:
                        raise
                    return False
                return True

            assert await until(serves), f"router {router} does not serve"

    async def restart(self, parts: Sequence[str], **settings: Any) -> None:
        """Restart parts at the same time, with settings on top of their former ones."""
        await asyncio.gather(*(self.fleet.restart(part, **settings) for part in parts))

    def credentials(self, tenant: str) -> list[tuple[str, str]]:
        """Return the metadata that authenticates a tenant."""
        return [("authorization", f"Bearer {self.tenants[tenant]}")]

    def request(
        self, prompt: Sequence[int], conversation: str = "", **fields: Any
    ) -> router_service_pb2.GenerateRequest:
        """Return a greedy request; sampling fields are told from request fields by name."""
        names = {f.name for f in router_service_pb2.GenerateRequest.DESCRIPTOR.fields}
        sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
        sampling |= {name: value for name, value in fields.items() if name not in names}
        return router_service_pb2.GenerateRequest(
            conversation_id=conversation,
            prompt_token_ids=tokens.pack(prompt),
            sampling=sampling_pb2.SamplingParams(**{k: v for k, v in sampling.items() if v is not None}),
            **{name: value for name, value in fields.items() if name in names},
        )

    def start(
        self, request: router_service_pb2.GenerateRequest, *, router: str = "main", tenant: str = "alpha"
    ) -> Any:
        """Start a turn and return the call."""
        return self.routers[router].router.Generate(
            request, timeout=DEADLINE_S, metadata=self.credentials(tenant), wait_for_ready=True
        )

    async def finish(self, call: Any, *begun: router_service_pb2.GenerateResponse) -> Answer:
        """Read a turn to its end; begun: what was read of it already. Raises Failure."""
        ids: list[int] = []
        text: list[str] = []
        logprobs: list[float] = []
        summary: turn_pb2.Summary | None = None
        try:
            async for response in _after(begun, call):
                assert summary is None, "something came after the summary"
                if response.HasField("summary"):
                    summary = response.summary
                else:
                    ids += tokens.unpack(response.chunk.token_ids)
                    text.append(response.chunk.text)
                    logprobs += [position.candidates[0].logprob for position in response.chunk.logprobs]
        except grpc.RpcError as error:
            raise from_rpc_error(error, Reason.ERROR_REASON_INTERNAL) from None
        assert summary is not None, "the stream ended without a summary"
        assert summary.output_tokens == len(ids)
        return Answer(ids, "".join(text), logprobs, summary)

    async def turn(
        self,
        prompt: Sequence[int],
        conversation: str = "",
        *,
        router: str = "main",
        tenant: str = "alpha",
        **fields: Any,
    ) -> Answer:
        """Serve one turn."""
        return await self.finish(
            self.start(self.request(prompt, conversation, **fields), router=router, tenant=tenant)
        )

    async def cold(self, prompt: Sequence[int], *, router: str = "main", **fields: Any) -> Answer:
        """Serve a turn with nothing to reuse anywhere."""
        fields = {k: v for k, v in fields.items() if k not in {"cache_salt", "parent_conversation_id"}}
        answer = await self.turn(
            prompt,
            router=router,
            cache_salt=f"cold-{next(_serial)}",
            reuse_policy=router_service_pb2.ReusePolicy.REUSE_POLICY_FORBID,
            **fields,
        )
        assert answer.sources.computed == len(prompt), "the cold run was not cold"
        return answer

    async def end(
        self, conversation: str, *, tenant: str = "alpha", router: str = "main", **fields: Any
    ) -> bool:
        """Close a conversation."""
        got = await self.routers[router].router.EndConversation(
            router_service_pb2.EndConversationRequest(conversation_id=conversation, **fields),
            timeout=10,
            metadata=self.credentials(tenant),
        )
        return bool(got.released)

    async def explain(
        self, answer: Answer, *, router: str, tenant: str = "alpha"
    ) -> router_service_pb2.ExplainTurnResponse:
        """Return what the router that served a turn tells of it."""
        told: router_service_pb2.ExplainTurnResponse = await self.routers[router].router.ExplainTurn(
            router_service_pb2.ExplainTurnRequest(request_id=answer.summary.request_id),
            timeout=10,
            metadata=self.credentials(tenant),
        )
        return told

    def ids_of(self, text: str) -> list[int]:
        """Tokenize text, special tokens included."""
        return list(self.tokenizer(text))


async def _after(
    begun: Sequence[router_service_pb2.GenerateResponse], call: Any
) -> AsyncIterator[router_service_pb2.GenerateResponse]:
    for response in begun:
        yield response
    async for response in call:
        yield response


def same(one: Answer, other: Answer) -> bool:
    """Tell whether two answers have the same tokens and, as near as float32 sums agree, probabilities."""
    return one.ids == other.ids and all(
        abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


async def until(condition: Any, timeout_s: float = SETTLE_S) -> Any:
    """Poll an async condition until it is truthy; returns its last value."""
    end = time.monotonic() + timeout_s
    while True:
        value = await condition()
        if value or time.monotonic() > end:
            return value
        await asyncio.sleep(0.05)


@dataclass(slots=True)
class Case:
    """One case of the catalogue while it runs."""

    id: str
    expected: str
    stack: Stack
    router: str = "main"
    free_before: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    _conversations: set[tuple[str, str, str]] = field(default_factory=set)
    _last: tuple[list[int], dict[str, Any]] | None = None
    _compared: int = 0
    _unequal: int = 0

    async def begin(self) -> None:
        """Note the free blocks."""
        self.free_before = await self.stack.free_blocks()

    def name(self, suffix: str = "") -> str:
        """Return a conversation of this case; closed when it ends."""
        return f"{self.id}-{self.router}-{suffix}"

    def watch(self, conversation: str, tenant: str = "alpha", cache_salt: str = "") -> None:
        """Close this conversation when the case ends."""
        self._conversations.add((conversation, tenant, cache_salt))

    async def turn(
        self, prompt: Sequence[int], conversation: str | None = None, *, check: bool = True, **options: Any
    ) -> Answer:
        """Serve a turn and compare it with a cold one."""
        conversation = self.name() if conversation is None else conversation
        self.watch(conversation, options.get("tenant", "alpha"), options.get("cache_salt", ""))
        options.setdefault("router", self.router)
        answer = await self.stack.turn(prompt, conversation, **options)
        if check:
            await self.compare(answer, prompt, **options)
        return answer

    async def compare(self, answer: Answer, prompt: Sequence[int], **options: Any) -> None:
        """Compare an answer with the cold run of the same prompt."""
        options = {k: v for k, v in options.items() if k not in {"tenant", "retention", "reuse_policy"}}
        cold = await self.stack.cold(prompt, **options)
        self._last = (list(prompt), options)
        self._compared += 1
        if not same(answer, cold):
            self._unequal += 1
        assert same(answer, cold), f"differs from cold: {answer.ids} != {cold.ids}"

    def tell(self, answer: Answer) -> None:
        """Have the record tell of this answer, not of the last one that was expected."""
        self.record |= {
            "verdict": answer.verdict,
            "reason": answer.reason,
            "bytes_read": answer.readback_bytes,
        }

    def expect(
        self,
        answer: Answer,
        verdict: str | Sequence[str],
        reason: str | Sequence[str],
        readback: int | None = None,
    ) -> None:
        """Assert the mechanism: verdict, reason, tokens read, and bytes that fit them."""
        reasons = {reason} if isinstance(reason, str) else set(reason)
        verdicts = {verdict} if isinstance(verdict, str) else set(verdict)
        size, each = self.stack.block_size, self.stack.block_bytes
        got = answer.sources.readback
        self.tell(answer)
        ok = answer.verdict in verdicts and answer.reason in reasons
        if readback is not None:
            local = answer.sources.p_local
            blocks = -(-(local + got) // size) - local // size if got else 0
            ok = ok and got == readback and answer.readback_bytes == blocks * each
        total = answer.sources.p_local + got + answer.sources.d_local + answer.sources.computed
        ok = ok and total == answer.summary.prompt_tokens
        self.record["mechanism_ok"] = self.record.get("mechanism_ok", True) and ok
        assert ok, (
            f"{answer.verdict} {answer.reason} {answer.sources} {answer.readback_bytes} bytes; "
            f"wanted {verdicts} {reasons} {readback}"
        )

    async def close(self) -> None:
        """Close the case's conversations."""
        for conversation, tenant, salt in sorted(self._conversations):
            await self.stack.end(conversation, tenant=tenant, cache_salt=salt, router=self.router)

    async def finish(self) -> None:
        """Assert what every case asserts at its end."""
        stack = self.stack
        second = False
        if self._last is not None:
            prompt, options = self._last
            other = [*prompt[:-3], *stack.ids_of(" Also,")]
            forbid = router_service_pb2.ReusePolicy.REUSE_POLICY_FORBID
            options = {k: v for k, v in options.items() if k not in {"parent_conversation_id"}}
            options["max_tokens"] = 4
            plain = await stack.turn(other, **{**options, "reuse_policy": forbid})
            cold = await stack.cold(other, **options)
            second = same(plain, cold)
        await self.close()

        async def whole() -> bool:
            return await stack.free_blocks() == self.free_before

        await until(whole)
        after = await stack.free_blocks()
        self.record |= {
            "tokens_equal_cold": self._compared > 0 and self._unequal == 0,
            "second_equal_cold": second,
            "engines_alive": after.keys() == self.free_before.keys(),
            "free_blocks_before": self.free_before,
            "free_blocks_after": after,
        }
        assert second or self._last is None, "a later request with the same prefix differs from cold"
        assert after == self.free_before, f"blocks are missing: {self.free_before} -> {after}"


async def failure_of(awaitable: Any) -> Failure:
    """Return the failure that an awaitable must end with."""
    try:
        await awaitable
    except Failure as failure:
        return failure
    except grpc.RpcError as error:
        return from_rpc_error(error, Reason.ERROR_REASON_INTERNAL)
    raise AssertionError("expected a failure")
