"""What vLLM's serving code knows of a prompt's reasoning gets to the worker that constrains the answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.gateway.client import RouterEngineClient
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

pytestmark = pytest.mark.vllm

PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7]}


class Recorder:
    """Routers that answer nothing but the end."""

    def __init__(self) -> None:
        self.asked: list[router_service_pb2.GenerateRequest] = []

    async def generate(self, request: router_service_pb2.GenerateRequest, **_call: Any) -> Any:
        self.asked.append(request)
        yield router_service_pb2.GenerateResponse(
            summary=turn_pb2.Summary(finish_reason=turn_pb2.FINISH_REASON_STOP)
        )


async def asked(params: dict[str, Any], **told: Any) -> router_service_pb2.GenerateRequest:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    routers = Recorder()
    base = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=100)),
        renderer=None,
        input_processor=SimpleNamespace(process_inputs=lambda *_inputs: None),
    )
    settings = SimpleNamespace(model_name="m", client_priority=False, hold_on_cancel=True)
    metrics = SimpleNamespace(ended=lambda *_told: None, failed=lambda *_told: None)
    client = RouterEngineClient(base, routers, settings, None, metrics)  # type: ignore[arg-type]
    sampling = SamplingParams(**params, max_tokens=5, output_kind=RequestOutputKind.DELTA)
    outputs = [output async for output in client.generate(PROMPT, sampling, "r", **told)]
    assert outputs[-1].finished
    (request,) = routers.asked
    return request


def constrained() -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(regex="[ab]+")}


async def test_it_travels_with_a_constraint() -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    request = await asked(constrained(), reasoning_ended=False, reasoning_parser_kwargs=kwargs)
    got = request.sampling.structured_outputs
    assert got.HasField("reasoning_ended")
    assert not got.reasoning_ended
    assert got.chat_template_kwargs_json == '{"enable_thinking": false}'
    assert got.regex == "[ab]+"


async def test_what_is_not_known_is_not_told() -> None:
    got = (await asked(constrained())).sampling.structured_outputs
    assert not got.HasField("reasoning_ended")
    assert not got.chat_template_kwargs_json


async def test_without_a_constraint_no_engine_asks() -> None:
    request = await asked(
        {}, reasoning_ended=True, reasoning_parser_kwargs={"chat_template_kwargs": {"a": 1}}
    )
    assert not request.sampling.HasField("structured_outputs")


async def test_a_value_that_json_does_not_have_is_the_clients_fault() -> None:
    from vllm.exceptions import VLLMValidationError

    kwargs = {"chat_template_kwargs": {"budget": float("inf")}}
    with pytest.raises(VLLMValidationError) as caught:
        await asked(constrained(), reasoning_parser_kwargs=kwargs)
    assert caught.value.parameter == "chat_template_kwargs"
