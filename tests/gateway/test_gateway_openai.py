"""OpenAI's Python SDK against the gateway."""

import json
from collections.abc import Iterator

import openai
import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter, fail

from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import turn_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-1", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there.", readback=20))
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2", messages=HI, temperature=0, max_tokens=7, extra_body={"conversation_id": "c-1"}
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 20
    assert answer.usage.completion_tokens == len(router.encode("Hello there."))
    headers = raw.headers
    assert headers["x-kvloop-identity"] == "conversation_id"
    assert (headers["x-kvloop-verdict"], headers["x-kvloop-reused-tokens"]) == ("readback", "20")

    (turn,) = router.turns
    request = turn.request
    assert request.conversation_id == "c-1"
    assert request.retention.hold
    assert request.retention.hold_on_cancel
    assert request.model == "smollm2"
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 7)
    assert turn.metadata["authorization"] == "Bearer key-1"
    assert 50 < turn.time_left_s <= 60.5  # gRPC rounds deadlines up on the wire
    assert router.prompt().endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_chat_streaming(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there, friend.", readback=12))
    stream = client.chat.completions.create(
        model="smollm2", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there, friend."
    assert len(chunks) > 4
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 12
    told = chunks[-1].model_extra
    assert told is not None
    assert told["kvloop"]["verdict"] == "readback"
    assert told["kvloop"]["identity"] == "none"
    assert router.turns[0].request.conversation_id == ""
    # Held all the same: the next turn is found by its beginning.
    assert router.turns[0].request.retention.hold


def test_two_of_one_prompt_fork(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts += [router.say("Good day.", readback=3), router.say("Good night.", readback=4)]
    answer = client.chat.completions.create(
        model="smollm2", messages=HI, n=2, seed=10, extra_body={"conversation_id": "c"}
    )
    assert sorted(str(choice.message.content) for choice in answer.choices) == ["Good day.", "Good night."]
    assert [choice.index for choice in answer.choices] == [0, 1]
    requests = {turn.request.conversation_id: turn.request for turn in router.turns}
    first = requests.pop("c")
    (second,) = requests.values()
    assert second.parent_conversation_id == "c"
    assert not second.retention.hold
    assert first.retention.hold
    assert {first.sampling.seed, second.sampling.seed} == {10, 11}
    assert first.request_id != second.request_id
    assert not first.sampling.HasField("n")


def test_two_of_one_prompt_streaming(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts += [router.say("Good day."), router.say("Good night.")]
    texts = {0: "", 1: ""}
    ends = []
    for chunk in client.chat.completions.create(model="smollm2", messages=HI, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert sorted(texts.values()) == ["Good day.", "Good night."]
    assert ends == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client: openai.OpenAI, router: FakeRouter, stream: bool) -> None:
    router.scripts.append(router.say(" upon a time", finish=turn_pb2.FINISH_REASON_LENGTH))
    answer = client.completions.create(model="smollm2", prompt="Once", max_tokens=3, stream=stream)
    if stream:
        assert isinstance(answer, openai.Stream)
        parts = [chunk.choices[0] for chunk in answer]
        text, finish = "".join(part.text for part in parts), parts[-1].finish_reason
    else:
        text, finish = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, finish) == (" upon a time", "length")
    assert router.prompt() == "Once"


def test_prompts_beside_each_other(client: openai.OpenAI, router: FakeRouter) -> None:
    answer = client.completions.create(
        model="smollm2", prompt=["One", "Two"], extra_body={"conversation_id": "c"}
    )
    assert len(answer.choices) == 2
    assert len({turn.request.conversation_id for turn in router.turns}) == 2
    assert {router.prompt(0), router.prompt(1)} == {"One", "Two"}


def test_prompts_as_ids(client: openai.OpenAI, router: FakeRouter) -> None:
    client.completions.create(model="smollm2", prompt=router.encode("As ids."))
    assert router.prompt() == "As ids."


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, router: FakeRouter, stream: bool) -> None:
    router.scripts.append(router.say("Fine, thanks.", readback=9))
    if stream:
        events = list(client.responses.create(model="smollm2", input="How are you?", stream=True))
        assert events[0].type == "response.created"
        last = events[-1]
        assert last.type == "response.completed"
        answer = last.response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "Fine, thanks."
    else:
        answer = client.responses.create(model="smollm2", input="How are you?")
    assert answer.output_text == "Fine, thanks."
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 9


def test_responses_take_sessions(client: openai.OpenAI, router: FakeRouter) -> None:
    client.responses.create(model="smollm2", input="Hi", extra_headers={"session-id": "codex-1"})
    assert router.turns[0].request.conversation_id == "codex-1"


def test_stored_responses_are_refused(client: openai.OpenAI, router: FakeRouter) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="smollm2", input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    assert "send the whole conversation" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    assert not router.turns


@pytest.mark.parametrize("stream", [False, True])
def test_tools_by_choice_of_the_model(client: openai.OpenAI, router: FakeRouter, stream: bool) -> None:
    router.scripts.append(router.say(CALL))
    answer = client.chat.completions.create(model="smollm2", messages=HI, tools=[WEATHER], stream=stream)
    if stream:
        assert isinstance(answer, openai.Stream)
        name, arguments, finish = "", "", None
        for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = chunk.choices[0].finish_reason or finish
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        finish = answer.choices[0].finish_reason
    assert (name, json.loads(arguments), finish) == ("weather", {"city": "Bonn"}, "tool_calls")


def test_tools_required(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say(CALL))
    answer = client.chat.completions.create(
        model="smollm2", messages=HI, tools=[WEATHER], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Bonn"}
    constraint = router.turns[0].request.sampling.structured_outputs
    assert constraint.WhichOneof("constraint") in ("json_schema", "structural_tag")


def test_a_tool_by_name(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say(CALL))
    answer = client.chat.completions.create(
        model="smollm2",
        messages=HI,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Bonn"}
    assert router.turns[0].request.sampling.HasField("structured_outputs")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, router: FakeRouter, stream: bool) -> None:
    router.scripts.append(router.say("Hello there", logprobs=3))
    answer = client.chat.completions.create(
        model="smollm2", messages=HI, logprobs=True, top_logprobs=3, stream=stream
    )
    if stream:
        assert isinstance(answer, openai.Stream)
        entries = [
            entry
            for chunk in answer
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content or ()
        ]
    else:
        entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "Hello there"
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
    assert entries[0].logprob == -0.25
    assert router.turns[0].request.sampling.logprobs == 3


def test_prompt_logprobs_of_completions(client: openai.OpenAI, router: FakeRouter) -> None:
    ids = router.encode("One two")
    positions = [turn_pb2.PositionLogprobs()]
    for token in ids[1:]:
        one = turn_pb2.TokenLogprob(token_id=token, logprob=-1.5, rank=1, decoded_token="x")
        positions.append(turn_pb2.PositionLogprobs(candidates=[one]))
    for stream in (False, True):
        router.scripts.append(router.say(" three", logprobs=1, prompt_logprobs=positions))
        answer = client.completions.create(
            model="smollm2", prompt="One two", echo=True, logprobs=1, max_tokens=1, stream=stream
        )
        choice = next(iter(answer)).choices[0] if isinstance(answer, openai.Stream) else answer.choices[0]
        assert choice.text == "One two three"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *[-1.5] * (len(ids) - 1), -0.25]
        if isinstance(answer, openai.Stream):
            answer.close()


def test_json_schema(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    client.chat.completions.create(
        model="smollm2",
        messages=HI,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    sent = router.turns[0].request.sampling.structured_outputs
    assert json.loads(sent.json_schema) == schema


def test_stop_strings(client: openai.OpenAI, router: FakeRouter) -> None:
    router.scripts.append(router.say("One. ", ids=router.encode("One. END"), stop_reason="END"))
    answer = client.chat.completions.create(model="smollm2", messages=HI, stop=["END", "12"])
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("One. ", "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == "END"
    assert list(router.turns[0].request.sampling.stop) == ["END", "12"]

    router.scripts.append(router.say("One", stop_reason="12"))
    again = client.chat.completions.create(model="smollm2", messages=HI, stop=["END", "12"])
    assert again.choices[0].model_extra is not None
    assert again.choices[0].model_extra["stop_reason"] == "12"
    router.scripts.append(router.say("One", stop_reason="12"))
    third = client.chat.completions.create(model="smollm2", messages=HI)
    assert third.choices[0].model_extra is not None
    assert third.choices[0].model_extra["stop_reason"] == 12


def test_parameters_arrive_as_given(client: openai.OpenAI, router: FakeRouter) -> None:
    client.chat.completions.create(
        model="smollm2",
        messages=HI,
        top_p=0.5,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"5": 2},
        seed=7,
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "bad_words": ["no"],
            "skip_special_tokens": False,
            "vllm_xargs": {"session_id": "s", "flavour": "sweet"},
        },
    )
    sent = router.turns[0].request.sampling
    assert (sent.top_p, sent.presence_penalty, sent.frequency_penalty) == (0.5, 0.25, -0.25)
    assert (sent.top_k, sent.min_p, sent.repetition_penalty, sent.min_tokens) == (4, 0.125, 1.5, 2)
    assert (sent.seed, sent.ignore_eos, sent.skip_special_tokens) == (7, True, False)
    assert (list(sent.stop_token_ids), list(sent.bad_words), dict(sent.logit_bias)) == ([9], ["no"], {5: 2})
    assert json.loads(sent.extra_args_json) == {"flavour": "sweet"}
    # What the context leaves is the worker's to say.
    assert not sent.HasField("max_tokens")
    assert router.turns[0].request.conversation_id == "s"


def test_adapters(client: openai.OpenAI, router: FakeRouter) -> None:
    client.chat.completions.create(model="poet", messages=HI)
    assert (router.turns[0].request.model, router.turns[0].request.adapter) == ("smollm2", "poet")
    assert {model.id for model in client.models.list()} == {"smollm2", "poet"}


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_429_with_a_time_to_come_back(
    client: openai.OpenAI, router: FakeRouter, stream: bool
) -> None:
    router.scripts.append(fail(Failure(Reason.ERROR_REASON_OVERLOADED, "too many turns", retry_after_s=3)))
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="smollm2", messages=HI, stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["x-kvloop-reason"] == "overloaded"


def test_the_sdk_comes_back_by_itself(gateway: Gateway, router: FakeRouter) -> None:
    router.scripts.append(fail(Failure(Reason.ERROR_REASON_OVERLOADED, "too many turns", retry_after_s=0.1)))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=1) as client:
        answer = client.chat.completions.create(model="smollm2", messages=HI)
    assert answer.choices[0].message.content == "Hello there."
    assert len({turn.request.request_id for turn in router.turns}) == 2
