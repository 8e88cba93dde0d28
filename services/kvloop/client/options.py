"""What may be said of a turn besides its prompt."""

import secrets
from collections.abc import Sequence
from typing import TypedDict

from kvloop.runtime import tokens
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2, turn_pb2

_Policy = router_service_pb2.ReusePolicy


class TurnOptions(TypedDict, total=False):
    """Options of a turn; those not told of here are as in GenerateRequest."""

    sampling: sampling_pb2.SamplingParams
    max_tokens: int
    """Put into sampling."""
    retention: turn_pb2.Retention
    parent_conversation_id: str
    priority: int
    reuse: bool
    """False recomputes."""
    read_back: bool
    """True has P read back what is proven, though another way be faster."""
    request_id: str
    """Minted when absent."""
    timeout_s: float
    """Of all tries together; the client's when absent."""


def generate_request(prompt_ids: Sequence[int], options: TurnOptions) -> router_service_pb2.GenerateRequest:
    """Return the request of a turn, without its conversation.

    Its request_id stands for all tries: of two that meet, the later one takes over. Raises OverflowError for
    ids that are none.
    """
    policy = _Policy.REUSE_POLICY_READBACK if options.get("read_back") else _Policy.REUSE_POLICY_ALLOW
    request = router_service_pb2.GenerateRequest(
        request_id=options.get("request_id") or secrets.token_hex(16),
        parent_conversation_id=options.get("parent_conversation_id", ""),
        prompt_token_ids=tokens.pack(prompt_ids),
        sampling=options.get("sampling"),
        retention=options.get("retention"),
        priority=options.get("priority"),
        reuse_policy=policy if options.get("reuse", True) else _Policy.REUSE_POLICY_FORBID,
    )
    if "max_tokens" in options:
        request.sampling.max_tokens = options["max_tokens"]
    return request
