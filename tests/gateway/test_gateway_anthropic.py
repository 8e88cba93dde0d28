"""Anthropic's Python SDK against the gateway."""

import json
from collections.abc import Iterator

import anthropic
import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter, fail

from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import turn_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="key-2", max_retries=0) as made:
        yield made


def test_messages(client: anthropic.Anthropic, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there.", readback=11))
    answer = client.messages.create(
        model="smollm2",
        max_tokens=20,
        messages=HI,
        extra_headers={"x-claude-code-session-id": "cc-1"},
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "Hello there."
    assert answer.stop_reason == "end_turn"
    assert answer.usage.cache_read_input_tokens == 11
    (turn,) = router.turns
    assert answer.usage.input_tokens == len(turn.request.prompt_token_ids) // 4 - 11
    assert turn.request.conversation_id == "cc-1"
    # Anthropic's key travels as the router expects it.
    assert turn.metadata["authorization"] == "Bearer key-2"


def test_messages_streaming(client: anthropic.Anthropic, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there.", readback=11, finish=turn_pb2.FINISH_REASON_LENGTH))
    with client.messages.stream(model="smollm2", max_tokens=20, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello there."
    assert final.stop_reason == "max_tokens"
    assert final.usage.cache_read_input_tokens == 11
    assert final.usage.input_tokens == len(router.turns[0].request.prompt_token_ids) // 4 - 11


def test_tools(client: anthropic.Anthropic, router: FakeRouter) -> None:
    router.scripts.append(router.say(CALL))
    answer = client.messages.create(model="smollm2", max_tokens=50, messages=HI, tools=[WEATHER])
    used = [block for block in answer.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in used] == [("weather", {"city": "Bonn"})]
    assert answer.stop_reason == "tool_use"


def test_tokens_are_counted_without_a_turn(client: anthropic.Anthropic, router: FakeRouter) -> None:
    counted = client.messages.count_tokens(model="smollm2", messages=HI)
    client.messages.create(model="smollm2", max_tokens=5, messages=HI)
    assert len(router.turns) == 1
    assert counted.input_tokens == len(router.turns[0].request.prompt_token_ids) // 4


@pytest.mark.parametrize(
    ("reason", "error", "kind"),
    [
        (Reason.ERROR_REASON_OVERLOADED, anthropic.RateLimitError, "rate_limit_error"),
        (Reason.ERROR_REASON_UNAUTHENTICATED, anthropic.AuthenticationError, "authentication_error"),
        (Reason.ERROR_REASON_PROMPT_TOO_LONG, anthropic.BadRequestError, "invalid_request_error"),
        (Reason.ERROR_REASON_NO_WORKER, anthropic.InternalServerError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_anthropics_form(
    client: anthropic.Anthropic,
    router: FakeRouter,
    reason: "Reason.ValueType",
    error: type[anthropic.APIStatusError],
    kind: str,
    stream: bool,
) -> None:
    router.scripts.append(fail(Failure(reason, "no")))
    with pytest.raises(error) as caught:
        client.messages.create(model="smollm2", max_tokens=5, messages=HI, stream=stream)
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_bad_input_has_anthropics_form(gateway: Gateway, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="smollm2", max_tokens=5, messages=[{"role": "judge", "content": "x"}])  # type: ignore[typeddict-item]
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["error"]["type"] == "invalid_request_error"
    assert "messages.0.role" in body["error"]["message"]
    assert json.dumps(body).count("judge") == 0
