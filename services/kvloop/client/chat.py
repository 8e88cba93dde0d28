"""The client of ChatService: messages and tools in, text, reasoning and parsed tool calls out; no tokenizer.

async with ChatClient("127.0.0.1:7700") as client, client.session("agent-1") as session:
    answer = await session.complete([user("What is the capital of France?")])
    print(answer.message.content)
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import grpc

from kvloop.client.calls import Calls, now
from kvloop.client.errors import broken_off, failed
from kvloop.client.holding import Holding
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

if TYPE_CHECKING:
    from kvloop.client.routers import Router

_Policy = router_service_pb2.ReusePolicy


class ChatOptions(TypedDict, total=False):
    """Options of a chat's turn; those not told of here are as in ChatRequest."""

    tools: Sequence[pb.Tool]
    tool_choice: pb.ToolChoice
    parallel_tool_calls: bool
    sampling: sampling_pb2.SamplingParams
    max_tokens: int
    """Put into sampling."""
    reasoning_effort: str
    chat_template_kwargs_json: str
    retention: turn_pb2.Retention
    parent_conversation_id: str
    priority: int
    reuse: bool
    """False recomputes."""
    timeout_s: float
    """Of all tries together; the client's when absent."""


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """What is new of an answer, or, once and last, its summary."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[pb.ToolCallDelta] = ()
    logprobs: Sequence[pb.TokenTexts] = ()
    summary: pb.ChatSummary | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer."""

    message: pb.ChatMessage
    """As the next turn's history takes it."""
    summary: pb.ChatSummary


class ChatClient(Calls):
    """A client of one fleet's gateways."""

    async def turn(
        self,
        messages: Sequence[pb.ChatMessage],
        *,
        conversation_id: str = "",
        model: str = "",
        cache_salt: str = "",
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatEvent, None]:
        """Serve one turn: yield the answer as it comes, and its summary last. Closing early cancels.

        messages: the whole history. conversation_id: under which KV is found and kept.

        Raises CallFailed. Once something has come, a failure is final.
        """
        request = _request(messages, options)
        request.conversation_id, request.model, request.cache_salt = conversation_id, model, cache_salt
        async with aclosing(
            self.answer(
                lambda router, deadline: self._attempt(router, request, deadline), options.get("timeout_s")
            )
        ) as events:
            async for event in events:
                yield event

    async def complete(
        self,
        messages: Sequence[pb.ChatMessage],
        *,
        conversation_id: str = "",
        model: str = "",
        cache_salt: str = "",
        **options: Unpack[ChatOptions],
    ) -> ChatAnswer:
        """Serve one turn and return its whole answer, as turn does. Raises CallFailed."""
        names = {"conversation_id": conversation_id, "model": model, "cache_salt": cache_salt}
        return await _whole(self.turn(messages, **names, **options))

    def session(self, conversation_id: str, *, model: str = "", cache_salt: str = "") -> "ChatSession":
        """Return a session to be entered with `async with`: meanwhile what is held is held on."""
        return ChatSession(
            self, pb.ChatSessionOpen(conversation_id=conversation_id, model=model, cache_salt=cache_salt)
        )

    async def _attempt(
        self, router: "Router", request: pb.ChatRequest, deadline: float
    ) -> AsyncGenerator[ChatEvent, None]:
        call = router.chats.Chat(request, timeout=deadline - now(), metadata=self.metadata)
        ended = False
        try:
            async for response in call:
                if ended := response.HasField("summary"):
                    yield ChatEvent(summary=response.summary)
                else:
                    new = response.delta
                    yield ChatEvent(new.content, new.reasoning, new.tool_calls, new.logprobs)
        except grpc.aio.AioRpcError as error:
            raise failed(error, router.target) from None
        finally:
            call.cancel()
        if not ended:
            raise broken_off(router.target)


class ChatSession(Holding):
    """A conversation of messages, held."""

    def __init__(self, client: ChatClient, opening: pb.ChatSessionOpen) -> None:
        """Use ChatClient.session."""
        super().__init__(client)
        self._chats = client
        self._opening = opening

    @property
    def conversation_id(self) -> str:
        """Return the conversation's name."""
        return self._opening.conversation_id

    async def turn(
        self, messages: Sequence[pb.ChatMessage], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatEvent, None]:
        """Serve one turn of this conversation, as ChatClient.turn does. Raises CallFailed."""
        opening = self._opening
        events = self._chats.turn(
            messages,
            conversation_id=opening.conversation_id,
            model=opening.model,
            cache_salt=opening.cache_salt,
            **options,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    async def complete(
        self, messages: Sequence[pb.ChatMessage], **options: Unpack[ChatOptions]
    ) -> ChatAnswer:
        """Serve one turn and return its whole answer. Raises CallFailed."""
        return await _whole(self.turn(messages, **options))

    def _stream_at(self, router: "Router") -> Any:
        return router.chats.Session(metadata=self._client.metadata)

    def _opening_request(self) -> pb.ChatServiceSessionRequest:
        return pb.ChatServiceSessionRequest(open=self._opening)

    def _closing_request(self) -> pb.ChatServiceSessionRequest:
        return pb.ChatServiceSessionRequest(close=router_service_pb2.SessionClose())

    async def _let_go(self) -> bool:
        """Open another stream and close it, at any gateway: ChatService has no other way."""
        async with self._chats.session(
            self._opening.conversation_id, model=self._opening.model, cache_salt=self._opening.cache_salt
        ) as again:
            return await again.close()


def system(content: str) -> pb.ChatMessage:
    """Return instructions."""
    return pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content=content)


def user(content: str) -> pb.ChatMessage:
    """Return what the one who asks says."""
    return pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=content)


def tool_result(call: pb.ToolCall, content: str) -> pb.ChatMessage:
    """Return the result of a call."""
    return pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content=content, tool_call_id=call.id)


def _request(messages: Sequence[pb.ChatMessage], options: ChatOptions) -> pb.ChatRequest:
    policy = _Policy.REUSE_POLICY_ALLOW if options.get("reuse", True) else _Policy.REUSE_POLICY_FORBID
    request = pb.ChatRequest(
        parent_conversation_id=options.get("parent_conversation_id", ""),
        messages=messages,
        tools=options.get("tools", ()),
        tool_choice=options.get("tool_choice"),
        parallel_tool_calls=options.get("parallel_tool_calls"),
        sampling=options.get("sampling"),
        reasoning_effort=options.get("reasoning_effort", ""),
        chat_template_kwargs_json=options.get("chat_template_kwargs_json", ""),
        retention=options.get("retention"),
        priority=options.get("priority"),
        reuse_policy=policy,
    )
    if "max_tokens" in options:
        request.sampling.max_tokens = options["max_tokens"]
    return request


async def _whole(events: AsyncGenerator[ChatEvent, None]) -> ChatAnswer:
    message, summary = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT), pb.ChatSummary()
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, pb.ToolCall] = {}
    async with aclosing(events):
        async for event in events:
            content.append(event.content)
            reasoning.append(event.reasoning)
            for piece in event.tool_calls:
                call = calls.setdefault(piece.index, pb.ToolCall())
                call.id, call.name = piece.id or call.id, piece.name or call.name
                call.arguments_json += piece.arguments_delta
            summary = event.summary or summary
    message.content, message.reasoning = "".join(content), "".join(reasoning)
    message.tool_calls.extend(calls[index] for index in sorted(calls))
    return ChatAnswer(message, summary)
