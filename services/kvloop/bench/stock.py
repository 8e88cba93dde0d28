"""Stock vLLM as a target: one P and one D over HTTP, and what D answers is handed to P with the next turn.

That is what vLLM's own proxy for multi-turn conversations does. D holds every turn for the time it was
started with and lets go at the first read; nobody can ask for more or less.
"""

import time
from typing import Any

import httpx

from kvloop.bench.target import Outcome, Request, TargetFailed

FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
"""kv_transfer_params for P when there is nothing to read."""


class StockTarget:
    """A pair of engines, by their base URLs (without /v1). Answers are not streamed: no TTFT is told."""

    def __init__(
        self,
        prefill: str,
        decode: str,
        model: str,
        *,
        timeout_s: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare; timeout_s is each leg's, transport replaces the network in tests."""
        self._prefill = prefill.rstrip("/")
        self._decode = decode.rstrip("/")
        self._model = model
        self._client = httpx.AsyncClient(timeout=timeout_s, transport=transport)
        self._handles: dict[str, dict[str, Any]] = {}

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        """Forget the handle; D can't be told."""
        self._handles.pop(conversation_id, None)

    async def send(self, request: Request) -> Outcome:
        """Send one turn and wait for its end. Raises TargetFailed."""
        begun = time.perf_counter()
        handle = self._handles.pop(request.conversation_id, None)
        reading = {**handle, **FIRST_TURN} if handle else FIRST_TURN
        prefilled = await self._leg(self._prefill, request, 1, reading)
        decoded = await self._leg(self._decode, request, request.max_tokens, _handle(prefilled))
        if request.conversation_id:
            self._handles[request.conversation_id] = _handle(decoded)
        read = int((prefilled["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        ids = [int(token) for token in decoded["choices"][0]["token_ids"]]
        took_ms = (time.perf_counter() - begun) * 1e3
        return Outcome(
            token_ids=ids,
            ttft_ms=took_ms,
            latency_ms=took_ms,
            input_num_tokens=len(request.prompt),
            output_num_tokens=len(ids),
            verdict="READBACK" if read else "RECOMPUTE",
            # P has no prefix cache: what it did not compute came from D.
            tokens={"p_local": 0, "readback": read, "d_local": 0, "computed": len(request.prompt) - read},
        )

    async def _leg(self, url: str, request: Request, max_tokens: int, params: dict[str, Any]) -> Any:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": request.exact,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        try:
            response = await self._client.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise TargetFailed(f"{url}: {type(error).__name__}") from None
        if response.status_code != httpx.codes.OK:
            raise TargetFailed(f"{url} answered {response.status_code}")
        return response.json()


def _handle(answer: Any) -> dict[str, Any]:
    handle = answer.get("kv_transfer_params")
    if not isinstance(handle, dict):
        raise TargetFailed("an engine answered without kv_transfer_params")
    return handle
