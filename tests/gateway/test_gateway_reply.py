"""Answers on their way out: what an exception says, over prompts and answers, stays inside."""

from typing import Any

import pytest

from kvloop.gateway.exchange import Exchange
from kvloop.gateway.reply import Reply

SECRET = b"Xyzzy"
FIRST = b'data: {"id":"x","choices":[]}\n\n'
BROKEN = b'data: {"error": {"message": "' + SECRET + b'", "code": 500}}\n\n'
NAMED = b'event: error\ndata: {"type":"error","error":{"message":"' + SECRET + b'"}}\n\n'


class Sent:
    """What the server is given."""

    def __init__(self, path: str) -> None:
        self.status = 0
        self.body = b""
        self.ended = False
        self.here = Exchange()
        self.reply = Reply(self._take, self.here, path, None)

    async def _take(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self.ended = message["type"] == "http.response.body" and not message["more_body"]

    async def say(self, kind: bytes, status: int, *bodies: bytes) -> None:
        headers = [(b"content-type", kind)]
        await self.reply.send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await self.reply.send({"type": "http.response.body", "body": body, "more_body": True})
        await self.reply.send({"type": "http.response.body", "body": b"", "more_body": False})
        await self.reply.finish()


@pytest.mark.parametrize(("path", "error"), [("/v1/chat/completions", BROKEN), ("/v1/messages", NAMED)])
@pytest.mark.parametrize("begun", [False, True])
async def test_an_exception_in_a_stream_is_not_quoted(path: str, error: bytes, begun: bool) -> None:
    sent = Sent(path)
    sent.here.answered = begun
    await sent.say(b"text/event-stream", 200, *([FIRST] if begun else []), error, b"data: [DONE]\n\n")
    assert sent.ended
    assert SECRET not in sent.body
    assert b"unexpected failure" in sent.body
    assert sent.status == (200 if begun else 500)
    assert sent.body.startswith(FIRST) == begun
    assert sent.here.problem is not None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_exception_in_an_answer_is_not_quoted(path: str) -> None:
    sent = Sent(path)
    await sent.say(b"application/json", 500, b'{"error": {"message": "' + SECRET + b'"}}')
    assert (sent.status, sent.ended) == (500, True)
    assert SECRET not in sent.body
    assert b"unexpected failure" in sent.body


async def test_what_a_client_did_wrong_is_told() -> None:
    sent = Sent("/v1/chat/completions")
    await sent.say(b"application/json", 400, b'{"error": {"message": "too hot", "param": "temperature"}}')
    assert sent.status == 400
    assert b"too hot" in sent.body
