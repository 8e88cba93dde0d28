"""Which conversation a request belongs to, by what agents already send.

The first of these that is present and not empty names the conversation, within the tenant:

1. `conversation_id` in the body (vLLM's multi-turn benchmark, kvloop's own clients)
2. `session_id` in the body (vLLM)
3. `vllm_xargs.session_id` in the body (vLLM)
4. `X-Session-ID` (vllm-router, OpenCode)
5. `X-Dynamo-Session-ID` (Dynamo)
6. `x-claude-code-session-id` (Claude Code)
7. `session-id` (Codex)

Without any the turn has no conversation: the router looks for its prompt's beginning, and what it leaves is
held under its own (hold_unnamed).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloop.runtime.checks import MAX_CONVERSATION_ID
from kvloop.runtime.errors import invalid

NONE = "none"
HEADERS = ("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "session-id")
PARENT = "parent_conversation_id"


@dataclass(frozen=True, slots=True)
class Identity:
    """A conversation and where its name was found."""

    conversation_id: str = ""
    source: str = NONE
    """A name of the list above, or "none"."""
    parent_conversation_id: str = ""
    """The conversation that this one was forked from."""


def identify(body: Mapping[str, Any], headers: Mapping[str, str]) -> Identity:
    """Return the identity of a request; header names in lower case.

    Failure INVALID_FIELD when the name that counts is no string or longer than 256 characters.
    """
    parent = _checked(PARENT, body.get(PARENT)) or ""
    xargs = body.get("vllm_xargs")
    nested = xargs.get("session_id") if isinstance(xargs, Mapping) else None
    candidates: list[tuple[str, Any]] = [
        ("conversation_id", body.get("conversation_id")),
        ("session_id", body.get("session_id")),
        ("vllm_xargs.session_id", nested),
        *((name, headers.get(name)) for name in HEADERS),
    ]
    for source, value in candidates:
        name = _checked(source, value)
        if name:
            return Identity(name, source, parent)
    return Identity(parent_conversation_id=parent)


def _checked(source: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid(source, "must be a string")
    if len(value) > MAX_CONVERSATION_ID:
        raise invalid(source, f"must have at most {MAX_CONVERSATION_ID} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(source, "must be valid Unicode") from None
    return value
