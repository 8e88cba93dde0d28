"""What is measured: something that turns are sent to.

Times are the caller's, in milliseconds from just before a request is sent. A target adds what it knows about
where the prompt's KV came from; one that knows nothing leaves it out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from kvloop.client import ONCE, CallFailed, Client, Retention, SamplingParams, Summary
from kvloop.v1alpha1 import turn_pb2


class TargetFailed(Exception):
    """A request failed; the text says how."""

    def __init__(self, text: str, *, may_move: bool = False) -> None:
        """Take the text, and whether another replica may be asked: UNAVAILABLE, and nothing was answered."""
        super().__init__(text)
        self.may_move = may_move


@dataclass(frozen=True, slots=True)
class Request:
    """One turn."""

    prompt: Sequence[int]
    max_tokens: int
    conversation_id: str
    parent_conversation_id: str = ""
    cache_salt: str = ""
    stop: tuple[str, ...] = ()
    exact: bool = True
    """Whether the answer goes on to max_tokens past an end-of-sequence token."""
    reuse: bool = True
    """Whether KV of earlier turns may be reused, and is kept for later ones."""


@dataclass(frozen=True, slots=True)
class Read:
    """One KV read between engines."""

    duration_ms: float = 0.0
    bytes: int = 0
    descriptors: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request."""

    token_ids: list[int]
    """The answer; empty where the target tells no ids."""
    ttft_ms: float
    latency_ms: float
    input_num_tokens: int
    output_num_tokens: int
    verdict: str = ""
    reason: str = ""
    retried: bool = False
    retokenized: bool = False
    """Whether token_ids were made from the answer's text, and may be others than those generated."""
    finish_reason: str = ""
    """What ended the answer: stop, length; empty where that is not told."""
    stop_reason: str = ""
    """The stop string that ended it, or a token id in decimal."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by source: p_local, readback, d_local, computed; of a gateway, reused and computed."""
    prefill_ms: float = 0.0
    readback: Read = Read()
    """D to P."""
    handoff: Read = Read()
    """P to D."""
    router: str = ""
    """Name of the router that served it."""
    held_tokens: int = 0
    """What the turn left held for the next one; 0 without a lease."""

    @property
    def tpot_ms(self) -> float:
        """Return the time per output token after the first; 0 when there is none after it."""
        rest = self.output_num_tokens - 1
        return (self.latency_ms - self.ttft_ms) / rest if rest > 0 else 0.0

    def stopped_by(self, request: Request) -> bool:
        """Tell whether one of a request's stop strings ended the answer."""
        if not request.stop or self.finish_reason != "stop":
            return False
        # OpenAI does not tell which; where nothing else may end an answer early, it was one of them.
        return self.stop_reason in request.stop if self.stop_reason else request.exact


class Target(Protocol):
    """Something that serves turns."""

    async def send(self, request: Request) -> Outcome:
        """Send one turn and wait for its end. Raises TargetFailed."""
        ...

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        """Let go of what is held for a conversation. Raises TargetFailed."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class RouterTarget:
    """A router's RouterService. Nothing is tried again: a failure is a result."""

    def __init__(self, endpoint: str, *, token: str | None = None, model: str = "", timeout_s: float = 600.0):
        self._endpoint = endpoint
        self._model = model
        self._client = Client(endpoint, token=token, retry=ONCE, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def send(self, request: Request) -> Outcome:
        """Send one turn and wait for its end. Raises TargetFailed."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.exact, stop=request.stop
        )
        ids: list[int] = []
        ttft_s = 0.0
        summary: Summary | None = None
        begun = time.perf_counter()
        events = self._client.turn(
            request.prompt,
            conversation_id=request.conversation_id,
            parent_conversation_id=request.parent_conversation_id,
            model=self._model,
            sampling=sampling,
            retention=Retention(hold=request.reuse),
            cache_salt=request.cache_salt,
            reuse=request.reuse,
        )
        try:
            async for event in events:
                if event.token_ids:
                    ttft_s = ttft_s or time.perf_counter() - begun
                    ids.extend(event.token_ids)
                summary = event.summary or summary
        except CallFailed as failure:
            raise _failed(failure, begun=bool(ids)) from None
        latency_s = time.perf_counter() - begun
        if summary is None or not ids:
            raise TargetFailed(f"{self._endpoint} ended a turn without an answer")
        return _outcome(summary, ids, ttft_s, latency_s)

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        """Let go of what is held for a conversation. Raises TargetFailed."""
        try:
            await self._client.end(conversation_id, cache_salt=cache_salt, model=self._model)
        except CallFailed as failure:
            raise _failed(failure) from None


def _failed(failure: CallFailed, *, begun: bool = False) -> TargetFailed:
    said = f"{failure.reason}: {failure.message}" if failure.reason else failure.code.name
    when = ", in mid-answer" if begun else ""
    may_move = failure.code is grpc.StatusCode.UNAVAILABLE and not begun
    return TargetFailed(f"{failure.target} answered {said}{when}", may_move=may_move)


def _outcome(summary: Summary, ids: list[int], ttft_s: float, latency_s: float) -> Outcome:
    reuse = summary.reuse
    return Outcome(
        token_ids=ids,
        ttft_ms=ttft_s * 1e3,
        latency_ms=latency_s * 1e3,
        input_num_tokens=summary.prompt_tokens,
        output_num_tokens=summary.output_tokens,
        verdict=turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_"),
        reason=turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_"),
        retried=reuse.retried,
        finish_reason=turn_pb2.FinishReason.Name(summary.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
        stop_reason=summary.stop_reason,
        tokens={
            "p_local": reuse.tokens.p_local,
            "readback": reuse.tokens.readback,
            "d_local": reuse.tokens.d_local,
            "computed": reuse.tokens.computed,
        },
        prefill_ms=reuse.prefill_ms,
        readback=_read(reuse.readback),
        handoff=_read(reuse.handoff),
        router=summary.router,
        held_tokens=summary.lease.num_tokens if summary.HasField("lease") else 0,
    )


def _read(transfer: turn_pb2.Transfer) -> Read:
    return Read(transfer.duration_ms, transfer.bytes, transfer.descriptors)
