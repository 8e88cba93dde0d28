"""Any OpenAI-compatible server as a target: /v1/completions with token ids as prompt, streamed.

Token ids of answers come back where the server knows vLLM's `return_token_ids`; elsewhere answers are encoded
again from their text, which need not give the ids that the server holds: such outcomes say so. The
conversation is named in the body, as vLLM's multi-turn benchmark does, and in the
header X-Session-ID.
"""

import json
import time
from typing import Any

import httpx

from kvloop.bench.target import Outcome, Request, TargetFailed
from kvloop.bench.workload.model import Encoder


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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare. salted: whether requests' cache salts are sent, which vLLM alone knows.

        transport replaces the network in tests.
        """
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._url = url.rstrip("/")
        self._model = model
        self._encoder = encoder
        self._salted = salted
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
                headers={"x-session-id": request.conversation_id},
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise TargetFailed(f"{self._url} answered {response.status_code}")
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        answer.take(line.removeprefix("data:").strip(), time.perf_counter() - begun)
        except (httpx.HTTPError, ValueError) as error:
            raise TargetFailed(f"{self._url}: {type(error).__name__}: {error}") from None
        latency_s = time.perf_counter() - begun
        if answer.ttft_s is None or not answer.done:
            raise TargetFailed(f"{self._url} ended a turn without an answer")
        ids = answer.ids or self._encoder.encode("".join(answer.texts))
        return Outcome(
            token_ids=ids,
            ttft_ms=answer.ttft_s * 1e3,
            latency_ms=latency_s * 1e3,
            input_num_tokens=int(answer.usage.get("prompt_tokens", len(request.prompt))),
            output_num_tokens=int(answer.usage.get("completion_tokens", len(ids))),
            verdict=str(answer.told.get("verdict", "")).upper(),
            reason=str(answer.told.get("reason", "")).upper(),
            retokenized=not answer.ids,
        )

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": request.exact,
            "return_token_ids": True,
            "conversation_id": request.conversation_id,
        }
        if self._salted:
            body["cache_salt"] = request.cache_salt
        if request.stop:
            body["stop"] = list(request.stop)
        return body


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

    def take(self, data: str, since_s: float) -> None:
        """Take one event's data. Raises ValueError for what is no JSON, TargetFailed for an error event."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise TargetFailed("the server ended a stream with an error")
        self.usage = event.get("usage") or self.usage
        self.told = event.get("kvloop") or self.told
        for choice in event.get("choices") or ():
            text, ids = choice.get("text") or "", choice.get("token_ids") or ()
            if (text or ids) and self.ttft_s is None:
                self.ttft_s = since_s
            self.texts.append(text)
            self.ids.extend(ids)
