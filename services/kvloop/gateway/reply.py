"""One response on its way out: held back until it has its status, and completed at its end.

vLLM's serving code decides on HTTP 200 before a streamed turn has begun. Nothing is sent until the turn has
given its first output or failed, so that a failure has its status, in the form of the API that was called.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from kvloop.gateway import problems, sse
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.problems import Problem
from kvloop.runtime import logs

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

TURNS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

_log = logs.get("gateway")


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
        if self._started and self._here.problem is None and not self._here.summaries and not _failed(message):
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
        if self._streams and self._here.problem is None and sse.is_error(body):
            # Raised by vLLM's serving code itself, over what was generated; the text is the exception's.
            _log.error("unexpected_failure", path=self._path)
            self._here.problem = Problem(int(HTTPStatus.INTERNAL_SERVER_ERROR), problems.UNEXPECTED)
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
        await refuse(
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


def _failed(message: Message) -> bool:
    return sse.is_error(message.get("body", b""))


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


async def refuse(
    send: Send,
    problem: Problem,
    *,
    anthropic: bool,
    here: Exchange | None = None,
    extra: dict[str, str] | None = None,
) -> None:
    """Send a problem, in the form of the API that was called."""
    headers = problem.headers() | (extra or {})
    if here is not None:
        headers.setdefault("x-request-id", here.request_id)
    await answer(send, problem.status, problem.body(anthropic=anthropic), headers)


async def answer(send: Send, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Send a whole answer."""
    content = json.dumps(body).encode()
    own = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    await send({"type": "http.response.start", "status": int(status), "headers": _pairs(own)})
    await send({"type": "http.response.body", "body": content, "more_body": False})
