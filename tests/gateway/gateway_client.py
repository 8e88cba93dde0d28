"""The gateway's engine client over routers that answer nothing but the end, in this process."""

from types import SimpleNamespace
from typing import Any

from kvloop.gateway.client import RouterEngineClient
from kvloop.runtime import tokens
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7]}
ROOM = 1_000_000
VOCABULARY = 50_000


class Recorder:
    """Routers; each turn says so many tokens before its end."""

    def __init__(self, said: int = 0) -> None:
        self.asked: list[router_service_pb2.GenerateRequest] = []
        self.open = 0
        """Turns that have not ended."""
        self._said = said

    async def generate(self, request: router_service_pb2.GenerateRequest, **_call: Any) -> Any:
        self.asked.append(request)
        self.open += 1
        try:
            for _ in range(self._said):
                chunk = turn_pb2.Chunk(token_ids=tokens.pack([9]), text="x")
                yield router_service_pb2.GenerateResponse(chunk=chunk)
            yield router_service_pb2.GenerateResponse(
                summary=turn_pb2.Summary(finish_reason=turn_pb2.FINISH_REASON_STOP)
            )
        finally:
            self.open -= 1


class Remembering:
    """A history that only counts what it is told."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.remembered: list[Any] = []

    def accept(self, tenant: str) -> None:
        self.accepted.append(tenant)

    def remember(self, _tenant: str, rendering: Any, *_told: Any, **_more: Any) -> None:
        self.remembered.append(rendering)


def client_of(routers: Recorder, history: Remembering | None = None) -> RouterEngineClient:
    model_config = SimpleNamespace(max_model_len=ROOM, get_vocab_size=lambda: VOCABULARY)
    base = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config),
        renderer=None,
        input_processor=SimpleNamespace(process_inputs=lambda *_inputs: None),
    )
    settings = SimpleNamespace(model_name="m", client_priority=False, hold_on_cancel=True, hold_unnamed=True)
    metrics = SimpleNamespace(ended=lambda *_told: None, failed=lambda *_told: None)
    kept = history or Remembering()
    return RouterEngineClient(base, routers, settings, kept, metrics)  # type: ignore[arg-type]


def sampling(**params: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(**{"max_tokens": 5, "output_kind": RequestOutputKind.DELTA, **params})
