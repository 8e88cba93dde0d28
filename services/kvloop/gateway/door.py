"""The ASGI application around vLLM's: who asks, what gets in, and with which status an answer goes out.

What goes out again is in kvloop.gateway.reply.
"""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from kvloop.gateway import admission, exchange, problems
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.identity import identify
from kvloop.gateway.problems import Problem
from kvloop.gateway.reply import TURNS, Message, Reply, Send, answer, refuse
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import logs, tracing
from kvloop.runtime.errors import Failure

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logs.get("gateway")

_BODIES = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
_READS = frozenset({"/v1/models", "/health", "/ping", "/version", "/metrics", "/openapi.json", "/docs"})
_LIVE = "/livez"
_STORED = "/v1/responses/"


class Gone(Exception):
    """The client left before its request was complete."""


class Door:
    """Wraps vLLM's app."""

    def __init__(self, app: App, settings: GatewaySettings) -> None:
        """Take the app to serve."""
        self._app = app
        self._settings = settings
        self._draining = False
        self.open_exchanges = 0
        """Requests being served."""

    def start_draining(self) -> None:
        """Refuse new turns from now on."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        self.open_exchanges += 1
        try:
            await self._serve(scope, receive, send)
        except Gone:
            pass
        finally:
            self.open_exchanges -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers = _headers(scope)
        anthropic = path.startswith("/v1/messages")
        if path == _LIVE and method in ("GET", "HEAD"):
            await answer(send, HTTPStatus.OK, {"status": "alive"}, {})
            return
        problem = _route(method, path)
        if problem is not None:
            await refuse(send, problem, anthropic=anthropic)
            return
        here = Exchange()
        if self._draining and path in TURNS and method == "POST":
            # The next request of this client is another gateway's, so this connection is of no use.
            gone = problems.from_failure(problems.draining())
            await refuse(send, gone, anthropic=anthropic, here=here, extra={"connection": "close"})
            return
        try:
            body = await self._admit(here, scope, headers, receive)
        except Failure as failure:
            await refuse(send, problems.from_failure(failure), anthropic=anthropic, here=here)
            return
        except _TooLarge:
            limit = self._settings.max_body_bytes
            problem = Problem(
                int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE), f"the body must have at most {limit} bytes"
            )
            await refuse(send, problem, anthropic=anthropic, here=here)
            return
        exchange.enter(here)
        reply = Reply(send, here, path, client_id=headers.get("x-request-id"))
        try:
            with (
                tracing.continued(headers.items()),
                tracing.span("gateway.request", root=path in TURNS) as span,
            ):
                span.note(path=path)
                await self._app(_forwarded(scope, len(body)), _replay(body, receive), reply.send)
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            if here.problem is None:
                _log.error("unexpected_failure", path=path, error=type(error).__name__)
                here.problem = Problem(int(HTTPStatus.INTERNAL_SERVER_ERROR), problems.UNEXPECTED)
        await reply.finish()

    async def _admit(self, here: Exchange, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        """Fill the exchange and return the body. Raises Failure."""
        settings = self._settings
        here.authorization, here.tenant = admission.credentials_of(headers)
        here.reuse_policy = admission.reuse_of(headers)
        here.trace = admission.trace_of(headers)
        timeout_s = admission.timeout_of(
            headers, default_s=settings.turn_timeout_s, longest_s=settings.max_turn_timeout_s
        )
        here.deadline = time.monotonic() + timeout_s
        if settings.client_priority:
            here.priority = admission.priority_of(headers)
        raw = await _read(receive, headers, settings.max_body_bytes)
        if scope["path"] not in TURNS:
            return raw
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            # vLLM's app says what is wrong with it.
            return raw
        if not isinstance(body, dict):
            return raw
        here.identity = identify(body, headers)
        admission.check_body(body, max_turns=settings.max_turns_per_request)
        # Nothing has to be taken out: what steers is refused, what is left the client mints anew.
        return raw


class _TooLarge(Exception):
    """The body exceeds its bound."""


def _route(method: str, path: str) -> Problem | None:
    """Return the problem of a path that is not served, or None."""
    known = TURNS | _BODIES | _READS
    if path.startswith(_STORED):
        return Problem(int(HTTPStatus.NOT_FOUND), "responses are not stored here")
    if path not in known:
        return Problem(int(HTTPStatus.NOT_FOUND), "no such path is served")
    allowed = ("GET", "HEAD", "OPTIONS") if path in _READS else ("POST", "OPTIONS")
    if method not in allowed:
        return Problem(int(HTTPStatus.METHOD_NOT_ALLOWED), f"{path} takes {allowed[0]}")
    return None


def _headers(scope: Scope) -> dict[str, str]:
    # The first of several counts, as in vLLM's own reading.
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _forwarded(scope: Scope, length: int) -> Scope:
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name.decode("latin-1").lower() not in admission.STRIPPED_HEADERS | {"content-length"}
    ]
    return {**scope, "headers": [*kept, (b"content-length", str(length).encode())]}


async def _read(receive: Receive, headers: dict[str, str], limit: int) -> bytes:
    """Return the whole body. Raises _TooLarge, Gone."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _TooLarge
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _TooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
