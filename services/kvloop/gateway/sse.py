"""Server-sent events on their way out: what was reused is only known at the end, so it goes into the end.

vLLM's serving code takes the cached tokens of a stream from its first output, when a router can't tell them
yet. The last events are completed here; all others pass untouched.
"""

import json
from collections.abc import Callable
from typing import Any

_MARKS = (b'"finish_reason":"', b'"usage":{', b'"type":"response.completed"')
_DATA = b"data: "

Report = Callable[[], dict[str, Any]]


def complete(event: bytes, report: Report, cached: Callable[[], int]) -> bytes:
    """Return the event, completed if it is one that ends an answer.

    report and cached tell what is known by now; they are asked only for such events.
    """
    if not any(mark in event for mark in _MARKS):
        return event
    lines = event.split(b"\n")
    for number, line in enumerate(lines):
        if line.startswith(_DATA) and line.endswith(b"}"):
            try:
                content = json.loads(line[len(_DATA) :])
            except ValueError:
                return event
            if isinstance(content, dict) and _complete(content, report, cached):
                lines[number] = _DATA + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(
                    "utf-8", "surrogatepass"
                )
    return b"\n".join(lines)


def is_error(body: bytes) -> bool:
    """Tell whether these are the events by which vLLM ends a stream that can't go on."""
    return body.startswith((b'data: {"error":', b"event: error\n"))


def error(body: dict[str, Any]) -> bytes:
    """Return the events that end a stream of chunks which can't go on."""
    return _DATA + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"


def named_error(body: dict[str, Any]) -> bytes:
    """Return the event that ends a stream of named events which can't go on."""
    return b"event: error\n" + _DATA + json.dumps(body).encode() + b"\n\n"


def _complete(
    content: dict[str, Any], report: Callable[[], dict[str, Any]], cached: Callable[[], int]
) -> bool:
    kind = content.get("type")
    if kind == "response.completed":
        content["response"]["kvloop"] = report()
        return True
    usage = content.get("usage")
    if kind == "message_delta" and isinstance(usage, dict):
        # Anthropic counts cached tokens apart from the others.
        known = usage.get("cache_read_input_tokens") or 0
        usage["cache_read_input_tokens"] = cached()
        usage["input_tokens"] = max(0, usage.get("input_tokens", 0) + known - cached())
        content["kvloop"] = report()
        return True
    choices = content.get("choices")
    if not isinstance(choices, list):
        return False
    finished = any(choice.get("finish_reason") for choice in choices)
    if not choices and isinstance(usage, dict):
        details = usage.get("prompt_tokens_details") or {}
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached()}
        finished = True
    if finished:
        content["kvloop"] = report()
    return finished
