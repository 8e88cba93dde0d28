"""A gateway that parses reasoning, and calls written as Python: what each API shows, and what no log does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter

from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HI = [{"role": "user", "content": "hi"}]
SAID = "<think>They greet me.</think>Hello there."
THOUGHT, ANSWER = "They greet me.", "Hello there."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def thinking(
    _router: FakeRouter, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    started = Gateway(
        {
            "listen": "127.0.0.1:0",
            "chat_listen": "127.0.0.1:0",
            "router": f"127.0.0.1:{_router.port}",
            "model": str(model_dir),
            "served_model_name": "smollm2",
            # It goes by text alone; SmolLM2 has no tokens of thinking.
            "reasoning_parser": "olmo3",
            "tool_call_parser": "pythonic",
        },
        tmp_path_factory.mktemp("thinking"),
        VLLM_LOGGING_LEVEL="INFO",
    )
    yield started
    assert started.stop() == 0


@pytest.fixture
def client(thinking: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="k", max_retries=0) as made:
        yield made


def told(events: list[Any], name: str) -> str:
    return "".join(getattr(event.choices[0].delta, name, None) or "" for event in events if event.choices)


def test_chat_completions(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts += [router.say(SAID), router.say(SAID)]
    message = client.chat.completions.create(model="smollm2", messages=HI).choices[0].message
    assert (getattr(message, "reasoning", None), message.content) == (THOUGHT, ANSWER)
    events = list(client.chat.completions.create(model="smollm2", messages=HI, stream=True))
    assert (told(events, "reasoning"), told(events, "content")) == (THOUGHT, ANSWER)


def test_messages(thinking: Gateway, router: FakeRouter) -> None:
    router.scripts += [router.say(SAID), router.say(SAID)]
    with anthropic.Anthropic(base_url=thinking.url, api_key="k", max_retries=0) as client:
        whole = client.messages.create(model="smollm2", max_tokens=50, messages=HI)
        with client.messages.stream(model="smollm2", max_tokens=50, messages=HI) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == THOUGHT
        assert message.content[1].text == ANSWER


def test_responses(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts += [router.say(SAID), router.say(SAID)]
    whole = client.responses.create(model="smollm2", input="hi")
    events = list(client.responses.create(model="smollm2", input="hi", stream=True))
    assert events[-1].type == "response.completed"
    for answer in (whole, events[-1].response):
        thought = next(item for item in answer.output if item.type == "reasoning")
        assert "".join(part.text for part in thought.content) == THOUGHT
        assert answer.output_text == ANSWER
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT


def test_chat_service(thinking: Gateway, router: FakeRouter) -> None:
    router.scripts.append(router.say(SAID))
    request = pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")])
    with grpc.insecure_channel(thinking.chat) as channel:
        answers = list(chat_service_pb2_grpc.ChatServiceStub(channel).Chat(request, timeout=60))
    assert "".join(answer.delta.reasoning for answer in answers) == THOUGHT
    assert "".join(answer.delta.content for answer in answers) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_does_not_parse_leaves_nothing_in_the_log(
    thinking: Gateway, router: FakeRouter, stream: bool
) -> None:
    for call in ('[weather(city="Xyzzy", 5)]', "[weather(city=Xyzzy)]", '[weather(city="Xyzzy\\xg")]'):
        router.scripts.append(router.say(f"<think>Hm.</think>{call}"))
        body = {"model": "smollm2", "messages": HI, "tools": TOOLS, "stream": stream}
        answer = httpx.post(f"{thinking.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        if not stream:
            assert json.loads(answer.text)["choices"][0]["message"]["content"] == call
    assert "Xyzzy" not in thinking.log.read_text()
