"""ChatService: the serving code of the HTTP door, with types in front of it and no HTTP between."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus

from kvloop.gateway import admission, compat, exchange, problems
from kvloop.gateway.chat_answer import ChatAnswer
from kvloop.gateway.chat_request import to_body
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.identity import identify
from kvloop.gateway.problems import Problem
from kvloop.gateway.sessions import Sessions
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import checks
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.runtime.servicing import Context, stream, time_left_s
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc, router_service_pb2, sampling_pb2

SERVICE = "kvloop.v1alpha1.ChatService"
_SAMPLING = frozenset(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
# Where a field of the HTTP API is called otherwise in the protos.
_FIELDS = {
    "max_completion_tokens": "sampling.max_tokens",
    "top_logprobs": "sampling.logprobs",
    "vllm_xargs": "sampling.extra_args_json",
    "chat_template_kwargs": "chat_template_kwargs_json",
}
_PROMPT = frozenset({"input_tokens", "input_text", "prompt"})


class ChatServicer(chat_service_pb2_grpc.ChatServiceServicer):
    """The typed door of the gateway."""

    def __init__(self, serving: compat.ChatServing, settings: GatewaySettings, sessions: Sessions) -> None:
        """Take vLLM's serving of chats, and the sessions at the routers."""
        self._serving = serving
        self._settings = settings
        self._sessions = sessions
        self._draining = False
        self.open_turns = 0
        """Turns being served."""

    def start_draining(self) -> None:
        """Refuse new turns and sessions from now on, and end the sessions that are open."""
        self._draining = True
        self._sessions.end()

    @stream
    async def Chat(  # noqa: N802 - gRPC's name
        self, request: pb.ChatRequest, context: Context
    ) -> AsyncIterator[pb.ChatResponse]:
        """Serve one turn. Nothing is sent before its first output."""
        if self._draining:
            raise problems.draining()
        here = self._admit(request, context)
        body = to_body(request, vocab_size=self._serving.vocab_size)
        exchange.enter(here)
        answer = ChatAnswer()
        self.open_turns += 1
        events = self._serving.stream(body)
        try:
            async for event in events:
                if "error" in event:
                    raise _told(here, Problem(int(HTTPStatus.INTERNAL_SERVER_ERROR), "the answer broke off"))
                delta = answer.add(event)
                if delta is not None:
                    yield pb.ChatResponse(delta=delta)
            if not here.summaries:
                raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "the answer broke off")
            yield pb.ChatResponse(summary=answer.end(here.summaries[0], here.identity.source))
        except compat.Refused as refused:
            raise _told(here, refused.problem) from None
        finally:
            self.open_turns -= 1
            # What the client has left behind is cancelled, not merely forgotten.
            await events.aclose()  # type: ignore[attr-defined]

    @stream
    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.ChatServiceSessionRequest], context: Context
    ) -> AsyncIterator[pb.ChatServiceSessionResponse]:
        """Keep a conversation alive while the stream is open."""
        headers = _headers(context)
        authorization, _ = admission.credentials_of(headers)
        metadata = (("authorization", authorization),) if authorization else ()

        def opening(asked: pb.ChatSessionOpen) -> router_service_pb2.SessionOpen:
            own = identify({"conversation_id": asked.conversation_id}, headers)
            if not own.conversation_id:
                raise invalid("conversation_id", "must name the conversation")
            admission.check_body({"cache_salt": asked.cache_salt})
            return router_service_pb2.SessionOpen(
                conversation_id=own.conversation_id,
                model=self._settings.model_name,
                adapter=self._serving.adapter_of(asked.model),
                cache_salt=asked.cache_salt,
            )

        async with aclosing(self._sessions.serve(requests, opening, metadata)) as answers:
            async for answer in answers:
                yield answer

    def _admit(self, request: pb.ChatRequest, context: Context) -> Exchange:
        """Return what the turn's client may know and wants. Raises Failure."""
        settings = self._settings
        left_s = checks.check_deadline(time_left_s(context))
        checks.check_retention(request.retention)
        headers = _headers(context)
        here = Exchange(
            deadline=time.monotonic() + min(left_s, settings.max_turn_timeout_s),
            reuse_policy=request.reuse_policy,
            trace=admission.trace_of(headers),
        )
        here.authorization, here.tenant = admission.credentials_of(headers)
        if request.HasField("retention"):
            here.retention = request.retention
        if settings.client_priority and request.HasField("priority"):
            here.priority = request.priority
        named = {
            "conversation_id": request.conversation_id,
            "parent_conversation_id": request.parent_conversation_id,
        }
        here.identity = identify(named, headers)
        admission.check_body({"cache_salt": request.cache_salt})
        return here


def _headers(context: Context) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found.setdefault(name, value)
    return found


def _told(here: Exchange, problem: Problem) -> Failure:
    """Return the failure of a turn: the router's own, or what vLLM's serving code says is wrong."""
    if here.failure is not None:
        return here.failure
    problem = here.problem or problem
    status = problem.status
    if status == HTTPStatus.NOT_FOUND:
        return Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, problem.message, field="model")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Failure(Reason.ERROR_REASON_INTERNAL, problem.message)
    if problem.param in _PROMPT:
        return Failure(Reason.ERROR_REASON_PROMPT_TOO_LONG, problem.message, field="messages")
    return Failure(Reason.ERROR_REASON_INVALID_FIELD, problem.message, field=_field(problem.param))


def _field(param: str | None) -> str:
    if not param:
        return "messages"
    return _FIELDS.get(param) or (f"sampling.{param}" if param in _SAMPLING else param)


__all__ = ["SERVICE", "ChatServicer"]
