"""The ASGI application around vLLM's: who asks, what gets in, and with which status an answer goes out.

It wraps from outside because vLLM's serving code decides on HTTP 200 before a streamed turn has begun.
Nothing is sent until the turn has given its first output or failed, so that a failure has its status, in the
form of the API that was called.
"""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from kvloop.gateway import admission, exchange, problems, sse
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.identity import identify
from kvloop.gateway.problems import Problem
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import logs, tracing
from kvloop.runtime.errors import Failure

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logs.get("gateway")

TURNS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
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
        self.open_exchanges = 0
        """Requests being served."""

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
            await _answer(send, HTTPStatus.OK, {"status": "alive"}, {})
            return
        problem = _route(method, path)
        if problem is not None:
            await _refuse(send, problem, anthropic=anthropic)
            return
        here = Exchange()
        try:
            body = await self._admit(here, scope, headers, receive)
        except Failure as failure:
            await _refuse(send, problems.from_failure(failure), anthropic=anthropic, here=here)
            return
        except _TooLarge:
            limit = self._settings.max_body_bytes
            problem = Problem(
                int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE), f"the body must have at most {limit} bytes"
            )
            await _refuse(send, problem, anthropic=anthropic, here=here)
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
                here.problem = Problem(int(HTTPStatus.INTERNAL_SERVER_ERROR), "unexpected failure")
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
        admission.check_body(body)
        # Nothing has to be taken out: what steers is refused, what is left the client mints anew.
        return raw


class Reply:
    """One response on its way out."""

    def __init__(self, send: Send, here: Exchange, path: str, client_id: str | None) -> None:
        """Take the server's send."""
        self._send = send
        self._here = here
        self._holds = path in TURNS
        self._anthropic = path.startswith("/v1/messages")
        self._path = path
        self._client_id = client_id
        self._start: Message | None = None
        self._held: list[bytes] = []
        self._streams = False
        self._started = False
        self._ended = False

    async def send(self, message: Message) -> None:
        """Pass a message of the app on, later or changed."""
        if self._ended:
            return
        if self._started and self._here.problem is None and not self._here.summaries:
            # In the middle of an answer nothing is changed.
            self._ended = not message.get("more_body", False)
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            self._start = message
            kind = _content_type(message)
            self._streams = kind.startswith("text/event-stream")
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        await self._body(message.get("body", b""), more=message.get("more_body", False))

    async def finish(self) -> None:
        """End a response that the app has left open."""
        if self._ended:
            return
        problem = self._here.problem or Problem(int(HTTPStatus.INTERNAL_SERVER_ERROR), "no answer")
        if not self._started:
            await self._replace(problem)
        else:
            await self._pass(self._broken(problem) if self._streams else b"", more=False)

    async def _body(self, body: bytes, *, more: bool) -> None:
        assert self._start is not None
        if self._started:
            if self._streams and self._here.problem is not None:
                # vLLM's own words for it differ from API to API, and some repeat what they could not read.
                await self._pass(self._broken(self._here.problem), more=False)
                return
            await self._pass(self._completed(body), more=more)
            return
        if self._holds and self._here.problem is not None:
            await self._replace(self._here.problem)
            return
        self._held.append(body)
        refused = self._start["status"] >= HTTPStatus.BAD_REQUEST
        if more and (refused or (self._holds and not self._here.answered)):
            return
        content = b"".join(self._held)
        if refused and _content_type(self._start).startswith("application/json"):
            await self._replace(_retold(self._start["status"], content))
            return
        await self._open(self._start["status"], self._start.get("headers", ()))
        await self._pass(self._completed(content), more=more)

    def _broken(self, problem: Problem) -> bytes:
        if self._path == "/v1/responses":
            return sse.named_error(problem.event())
        if self._anthropic:
            return sse.named_error(problem.body(anthropic=True))
        return sse.error(problem.body())

    def _completed(self, body: bytes) -> bytes:
        if not (self._streams and self._here.summaries):
            return body
        return sse.complete(body, self._here.report, lambda: self._here.reused_tokens)

    async def _open(self, status: int, headers: Any) -> None:
        self._started = True
        own = _pairs(self._own_headers())
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def _pass(self, body: bytes, *, more: bool) -> None:
        self._ended = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _replace(self, problem: Problem) -> None:
        self._started = self._ended = True
        await _refuse(
            self._send, problem, anthropic=self._anthropic, here=self._here, extra=self._own_headers()
        )

    def _own_headers(self) -> dict[str, str]:
        """Return the headers that tell which conversation was meant and what was reused.

        Of a stream only the former is known here; the latter comes with its last event.
        """
        here = self._here
        given = self._client_id
        usable = given is not None and len(given) <= 128 and given.isascii() and given.isprintable()
        headers = {"x-request-id": given if usable and given else here.request_id}
        if not self._holds:
            return headers
        headers |= {"x-kvloop-identity": here.identity.source, "x-kvloop-request-id": here.request_id}
        if here.summaries:
            report = here.report()
            headers |= {
                "x-kvloop-verdict": report["verdict"],
                "x-kvloop-reuse-reason": report["reason"],
                "x-kvloop-reused-tokens": str(report["reused_tokens"]),
            }
        return headers


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


def _content_type(start: Message) -> str:
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-type":
            text: str = value.decode("latin-1")
            return text
    return ""


def _retold(status: int, content: bytes) -> Problem:
    try:
        return problems.from_body(status, json.loads(content))
    except ValueError:
        return problems.from_body(status, None)


def _pairs(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def _refuse(
    send: Send,
    problem: Problem,
    *,
    anthropic: bool,
    here: Exchange | None = None,
    extra: dict[str, str] | None = None,
) -> None:
    headers = problem.headers() | (extra or {})
    if here is not None:
        headers.setdefault("x-request-id", here.request_id)
    await _answer(send, problem.status, problem.body(anthropic=anthropic), headers)


async def _answer(send: Send, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    content = json.dumps(body).encode()
    own = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    await send({"type": "http.response.start", "status": int(status), "headers": _pairs(own)})
    await send({"type": "http.response.body", "body": content, "more_body": False})
