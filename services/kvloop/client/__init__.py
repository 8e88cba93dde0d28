"""Clients of RouterService and ChatService: asyncio, typed, on grpcio and protobuf alone.

    async with Client("127.0.0.1:7600") as client, client.session("agent-1") as session:
        async for event in session.turn(prompt_ids, max_tokens=64):
            print(event.text, end="")

ChatClient takes messages and tools instead of token ids, at a gateway. Turns are tried again by the error
model: before the first token only, under the same request id, at the next router when there are several. What
can't be helped is raised as CallFailed.
"""

from kvloop.client.chat import (
    ChatAnswer,
    ChatClient,
    ChatEvent,
    ChatOptions,
    ChatSession,
    system,
    tool_result,
    user,
)
from kvloop.client.client import Client
from kvloop.client.errors import CallFailed
from kvloop.client.events import Event
from kvloop.client.options import TurnOptions
from kvloop.client.retry import ONCE, PATIENT, RetryPolicy
from kvloop.client.session import Session
from kvloop.v1alpha1.chat_service_pb2 import ChatMessage, ChatSummary, Tool, ToolCall, ToolChoice
from kvloop.v1alpha1.router_service_pb2 import ExplainTurnResponse
from kvloop.v1alpha1.sampling_pb2 import SamplingParams
from kvloop.v1alpha1.turn_pb2 import LeaseInfo, Retention, Summary

__all__ = [
    "ONCE",
    "PATIENT",
    "CallFailed",
    "ChatAnswer",
    "ChatClient",
    "ChatEvent",
    "ChatMessage",
    "ChatOptions",
    "ChatSession",
    "ChatSummary",
    "Client",
    "Event",
    "ExplainTurnResponse",
    "LeaseInfo",
    "Retention",
    "RetryPolicy",
    "SamplingParams",
    "Session",
    "Summary",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "TurnOptions",
    "system",
    "tool_result",
    "user",
]
