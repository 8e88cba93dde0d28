"""What of a request gets through the door.

Pure functions of a parsed body and of headers. Client fields that would steer an engine or its transfers are
refused or removed here, before vLLM's serving code sees them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from kvloop.runtime.checks import MAX_CACHE_SALT, check_extra_args
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import router_service_pb2

TIMEOUT_HEADER = "x-request-timeout"
REUSE_HEADER = "x-kvloop-reuse"

# vLLM would take ids, ranks and priorities from these; the API key is forwarded by us, not checked by vLLM.
STRIPPED_HEADERS = frozenset({"x-request-id", "x-data-parallel-rank", "x-vllm-priority"})

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
# Each with the sentence that tells what to do instead.
_UNSERVED = {
    "previous_response_id": "responses are not stored here; send the whole conversation in input",
    "background": "responses are not stored here; leave background out and stream instead",
    "use_beam_search": "beam search is not served; leave it out",
    "prompt_embeds": "prompt embeddings are not served; send text or token ids",
    "trace_decode_token_ids": "replaying traces is not served",
}
# vLLM looks into these before it has checked what they are.
_OBJECTS = ("structured_outputs", "response_format", "stream_options", "chat_template_kwargs")
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512
_REUSE = {
    "allow": router_service_pb2.REUSE_POLICY_ALLOW,
    "forbid": router_service_pb2.REUSE_POLICY_FORBID,
}


def check_body(body: Mapping[str, Any], *, max_turns: int = 1) -> None:
    """Refuse what a client must not send. Failure INVALID_FIELD or TRANSFER_PARAMS_REFUSED.

    max_turns: how many answers one request may ask for.
    """
    for name in _TRANSFER:
        if body.get(name) is not None:
            raise Failure(
                Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED,
                "transfer parameters come from workers, never from clients",
                field=name,
            )
    for name, sentence in _UNSERVED.items():
        if body.get(name):
            raise invalid(name, sentence)
    for name in _OBJECTS:
        if not isinstance(body.get(name), Mapping | None):
            raise invalid(name, "must be an object")
    answers, prompts = _answers(body.get("n")), _prompts(body.get("prompt"))
    if answers * prompts > max_turns:
        raise invalid(
            "prompt" if prompts > max_turns else "n", f"at most {max_turns} answers a request are served"
        )
    items = body.get("input")
    if isinstance(items, list) and any(_refers(item) for item in items):
        raise invalid("input", "items are not stored here; send each with its type or role")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and len(salt) <= MAX_CACHE_SALT):
        raise invalid("cache_salt", f"must be a string of at most {MAX_CACHE_SALT} characters")
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, Mapping):
        try:
            check_extra_args(json.dumps(xargs))
        except Failure as failure:
            raise Failure(failure.reason, failure.message, field="vllm_xargs") from None


def _answers(value: object) -> float:
    """Return how many answers to each prompt vLLM reads; what it does not take is one."""
    if isinstance(value, int | float | str):
        try:
            return max(1.0, float(value))
        except (ValueError, OverflowError):
            pass
    return 1.0


def _prompts(value: object) -> int:
    """Return how many prompts these are; token ids in a row are one."""
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return len(value)
    return 1


def _refers(item: object) -> bool:
    """Tell whether an item of the Responses API stands for one that was stored."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.get("role") is None)


def priority_of(headers: Mapping[str, str]) -> int | None:
    """Return X-Vllm-Priority, or None. Failure INVALID_FIELD."""
    text = headers.get("x-vllm-priority")
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise invalid("x-vllm-priority", "must be an integer") from None
    if not -(2**31) <= value < 2**31:
        raise invalid("x-vllm-priority", "is out of range")
    return value


def timeout_of(headers: Mapping[str, str], *, default_s: float, longest_s: float) -> float:
    """Return the seconds that the request may take. Failure INVALID_FIELD."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return default_s
    try:
        value = float(text)
    except ValueError:
        raise invalid(TIMEOUT_HEADER, "must be a number of seconds") from None
    if not value > 0:
        raise invalid(TIMEOUT_HEADER, "must be greater than zero")
    return min(value, longest_s)


def reuse_of(headers: Mapping[str, str]) -> "router_service_pb2.ReusePolicy.ValueType":
    """Return the reuse policy that a client asks for. Failure INVALID_FIELD."""
    text = headers.get(REUSE_HEADER)
    if text is None:
        return router_service_pb2.REUSE_POLICY_UNSPECIFIED
    if text not in _REUSE:
        raise invalid(REUSE_HEADER, "must be allow or forbid")
    return _REUSE[text]


def trace_of(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the caller's W3C trace context as metadata for the router; a malformed one is none."""
    parent = headers.get("traceparent", "")
    if not _TRACEPARENT.fullmatch(parent):
        return ()
    state = headers.get("tracestate", "")
    if 0 < len(state) <= _MAX_TRACESTATE and state.isascii() and state.isprintable():
        return (("traceparent", parent), ("tracestate", state))
    return (("traceparent", parent),)


def credentials_of(headers: Mapping[str, str]) -> tuple[str | None, str]:
    """Return (authorization for the router, tenant digest for caches here).

    Anthropic's SDK sends its key in x-api-key. Failure UNAUTHENTICATED for what no header may hold.
    """
    value = headers.get("authorization")
    if value is None and headers.get("x-api-key"):
        value = f"Bearer {headers['x-api-key']}"
    if not value:
        return None, ""
    if not (value.isascii() and value.isprintable()):
        raise Failure(Reason.ERROR_REASON_UNAUTHENTICATED, "the credentials are malformed")
    return value, hashlib.sha256(value.encode()).hexdigest()
