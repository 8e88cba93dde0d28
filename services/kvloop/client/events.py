"""What a turn yields."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.runtime import tokens
from kvloop.v1alpha1 import router_service_pb2, turn_pb2


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of an answer, or, once and last, its summary."""

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[turn_pb2.PositionLogprobs] = ()
    """One entry per token, when asked for."""
    summary: turn_pb2.Summary | None = None


def event_of(response: router_service_pb2.GenerateResponse) -> Event:
    """Return what a response says."""
    if response.HasField("summary"):
        return Event(summary=response.summary)
    chunk = response.chunk
    return Event(tokens.unpack(chunk.token_ids), chunk.text, chunk.logprobs)
