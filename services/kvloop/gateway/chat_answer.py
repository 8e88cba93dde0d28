"""The events of a streamed chat completion as ChatService's answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import turn_pb2

_FINISH = {
    "stop": pb.CHAT_FINISH_REASON_STOP,
    "length": pb.CHAT_FINISH_REASON_LENGTH,
    "tool_calls": pb.CHAT_FINISH_REASON_TOOL_CALLS,
    "function_call": pb.CHAT_FINISH_REASON_TOOL_CALLS,
    "repetition": pb.CHAT_FINISH_REASON_REPETITION,
}


class ChatAnswer:
    """One answer as it comes in."""

    def __init__(self) -> None:
        self._finish = "stop"

    def add(self, event: Mapping[str, Any]) -> pb.ChatDelta | None:
        """Return what an event adds, or None for one that adds nothing."""
        delta = pb.ChatDelta()
        for choice in event.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            said = choice.get("delta") or {}
            delta.content += _text(said.get("content"))
            delta.reasoning += _text(said.get("reasoning"))
            delta.tool_calls.extend(map(_call, said.get("tool_calls") or ()))
            delta.logprobs.extend(map(_position, (choice.get("logprobs") or {}).get("content") or ()))
        return delta if delta.ByteSize() else None

    def end(self, turn: turn_pb2.Summary, identity: str) -> pb.ChatSummary:
        """Return the end."""
        reason = _FINISH.get(self._finish, pb.CHAT_FINISH_REASON_STOP)
        return pb.ChatSummary(finish_reason=reason, turn=turn, identity=identity)


def _call(call: Mapping[str, Any]) -> pb.ToolCallDelta:
    function = call.get("function") or {}
    return pb.ToolCallDelta(
        index=call.get("index") or 0,
        id=_text(call.get("id")),
        name=_text(function.get("name")),
        arguments_delta=_text(function.get("arguments")),
    )


def _position(position: Mapping[str, Any]) -> pb.TokenTexts:
    others: Sequence[Mapping[str, Any]] = position.get("top_logprobs") or ()
    return pb.TokenTexts(chosen=_token(position), top=map(_token, others))


def _token(token: Mapping[str, Any]) -> pb.TokenText:
    return pb.TokenText(
        text=_text(token.get("token")),
        utf8=bytes(token.get("bytes") or ()),
        logprob=token.get("logprob") or 0.0,
    )


def _text(value: str | None) -> str:
    """Return a text that protobuf takes: one half of a surrogate pair is none."""
    return value.encode("utf-8", "replace").decode() if value else ""
