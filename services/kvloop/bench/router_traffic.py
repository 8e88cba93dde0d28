"""Turns for measuring a router: through it, past it, and through a pass-through that does nothing else.

All ways have the workers do the same work: a regenerated turn of a conversation whose last turn left a
lease, which P is told to read. The router finds that out by itself; the other ways are told here. Answers are
taken as raw bytes, so that the client costs as little as it can.
"""

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvloop.runtime.channels import open_channel
from kvloop.runtime.mux.caller import Caller, CallFailed
from kvloop.runtime.tokens import count, pack
from kvloop.v1alpha1 import (
    decode_service_pb2,
    lease_pb2,
    prefill_service_pb2,
    router_service_pb2,
    router_service_pb2_grpc,
    sampling_pb2,
    turn_pb2,
)

GENERATE = "/kvloop.v1alpha1.RouterService/Generate"
PREFILL = "/kvloop.v1alpha1.PrefillService/Prefill"
DECODE = "/kvloop.v1alpha1.DecodeService/Decode"
PASS = "/kvloop.bench.PassThrough/Generate"
TIMEOUT_S = 60.0

_CHUNK_TAG = 0x0A
_HANDLE_TAG = b"\x32"
"""Field 6 of a DecodeRequest: handle. A PrefillResponse begins with its own, field 1."""
_PROMPT_TAG = b"\x22"
"""Field 4 of both legs' requests: prompt_token_ids."""
_FIRST_TOKEN = prefill_service_pb2.PrefillRequest(first_token=True).SerializeToString()


class TurnLost(Exception):
    """A measured turn did not come to its end."""


@dataclass(frozen=True, slots=True)
class Played:
    """One turn as its client saw it."""

    first_ms: float
    """From the request to the first chunk."""
    chunks: int


@dataclass(frozen=True, slots=True)
class Workers:
    """The one P and the one D behind all ways."""

    prefill: str
    decode: str
    epoch: str
    block_size: int


@dataclass(slots=True)
class Talk:
    """A conversation whose one turn is regenerated again and again."""

    prompt: bytes
    """Packed token ids."""
    output_tokens: int
    conversation_id: str = field(default_factory=lambda: secrets.token_hex(8))
    lease: turn_pb2.LeaseInfo | None = None
    """What the last turn left, for ways without a directory."""

    @property
    def sampling(self) -> sampling_pb2.SamplingParams:
        """Return the parameters: an answer of exactly so many tokens."""
        return sampling_pb2.SamplingParams(temperature=0.0, max_tokens=self.output_tokens, ignore_eos=True)


def talk(prompt_tokens: int, output_tokens: int, vocabulary: int) -> Talk:
    """Return a new conversation with a random prompt."""
    draw = secrets.SystemRandom().randrange
    return Talk(pack(draw(3, vocabulary) for _ in range(prompt_tokens)), output_tokens)


class Way(Protocol):
    """One way to have a turn served."""

    async def play(self, talk: Talk) -> Played:
        """Play a turn. Raises TurnLost, or what gRPC raises."""
        ...

    async def close(self) -> None:
        """Close the channels."""
        ...


class _Asking:
    """What both ways through a router have in common: the requests."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._requests: dict[str, bytes] = {}
        self._begun: set[str] = set()
        self.verdicts: Counter[str] = Counter()
        """Of turns after a conversation's first one."""

    def _request(self, talk: Talk) -> bytes:
        request = self._requests.get(talk.conversation_id)
        if request is None:
            message = router_service_pb2.GenerateRequest(
                conversation_id=talk.conversation_id, prompt_token_ids=talk.prompt, sampling=talk.sampling
            )
            request = self._requests[talk.conversation_id] = message.SerializeToString()
        return request

    def _played(self, talk: Talk, read: tuple[float, int, bytes]) -> Played:
        first_ms, chunks, last = read
        summary = router_service_pb2.GenerateResponse.FromString(last).summary
        _check(summary.output_tokens, talk)
        if talk.conversation_id in self._begun:
            self.verdicts[turn_pb2.Verdict.Name(summary.reuse.verdict).removeprefix("VERDICT_")] += 1
        self._begun.add(talk.conversation_id)
        return Played(first_ms, chunks)


class ThroughRouter(_Asking):
    """RouterService.Generate, all turns on one stream: as the gateway asks."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        stub: Any = router_service_pb2_grpc.RouterServiceStub(self._channel)
        self._caller = Caller(stub.Attach, router_service_pb2.RouterServiceAttachRequest, _turn_lost)

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        request, begun = self._request(talk), time.perf_counter()
        return self._played(talk, await _read(self._caller.call(request, TIMEOUT_S), begun))

    async def close(self) -> None:
        """See Way."""
        await self._caller.close()
        await self._channel.close()


class ThroughRouterByCall(_Asking):
    """RouterService.Generate, a call for each turn."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._generate: Any = self._channel.unary_stream(GENERATE)

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        request, begun = self._request(talk), time.perf_counter()
        call = self._generate(request, timeout=TIMEOUT_S, wait_for_ready=True)
        return self._played(talk, await _read(call, begun))

    async def close(self) -> None:
        """See Way."""
        await self._channel.close()


def _turn_lost(failed: CallFailed) -> Exception:
    return TurnLost(failed.code or "a turn failed")


class _Told:
    """What ways without a router have in common: the requests that a router would make."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._shared: dict[str, bytes] = {}
        self._scopes: dict[str, turn_pb2.TurnScope] = {}

    def _requests(self, talk: Talk) -> tuple[bytes, bytes]:
        """Return what both legs' requests share, less the prompt, and what only the prefill leg's has.

        Serialized messages may be joined: the last value of a field counts, sub-messages are merged.
        """
        shared = self._shared.get(talk.conversation_id)
        if shared is None:
            scope = turn_pb2.TurnScope(
                scope=secrets.token_bytes(32),
                digest_key=secrets.token_bytes(32),
                cache_salt=talk.conversation_id,
                conversation_id=talk.conversation_id,
                tenant="bench",
            )
            message = decode_service_pb2.DecodeRequest(scope=scope, sampling=talk.sampling)
            shared = self._shared[talk.conversation_id] = message.SerializeToString()
        own = decode_service_pb2.DecodeRequest(
            request_id=secrets.token_hex(16), scope=turn_pb2.TurnScope(turn_start_us=time.time_ns() // 1000)
        )
        tail = prefill_service_pb2.PrefillRequest()
        if talk.lease is not None:
            tail.read_source.CopyFrom(
                lease_pb2.ReadSource(
                    decode_endpoint=self._workers.decode,
                    lease_id=talk.lease.lease_id,
                    epoch=self._workers.epoch,
                    num_tokens=talk.lease.num_tokens,
                    block_size=self._workers.block_size,
                )
            )
        return shared + own.SerializeToString(), tail.SerializeToString()

    @staticmethod
    def _finish(talk: Talk, last: bytes, ahead: int = 0) -> None:
        """Note what a turn left. ahead: tokens that came before the decode leg's."""
        summary = decode_service_pb2.DecodeResponse.FromString(last).summary
        _check(ahead + summary.output_tokens, talk)
        talk.lease = summary.lease if summary.HasField("lease") else None


class PastRouter(_Told):
    """P and D called directly."""

    def __init__(self, workers: Workers, *, first_token: bool = True) -> None:
        """Prepare. first_token: as the router's first_token_from_prefill, whether the answer begins at P."""
        super().__init__(workers)
        self._wanted = _FIRST_TOKEN if first_token else b""
        self._channels = [open_channel(workers.prefill), open_channel(workers.decode)]
        self._prefill: Any = self._channels[0].unary_unary(PREFILL)
        self._decode: Any = self._channels[1].unary_stream(DECODE)

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        shared, tail = self._requests(talk)
        request = b"".join((shared, tail, self._wanted, *_prompt(talk.prompt)))
        begun = time.perf_counter()
        prefilled = await self._prefill(request, timeout=TIMEOUT_S, wait_for_ready=True)
        first = prefill_service_pb2.PrefillResponse.FromString(prefilled).first.token_ids
        first_ms, ahead = (time.perf_counter() - begun) * 1000, count(first)
        rest = decode_service_pb2.DecodeRequest()
        rest.sampling.max_tokens = talk.output_tokens - ahead
        request = b"".join(
            (shared, rest.SerializeToString(), as_handle(prefilled), *_prompt(talk.prompt, first))
        )
        call = self._decode(request, timeout=TIMEOUT_S, wait_for_ready=True)
        later_ms, chunks, last = await _read(call, begun)
        self._finish(talk, last, ahead)
        return Played(first_ms if ahead else later_ms, ahead + chunks)

    async def close(self) -> None:
        """See Way."""
        for channel in self._channels:
            await channel.close()


class PassedThrough(_Told):
    """The pass-through of router_passthrough.py."""

    def __init__(self, workers: Workers, endpoint: str) -> None:
        super().__init__(workers)
        self._channel = open_channel(endpoint)
        self._generate: Any = self._channel.unary_stream(PASS)

    async def play(self, talk: Talk) -> Played:
        """See Way."""
        shared, tail = self._requests(talk)
        begun = time.perf_counter()
        request = b"".join((len(tail).to_bytes(4, "little"), tail, shared, *_prompt(talk.prompt)))
        first_ms, chunks, last = await _read(
            self._generate(request, timeout=TIMEOUT_S, wait_for_ready=True), begun
        )
        self._finish(talk, last)
        return Played(first_ms, chunks)

    async def close(self) -> None:
        """See Way."""
        await self._channel.close()


def _prompt(*parts: bytes) -> tuple[bytes, ...]:
    """Return the field of both legs' requests that has the prompt, in pieces."""
    length = sum(map(len, parts))
    size = bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return (_PROMPT_TAG, bytes(size), *parts)


def as_handle(prefilled: bytes) -> bytes:
    """Return the handle of a serialized PrefillResponse as the field that a DecodeRequest has for it."""
    size = shift = 0
    at = 1
    while True:
        byte = prefilled[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return _HANDLE_TAG + prefilled[1 : at + size]


async def _read(call: AsyncIterator[bytes], begun: float) -> tuple[float, int, bytes]:
    chunks, first, last = 0, 0.0, b""
    async for last in call:
        if not chunks:
            first = time.perf_counter() - begun
        chunks += last[0] == _CHUNK_TAG
    if not last or last[0] == _CHUNK_TAG:
        raise TurnLost("a turn ended without its summary")
    return first * 1000, chunks, last


def _check(output_tokens: int, talk: Talk) -> None:
    if output_tokens != talk.output_tokens:
        raise TurnLost(f"a turn gave {output_tokens} tokens instead of {talk.output_tokens}")


async def facts(prefill: str, decode: str) -> Workers:
    """Return the workers at two endpoints."""
    async with open_channel(decode) as channel:
        ask: Any = channel.unary_unary(
            "/kvloop.v1alpha1.DecodeService/GetInfo",
            request_serializer=decode_service_pb2.DecodeServiceGetInfoRequest.SerializeToString,
            response_deserializer=decode_service_pb2.DecodeServiceGetInfoResponse.FromString,
        )
        answer = await ask(
            decode_service_pb2.DecodeServiceGetInfoRequest(), timeout=TIMEOUT_S, wait_for_ready=True
        )
    return Workers(prefill, decode, answer.info.epoch, answer.info.block_size)
