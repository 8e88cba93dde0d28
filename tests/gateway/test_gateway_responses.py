"""Tools through OpenAI's Responses API: called, answered, and called upon again."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Bonn?"}]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(
    client: openai.OpenAI, router: FakeRouter, stream: bool
) -> None:
    router.scripts += [router.say(CALL), router.say("It rains.")]
    if stream:
        events = list(client.responses.create(model="smollm2", input=ASKED, tools=[WEATHER], stream=True))
        answer: Any = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == {"city": "Bonn"}
    else:
        answer = client.responses.create(model="smollm2", input=ASKED, tools=[WEATHER])
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain, 12 degrees"}
    history = [*ASKED, call.model_dump(exclude_none=True), result]
    last = client.responses.create(model="smollm2", input=history, tools=[WEATHER])
    assert last.output_text == "It rains."
    assert "rain, 12 degrees" in router.prompt()
