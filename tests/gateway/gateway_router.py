"""A RouterService that answers by script, for tests of what stands in front of it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from tokenizers import Tokenizer

from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, to_status
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc, turn_pb2

Request = router_service_pb2.GenerateRequest
Response = router_service_pb2.GenerateResponse
Script = Callable[[Request], Iterator[Any]]


@dataclass
class Turn:
    """One call as the router saw it."""

    request: Request
    metadata: dict[str, str]
    time_left_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


@dataclass
class Session:
    """One session as the router saw it."""

    opening: router_service_pb2.SessionOpen
    metadata: dict[str, str]
    closed: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    events: "SimpleQueue[Any]" = field(default_factory=SimpleQueue)
    """The client's requests; None at their end. A Failure put here ends the session with it."""


class FakeRouter(router_service_pb2_grpc.RouterServiceServicer):
    """Each turn takes the next script; without one it says the default text."""

    def __init__(self, tokenizer: Tokenizer, host: str = "127.0.0.1") -> None:
        self.tokenizer = tokenizer
        self.turns: list[Turn] = []
        self.scripts: list[Script] = []
        self.sessions: list[Session] = []
        self.refusals: list[Failure] = []
        """What sessions that are opened next fail with."""
        self.broken_streams = 0
        """How many attached streams break next, as one looks whose end crosses with a write."""
        self.let_go: list[router_service_pb2.EndConversationRequest] = []
        self._lock = threading.Lock()
        self.health = health.HealthServicer()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=32))
        router_service_pb2_grpc.add_RouterServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.port = self._server.add_insecure_port(f"{host}:0")
        self.set_ready(True)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def set_ready(self, ready: bool) -> None:
        served = health_pb2.HealthCheckResponse
        self.health.set("", served.SERVING if ready else served.NOT_SERVING)

    def reset(self) -> None:
        self.turns.clear()
        self.scripts.clear()
        self.sessions.clear()
        self.refusals.clear()
        self.let_go.clear()
        self.broken_streams = 0
        self.set_ready(True)

    def Attach(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        if self.broken_streams:
            self.broken_streams -= 1
            context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")

    def Generate(self, request: Request, context: grpc.ServicerContext) -> Iterator[Response]:  # noqa: N802
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        turn = Turn(request, metadata, context.time_remaining())
        with self._lock:
            self.turns.append(turn)
            script = self.scripts.pop(0) if self.scripts else self.say("Hello there.")
        finished = False

        def closed() -> None:
            turn.cancelled = not finished
            turn.ended.set()

        context.add_callback(closed)
        try:
            for response in script(request):
                if callable(response):
                    response(turn)
                else:
                    yield response
        except Failure as failure:
            finished = True
            context.abort_with_status(rpc_status.to_status(to_status(failure)))
        finished = True

    def Session(  # noqa: N802
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[router_service_pb2.SessionResponse]:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        session = Session(next(requests).open, metadata)
        if self.refusals:
            context.abort_with_status(rpc_status.to_status(to_status(self.refusals.pop(0))))
        with self._lock:
            self.sessions.append(session)

        def read() -> None:
            try:
                for request in requests:
                    session.events.put(request)
            except grpc.RpcError:
                pass
            session.events.put(None)

        def ended() -> None:
            session.ended.set()
            session.events.put(None)

        context.add_callback(ended)
        threading.Thread(target=read, daemon=True).start()
        opened = router_service_pb2.SessionOpened()
        opened.alive_time.FromSeconds(30)
        yield router_service_pb2.SessionResponse(opened=opened)
        event = session.events.get()
        if isinstance(event, Failure):
            context.abort_with_status(rpc_status.to_status(to_status(event)))
        if event is not None:
            session.closed = event.HasField("close")
            yield router_service_pb2.SessionResponse(closed=router_service_pb2.SessionClosed(released=True))

    def EndConversation(  # noqa: N802
        self, request: router_service_pb2.EndConversationRequest, context: grpc.ServicerContext
    ) -> router_service_pb2.EndConversationResponse:
        self.let_go.append(request)
        return router_service_pb2.EndConversationResponse(released=True)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, index: int = -1) -> str:
        """The prompt of a turn as text."""
        ids = tokens.unpack(self.turns[index].request.prompt_token_ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def say(
        self,
        text: str,
        *,
        ids: Sequence[int] | None = None,
        finish: "turn_pb2.FinishReason.ValueType" = turn_pb2.FINISH_REASON_STOP,
        stop_reason: str | None = None,
        readback: int = 0,
        logprobs: int = 0,
        prompt_logprobs: Sequence[turn_pb2.PositionLogprobs] = (),
        pause: Callable[[Turn], None] | None = None,
    ) -> Script:
        """Answer with a text, one token a chunk; pause runs after the first."""

        def script(request: Request) -> Iterator[Any]:
            said = list(ids) if ids is not None else self.encode(text)
            shown = 0
            for number, token in enumerate(said, start=1):
                whole = self.tokenizer.decode(said[:number], skip_special_tokens=False)
                now = len(text) if number == len(said) else min(len(text), len(whole.rstrip("\ufffd")))
                yield Response(chunk=self._chunk(token, text[shown:now], logprobs))
                shown = max(shown, now)
                if number == 1 and pause is not None:
                    yield pause
            yield Response(
                summary=summary_of(request, len(said), finish, stop_reason, readback, prompt_logprobs)
            )

        return script

    def _chunk(self, token: int, text: str, logprobs: int) -> turn_pb2.Chunk:
        chunk = turn_pb2.Chunk(token_ids=tokens.pack([token]), text=text)
        if logprobs:
            candidates = [turn_pb2.TokenLogprob(token_id=token, logprob=-0.25, rank=1, decoded_token=text)]
            for rank in range(2, logprobs + 1):
                other = (token + rank) % 1000
                candidates.append(
                    turn_pb2.TokenLogprob(
                        token_id=other, logprob=-float(rank), rank=rank, decoded_token=f"<{rank}>"
                    )
                )
            chunk.logprobs.add(candidates=candidates)
        return chunk


def summary_of(
    request: Request,
    output_tokens: int,
    finish: "turn_pb2.FinishReason.ValueType" = turn_pb2.FINISH_REASON_STOP,
    stop_reason: str | None = None,
    readback: int = 0,
    prompt_logprobs: Sequence[turn_pb2.PositionLogprobs] = (),
) -> turn_pb2.Summary:
    prompt_tokens = tokens.count(request.prompt_token_ids)
    summary = turn_pb2.Summary(
        finish_reason=finish,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_id=request.request_id,
        prompt_logprobs=prompt_logprobs,
    )
    if stop_reason is not None:
        summary.stop_reason = stop_reason
    summary.reuse.tokens.readback = readback
    summary.reuse.tokens.computed = prompt_tokens - readback
    if readback:
        summary.reuse.verdict = turn_pb2.VERDICT_READBACK
        summary.reuse.reason = turn_pb2.REUSE_REASON_PROVEN
    else:
        summary.reuse.verdict = turn_pb2.VERDICT_RECOMPUTE
        summary.reuse.reason = turn_pb2.REUSE_REASON_NOT_FOUND
    return summary


def fail(failure: Failure) -> Script:
    """Fail before the first chunk."""

    def script(_request: Request) -> Iterator[Any]:
        raise failure
        yield

    return script
