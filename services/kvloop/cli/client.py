"""A RouterService client for commands: turns as plain values, failures as sentences."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from kvloop.cli.errors import CommandFailed
from kvloop.runtime import tokens
from kvloop.runtime.channels import open_channel
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.runtime.security import from_environment
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc, sampling_pb2, turn_pb2

TURN_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What to generate from."""

    prompt: Sequence[int]
    conversation_id: str
    sampling: sampling_pb2.SamplingParams
    parent_conversation_id: str = ""
    cache_salt: str = ""
    model: str = ""
    reuse: bool = True
    hold: bool = True
    """Whether D keeps the turn's KV, also when the turn is cancelled."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of an answer, or its end."""

    token_ids: Sequence[int] = ()
    text: str = ""
    summary: turn_pb2.Summary | None = None
    since_start_s: float = 0.0
    """Seconds since the turn was sent."""


class RouterClient:
    """One connection to a router."""

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self.endpoint = endpoint
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = open_channel(endpoint, from_environment())
        self._stub = router_service_pb2_grpc.RouterServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def generate(self, turn: Turn) -> AsyncIterator[Piece]:
        """Yield an answer as it comes; the last piece carries the summary. Closing early cancels.

        Raises CommandFailed.
        """
        retention = turn_pb2.Retention(hold=turn.hold, hold_on_cancel=turn.hold)
        policy = router_service_pb2.ReusePolicy
        request = router_service_pb2.GenerateRequest(
            conversation_id=turn.conversation_id,
            parent_conversation_id=turn.parent_conversation_id,
            model=turn.model,
            prompt_token_ids=tokens.pack(turn.prompt),
            sampling=turn.sampling,
            retention=retention,
            cache_salt=turn.cache_salt,
            reuse_policy=policy.REUSE_POLICY_ALLOW if turn.reuse else policy.REUSE_POLICY_FORBID,
        )
        begun = time.perf_counter()
        call = self._stub.Generate(request, timeout=TURN_TIMEOUT_S, metadata=self._metadata)
        ended = False
        try:
            async for response in call:
                since = time.perf_counter() - begun
                if response.HasField("chunk"):
                    ids = tokens.unpack(response.chunk.token_ids)
                    yield Piece(ids, response.chunk.text, since_start_s=since)
                elif response.HasField("summary"):
                    ended = True
                    yield Piece(summary=response.summary, since_start_s=since)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        finally:
            call.cancel()
        if not ended:
            raise CommandFailed("the answer broke off: the router ended the stream without a summary")

    async def conversation(self, conversation_id: str, model: str = "") -> turn_pb2.LeaseInfo | None:
        """Return what is held for a conversation, or None.

        Raises CommandFailed.
        """
        request = router_service_pb2.GetConversationRequest(conversation_id=conversation_id, model=model)
        try:
            answer = await self._stub.GetConversation(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise self._failed(error) from None
        return answer.lease

    async def end_conversation(self, conversation_id: str, *, cache_salt: str = "", model: str = "") -> bool:
        """Let go of what is held for a conversation; False when nothing was held.

        Raises CommandFailed.
        """
        request = router_service_pb2.EndConversationRequest(
            conversation_id=conversation_id, cache_salt=cache_salt, model=model
        )
        try:
            answer = await self._stub.EndConversation(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        return bool(answer.released)

    def _failed(self, error: grpc.aio.AioRpcError) -> CommandFailed:
        return CommandFailed(sentence_of(error, self.endpoint))


def sentence_of(error: grpc.aio.AioRpcError, endpoint: str) -> str:
    """Return what a failed call means for a person, and what to do about it."""
    failure = from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
    if failure.reason == Reason.ERROR_REASON_UNSPECIFIED:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"no router answers at {endpoint}; start one with `kvloop up`, or name it with --router"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{endpoint} did not answer in time"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"{endpoint} is no kvloop router; name the router's endpoint with --router"
        return f"{endpoint} answered {error.code().name}"
    if failure.reason == Reason.ERROR_REASON_UNAUTHENTICATED:
        return f"the router at {endpoint} refuses the credentials; give the right token with --token"
    field = f" ({failure.field})" if failure.field else ""
    retry = f"; come back in {failure.retry_after_s:.0f} s" if failure.retry_after_s else ""
    return f"{failure.reason_name}{field}: {failure.message}{retry}"
