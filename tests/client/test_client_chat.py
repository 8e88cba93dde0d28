"""The chat client against a scripted ChatService."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from kvloop.client import (
    ONCE,
    CallFailed,
    ChatClient,
    RetryPolicy,
    Tool,
    ToolCall,
    system,
    tool_result,
    user,
)
from kvloop.runtime.errors import Failure, Reason, to_status
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc, router_service_pb2

SUMMARY = pb.ChatSummary(finish_reason=pb.CHAT_FINISH_REASON_STOP, identity="conversation_id")
QUICK = RetryPolicy(attempts=3, first_pause_s=0.0)
DRAINING = Failure(Reason.ERROR_REASON_DRAINING, "going away")
END = pb.ChatResponse(summary=SUMMARY)


def saying(*pieces: str) -> list[pb.ChatResponse]:
    return [pb.ChatResponse(delta=pb.ChatDelta(content=piece)) for piece in pieces]


def calling(*pieces: pb.ToolCallDelta) -> list[pb.ChatResponse]:
    return [pb.ChatResponse(delta=pb.ChatDelta(tool_calls=[piece])) for piece in pieces]


class Gateway(chat_service_pb2_grpc.ChatServiceServicer):
    """Each chat takes the next script: responses, or a Failure where it fails."""

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.requests: list[pb.ChatRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.opened: list[pb.ChatSessionOpen] = []
        self.closed = 0
        self.breaks = 0
        """Sessions that are to break when they are closed."""

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        for step in self.scripts.pop(0) if self.scripts else [*saying("Hello."), END]:
            if isinstance(step, Failure):
                await context.abort_with_status(rpc_status.to_status(to_status(step)))
            yield step

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[pb.ChatServiceSessionResponse]:
        opening = await anext(request_iterator)
        self.opened.append(opening.open)
        yield pb.ChatServiceSessionResponse(opened=router_service_pb2.SessionOpened())
        async for _ in request_iterator:
            if self.breaks:
                self.breaks -= 1
                return
            self.closed += 1
            yield pb.ChatServiceSessionResponse(closed=router_service_pb2.SessionClosed(released=True))


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[Gateway, str]]:
    servicer, server = Gateway(), grpc.aio.server()
    chat_service_pb2_grpc.add_ChatServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_turn_is_asked_for_as_told_and_yields_what_is_new() -> None:
    async with gateway() as (served, at), ChatClient(at, token="t") as client:
        served.scripts = [[*saying("Hel", "lo."), END]]
        tool = Tool(name="weather", parameters_json="{}")
        messages = [system("Be brief."), user("Hi")]
        turn = client.turn(messages, conversation_id="c", model="m", tools=[tool], max_tokens=8, reuse=False)
        events = [event async for event in turn]
        assert [event.content for event in events] == ["Hel", "lo.", ""]
        assert events[-1].summary == SUMMARY
        (request,) = served.requests
        assert list(request.messages) == messages
        assert list(request.tools) == [tool]
        assert (request.conversation_id, request.model, request.sampling.max_tokens) == ("c", "m", 8)
        assert request.reuse_policy == router_service_pb2.REUSE_POLICY_FORBID
        assert not request.HasField("tool_choice")
        assert not request.HasField("parallel_tool_calls")
        assert not request.HasField("retention")
        assert served.metadata[0]["authorization"] == "Bearer t"


async def test_a_whole_answer_goes_into_the_next_history() -> None:
    async with gateway() as (served, at), ChatClient(at) as client:
        served.scripts = [
            [
                pb.ChatResponse(delta=pb.ChatDelta(reasoning="They want ", content="Let me ")),
                pb.ChatResponse(delta=pb.ChatDelta(reasoning="the weather.", content="look.")),
                *calling(
                    pb.ToolCallDelta(index=0, id="a", name="weather", arguments_delta='{"city":'),
                    pb.ToolCallDelta(index=1, id="b", name="time", arguments_delta="{}"),
                    pb.ToolCallDelta(index=0, arguments_delta='"Paris"}'),
                ),
                END,
            ]
        ]
        answer = await client.complete([user("Weather?")])
        message = answer.message
        assert (message.role, message.content) == (pb.CHAT_ROLE_ASSISTANT, "Let me look.")
        assert message.reasoning == "They want the weather."
        weather = ToolCall(id="a", name="weather", arguments_json='{"city":"Paris"}')
        assert list(message.tool_calls) == [weather, ToolCall(id="b", name="time", arguments_json="{}")]
        assert answer.summary == SUMMARY
        result = tool_result(weather, "sunny")
        await client.complete([user("Weather?"), message, result])
        assert list(served.requests[1].messages) == [user("Weather?"), message, result]
        assert result.tool_call_id == "a"


async def test_what_passes_is_tried_again_before_the_first_word_only() -> None:
    async with gateway() as (served, at), ChatClient(at, retry=QUICK) as client:
        served.scripts = [[DRAINING]]
        assert (await client.complete([user("Hi")])).message.content == "Hello."
        served.scripts = [[*saying("Hel"), DRAINING]]
        with pytest.raises(CallFailed) as caught:
            await client.complete([user("Hi")])
        assert caught.value.reason == "DRAINING"
        assert len(served.requests) == 3


async def test_failures_keep_reason_and_field_and_an_end_without_summary_is_one() -> None:
    async with gateway() as (served, at), ChatClient(at, retry=ONCE) as client:
        refusal = Failure(Reason.ERROR_REASON_INVALID_FIELD, "no", field="messages")
        served.scripts = [[refusal], saying("Hel")]
        with pytest.raises(CallFailed) as caught:
            await client.complete([])
        assert (caught.value.reason, caught.value.field) == ("INVALID_FIELD", "messages")
        with pytest.raises(CallFailed, match="without a summary"):
            await client.complete([user("Hi")])


async def test_a_session_names_the_conversation_and_lets_go_at_its_end() -> None:
    async with gateway() as (served, at), ChatClient(at) as client:
        async with client.session("agent-1", model="m", cache_salt="s") as session:
            answer = await session.complete([user("Hi")], max_tokens=4)
            assert answer.message.content == "Hello."
            assert served.closed == 0
        assert served.closed == 1
        (opened,) = served.opened
        assert (opened.conversation_id, opened.model, opened.cache_salt) == ("agent-1", "m", "s")
        (request,) = served.requests
        assert (request.conversation_id, request.model, request.cache_salt) == ("agent-1", "m", "s")


async def test_a_session_that_breaks_as_it_closes_still_lets_go() -> None:
    async with gateway() as (served, at), ChatClient(at, retry=QUICK) as client:
        async with client.session("agent-1") as session:
            served.breaks = 1
            assert await session.close()
        assert (len(served.opened), served.closed) == (2, 1)
