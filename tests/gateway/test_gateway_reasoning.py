"""What vLLM's serving code knows of a prompt's reasoning gets to the worker that constrains the answer."""

from typing import Any

import pytest
from gateway_client import PROMPT, Recorder, client_of, sampling

from kvloop.v1alpha1 import router_service_pb2

pytestmark = pytest.mark.vllm


async def asked(params: dict[str, Any], **told: Any) -> router_service_pb2.GenerateRequest:
    routers = Recorder()
    turn = client_of(routers).generate(PROMPT, sampling(**params), "r", **told)
    outputs = [output async for output in turn]
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
