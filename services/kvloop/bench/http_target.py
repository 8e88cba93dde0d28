"""Any OpenAI-compatible server as a target: /v1/completions with token ids as prompt, streamed.

Token ids of answers come back where the server knows vLLM's `return_token_ids`; elsewhere answers are encoded
again from their text, which need not give the ids that the server holds: such outcomes say so. The
conversation is named in the body, as vLLM's multi-turn benchmark does, and in the
header X-Session-ID.

kvloop's gateway is told as well what a conversation was forked from, and in a header that nothing may be
reused; other servers pass over both. A server that refuses what OpenAI does not have is asked plainly.
"""

import json
import time
from typing import Any

import httpx

from kvloop.bench.target import Outcome, Request, TargetFailed
from kvloop.bench.workload.model import Encoder
from kvloop.gateway.admission import REUSE_HEADER
from kvloop.gateway.identity import PARENT

_MAX_SAID = 200
"""Characters of a server's own words about a failure."""


class HttpTarget:
    """One server, by its base URL (without /v1)."""

    def __init__(
        self,
        url: str,
        model: str,
        encoder: Encoder,
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        salted: bool = False,
        plain: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare. salted: whether requests' cache salts are sent, which vLLM alone knows.

        plain: whether bodies have only fields that OpenAI has; answers may then end before max_tokens.
        transport replaces the network in tests.
        """
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = url.rstrip("/")
        self._model = model
        self._encoder = encoder
        self._salted = salted
        self._plain = plain
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s, transport=transport)

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        """Do nothing: these servers have no such call."""

    async def send(self, request: Request) -> Outcome:
        """Send one turn and wait for its end. Raises TargetFailed."""
        answer = _Answer()
        begun = time.perf_counter()
        try:
            async with self._client.stream(
                "POST",
                f"{self._url}/v1/completions",
                json=self._body(request),
                headers=_headers(request),
            ) as response:
                if response.status_code != httpx.codes.OK:
                    said = _said(await response.aread())
                    raise TargetFailed(f"{self._url} answered {response.status_code}{said}")
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        answer.take(line.removeprefix("data:").strip(), time.perf_counter() - begun)
        except (httpx.HTTPError, ValueError) as error:
            raise TargetFailed(f"{self._url}: {type(error).__name__}: {error}") from None
        latency_s = time.perf_counter() - begun
        if answer.ttft_s is None or not answer.done:
            raise TargetFailed(f"{self._url} ended a turn without an answer")
        ids = answer.ids or self._encoder.encode("".join(answer.texts))
        asked = int(answer.usage.get("prompt_tokens", len(request.prompt)))
        return Outcome(
            token_ids=ids,
            ttft_ms=answer.ttft_s * 1e3,
            latency_ms=latency_s * 1e3,
            input_num_tokens=asked,
            output_num_tokens=int(answer.usage.get("completion_tokens", len(ids))),
            verdict=str(answer.told.get("verdict", "")).upper(),
            reason=str(answer.told.get("reason", "")).upper(),
            retokenized=not answer.ids,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            tokens=answer.sources(asked),
            held_tokens=int(answer.told.get("held_tokens", 0)),
        )

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if self._plain:
            return body
        body |= {
            "ignore_eos": request.exact,
            "return_token_ids": True,
            "conversation_id": request.conversation_id,
        }
        if request.parent_conversation_id:
            body[PARENT] = request.parent_conversation_id
        if self._salted:
            body["cache_salt"] = request.cache_salt
        return body


def _headers(request: Request) -> dict[str, str]:
    headers = {"x-session-id": request.conversation_id}
    return headers if request.reuse else headers | {REUSE_HEADER: "forbid"}


def _said(body: object) -> str:
    """Return what a server says of a failure, shortened and after a colon; empty when it says nothing."""
    content = body
    if isinstance(body, bytes):
        text = body.decode(errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = text
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    words = " ".join((content if isinstance(content, str) else json.dumps(content)).split())
    short = words if len(words) <= _MAX_SAID else f"{words[: _MAX_SAID - 3]}..."
    return f": {short}" if short else ""


class _Answer:
    """A streamed answer as it comes in."""

    def __init__(self) -> None:
        self.ttft_s: float | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.told: dict[str, Any] = {}
        """What a gateway of ours says about the turn's reuse."""
        self.done = False
        self.finish_reason = ""
        self.stop_reason = ""

    def sources(self, asked: int) -> dict[str, int]:
        """Return the prompt's tokens by source, of which a gateway of ours tells two; empty from others."""
        reused = self.told.get("reused_tokens")
        if not isinstance(reused, int):
            return {}
        return {"reused": reused, "computed": max(0, asked - reused)}

    def take(self, data: str, since_s: float) -> None:
        """Take one event's data. Raises ValueError for what is no JSON, TargetFailed for an error event."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise TargetFailed(f"the server ended a stream with an error{_said(event)}")
        self.usage = event.get("usage") or self.usage
        self.told = event.get("kvloop") or self.told
        for choice in event.get("choices") or ():
            text, ids = choice.get("text") or "", choice.get("token_ids") or ()
            if (text or ids) and self.ttft_s is None:
                self.ttft_s = since_s
            self.texts.append(text)
            self.ids.extend(ids)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = str(choice.get("stop_reason") or self.stop_reason)
