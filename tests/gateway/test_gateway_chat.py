"""ChatService: typed messages, tools and deltas over gRPC, by the serving code of the HTTP door."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from gateway_kit import Gateway, wait_until
from gateway_router import FakeRouter, Turn, fail
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc, router_service_pb2, sampling_pb2, turn_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TIMEOUT_S = 30
WEATHER = pb.Tool(
    name="weather",
    description="Tells the weather.",
    parameters_json=json.dumps(
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    ),
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Iterator[chat_service_pb2_grpc.ChatServiceStub]:
    with grpc.insecure_channel(gateway.chat) as channel:
        yield chat_service_pb2_grpc.ChatServiceStub(channel)


def user(text: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=text)


def request(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**{"messages": [user("hi")], **fields})


def ask(
    stub: chat_service_pb2_grpc.ChatServiceStub, asked: pb.ChatRequest, **call: Any
) -> tuple[list[pb.ChatDelta], pb.ChatSummary]:
    answers = list(stub.Chat(asked, **{"timeout": TIMEOUT_S, **call}))
    kinds = [answer.WhichOneof("event") for answer in answers]
    assert kinds[-1] == "summary"
    assert "summary" not in kinds[:-1]
    return [answer.delta for answer in answers[:-1]], answers[-1].summary


def refusal(stub: chat_service_pb2_grpc.ChatServiceStub, asked: pb.ChatRequest, **call: Any) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Chat(asked, **{"timeout": TIMEOUT_S, **call}))
    return from_rpc_error(caught.value, Reason.ERROR_REASON_UNSPECIFIED)


def test_ends_of_lines_that_json_does_not_have(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter
) -> None:
    said = "a\u2028b\u0085c\u2029d\x0be\r\nf"
    router.scripts.append(router.say(said))
    deltas, _ = ask(stub, request())
    assert "".join(delta.content for delta in deltas) == said


def test_a_chat(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there, friend.", readback=12))
    asked = request(
        conversation_id="c-1",
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=7, seed=3, stop=["END"]),
        reuse_policy=router_service_pb2.REUSE_POLICY_ALLOW,
    )
    metadata = (("authorization", "Bearer key-1"), ("traceparent", TRACE), ("tracestate", "a=b"))
    deltas, summary = ask(stub, asked, metadata=metadata)
    assert len(deltas) > 3
    assert "".join(delta.content for delta in deltas) == "Hello there, friend."
    assert summary.finish_reason == pb.CHAT_FINISH_REASON_STOP
    assert summary.identity == "conversation_id"
    assert summary.turn.reuse.verdict == turn_pb2.VERDICT_READBACK
    assert summary.turn.reuse.tokens.readback == 12
    assert summary.turn.output_tokens == len(router.encode("Hello there, friend."))

    (turn,) = router.turns
    got = turn.request
    assert got.conversation_id == "c-1"
    assert got.retention.hold
    assert got.retention.hold_on_cancel
    assert got.reuse_policy == router_service_pb2.REUSE_POLICY_ALLOW
    assert (got.sampling.temperature, got.sampling.max_tokens, got.sampling.seed) == (0, 7, 3)
    assert list(got.sampling.stop) == ["END"]
    assert turn.metadata["authorization"] == "Bearer key-1"
    assert (turn.metadata["traceparent"], turn.metadata["tracestate"]) == (TRACE, "a=b")
    # gRPC rounds deadlines up on the wire.
    assert 0 < turn.time_left_s <= TIMEOUT_S + 1
    assert summary.turn.request_id == got.request_id
    assert router.prompt().endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_same_prompt_as_over_http(
    stub: chat_service_pb2_grpc.ChatServiceStub, gateway: Gateway, router: FakeRouter
) -> None:
    import httpx

    ask(
        stub,
        request(
            messages=[
                pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="Be brief."),
                user("weather?"),
                pb.ChatMessage(
                    role=pb.CHAT_ROLE_ASSISTANT,
                    tool_calls=[pb.ToolCall(id="t", name="weather", arguments_json='{"city": "Bonn"}')],
                ),
                pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="rain", tool_call_id="t"),
            ],
            tools=[WEATHER],
        ),
    )
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "t", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "t"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": WEATHER.name,
                    "description": WEATHER.description,
                    "parameters": json.loads(WEATHER.parameters_json),
                },
            }
        ],
    }
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body).status_code == 200
    first, second = (turn.request for turn in router.turns)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling == second.sampling


def test_tool_calls_come_parsed(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    router.scripts.append(router.say(CALL))
    deltas, summary = ask(stub, request(tools=[WEATHER]))
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert len([call.id for call in calls if call.id]) == 1
    assert {call.index for call in calls} == {0}
    assert json.loads("".join(call.arguments_delta for call in calls)) == {"city": "Bonn"}
    assert not "".join(delta.content for delta in deltas).strip()
    assert summary.finish_reason == pb.CHAT_FINISH_REASON_TOOL_CALLS


def test_a_named_tool_constrains_the_answer(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter
) -> None:
    router.scripts.append(router.say(CALL))
    deltas, _ = ask(stub, request(tools=[WEATHER], tool_choice=pb.ToolChoice(name="weather")))
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert json.loads("".join(call.arguments_delta for call in calls)) == {"city": "Bonn"}
    assert router.turns[0].request.sampling.HasField("structured_outputs")


def test_logprobs(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    router.scripts.append(router.say("Hello there.", logprobs=3))
    deltas, _ = ask(stub, request(sampling=sampling_pb2.SamplingParams(logprobs=2)))
    positions = [position for delta in deltas for position in delta.logprobs]
    assert "".join(position.chosen.text for position in positions) == "Hello there."
    assert b"".join(position.chosen.utf8 for position in positions) == b"Hello there."
    assert all(len(position.top) == 2 for position in positions)
    assert positions[0].chosen.logprob == -0.25


def test_structured_outputs_and_lists_travel(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter
) -> None:
    sampling = sampling_pb2.SamplingParams(
        structured_outputs=sampling_pb2.StructuredOutputs(regex="[ab]+"),
        stop_token_ids=[5, 6],
        logit_bias={7: 1.5},
        bad_words=["no"],
        repetition_detection=sampling_pb2.RepetitionDetection(
            max_pattern_size=4, min_pattern_size=2, min_count=3
        ),
    )
    ask(stub, request(sampling=sampling))
    got = router.turns[0].request.sampling
    assert got.structured_outputs.regex == "[ab]+"
    assert list(got.stop_token_ids) == [5, 6]
    assert dict(got.logit_bias) == {7: 1.5}
    assert list(got.bad_words) == ["no"]
    assert got.repetition_detection == sampling.repetition_detection


def test_identity_and_retention(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    retention = turn_pb2.Retention(hold_on_cancel=False)
    retention.ttl.FromSeconds(9)
    asked = request(parent_conversation_id="p", retention=retention, cache_salt="pepper")
    _, summary = ask(stub, asked, metadata=(("x-session-id", "s-1"),))
    assert summary.identity == "x-session-id"
    got = router.turns[0].request
    assert (got.conversation_id, got.parent_conversation_id) == ("s-1", "p")
    assert got.retention.hold
    assert not got.retention.hold_on_cancel
    assert got.retention.ttl.seconds == 9
    assert got.cache_salt == "pepper"
    _, summary = ask(stub, request(retention=retention))
    assert summary.identity == "none"
    unnamed = router.turns[1].request.retention
    assert unnamed.hold
    assert not unnamed.hold_on_cancel
    assert unnamed.ttl.seconds == 9
    ask(stub, request(reuse_policy=router_service_pb2.REUSE_POLICY_FORBID))
    assert not router.turns[2].request.retention.hold


ASSISTANT, USER = pb.CHAT_ROLE_ASSISTANT, pb.CHAT_ROLE_USER
NO_JSON = pb.ChatMessage(role=ASSISTANT, tool_calls=[pb.ToolCall(name="f")])
NOT_HIS = pb.ChatMessage(role=USER, tool_calls=[pb.ToolCall(name="f")])


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**fields)}


TOLD = sampling(structured_outputs=sampling_pb2.StructuredOutputs(regex="a", reasoning_ended=True))
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": []}, "messages"),
    ("no role", {"messages": [pb.ChatMessage(content="x")]}, "messages[0].role"),
    ("a user who calls tools", {"messages": [NOT_HIS]}, "messages[0].tool_calls"),
    ("arguments that are no JSON", {"messages": [NO_JSON]}, "messages[0].tool_calls[0].arguments_json"),
    ("a tool without a name", {"tools": [pb.Tool()]}, "tools[0].name"),
    ("no schema", {"tools": [pb.Tool(name="f", parameters_json="{")]}, "tools[0].parameters_json"),
    ("a tool nobody offers", {"tools": [WEATHER], "tool_choice": pb.ToolChoice(name="g")}, "tool_choice"),
    ("too hot", sampling(temperature=9), "sampling.temperature"),
    ("reasoning told", TOLD, "sampling.structured_outputs"),
    ("a prompt's logprobs", sampling(prompt_logprobs=1), "sampling.prompt_logprobs"),
    ("no text", sampling(detokenize=False), "sampling.detokenize"),
    ("an effort of nonsense", {"reasoning_effort": "some"}, "reasoning_effort"),
    ("kwargs that are no object", {"chat_template_kwargs_json": "[]"}, "chat_template_kwargs_json"),
    ("a long conversation", {"conversation_id": "x" * 300}, "conversation_id"),
    ("a long salt", {"cache_salt": "x" * 300}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter, fields: dict[str, Any], field: str
) -> None:
    failure = refusal(stub, request(**fields))
    assert failure.reason == Reason.ERROR_REASON_INVALID_FIELD
    assert failure.field == field
    assert not router.turns


def test_other_refusals(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    long = refusal(stub, request(messages=[user("word " * 3000)]))
    assert (long.reason, long.field) == (Reason.ERROR_REASON_PROMPT_TOO_LONG, "messages")
    assert refusal(stub, request(model="other")).reason == Reason.ERROR_REASON_MODEL_NOT_FOUND
    assert refusal(stub, request(), timeout=None).reason == Reason.ERROR_REASON_DEADLINE_REQUIRED
    two = refusal(stub, request(sampling=sampling_pb2.SamplingParams(n=2)))
    assert two.reason == Reason.ERROR_REASON_MULTIPLE_COMPLETIONS
    steering = sampling_pb2.SamplingParams(extra_args_json='{"kv_transfer_params": {}}')
    assert refusal(stub, request(sampling=steering)).reason == Reason.ERROR_REASON_TRANSFER_PARAMS_REFUSED
    assert not router.turns


@pytest.mark.parametrize("reason", [Reason.ERROR_REASON_OVERLOADED, Reason.ERROR_REASON_UNAUTHENTICATED])
def test_a_failure_of_the_router_is_the_chats(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter, reason: "Reason.ValueType"
) -> None:
    router.scripts.append(
        fail(Failure(reason, "told by the router", metadata={"limit": "1"}, retry_after_s=2))
    )
    failure = refusal(stub, request())
    assert failure.reason == reason
    assert failure.message == "told by the router"
    assert failure.metadata == {"limit": "1"}
    assert failure.retry_after_s == 2


def test_a_failure_later_ends_the_stream(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter
) -> None:
    def broken(asked: Any) -> Any:
        yield next(iter(router.say("Hello there.")(asked)))
        raise Failure(Reason.ERROR_REASON_WORKER_FAILED, "lost in the middle")

    router.scripts.append(broken)
    answers = stub.Chat(request(), timeout=TIMEOUT_S)
    assert next(answers).delta.content == "Hello"
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    failure = from_rpc_error(caught.value, Reason.ERROR_REASON_UNSPECIFIED)
    assert (failure.reason, failure.message) == (Reason.ERROR_REASON_WORKER_FAILED, "lost in the middle")


def test_a_client_that_leaves_cancels_its_turn(
    stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter
) -> None:
    begun, left = threading.Event(), threading.Event()

    def pause(turn: Turn) -> None:
        begun.set()
        left.wait(20)

    router.scripts.append(router.say("Hello there.", pause=pause))
    call = stub.Chat(request(conversation_id="c"), timeout=TIMEOUT_S)
    assert next(iter(call)).delta.content
    assert begun.wait(10)
    call.cancel()
    wait_until(router.turns[0].ended.is_set)
    left.set()
    assert router.turns[0].cancelled


def test_generated_ids_come_back(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    said = [*router.encode("Hel"), *router.encode("lo"), 2]
    router.scripts.append(router.say("Hello", ids=said))
    ask(stub, request(conversation_id="c"))
    history = [user("hi"), pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="Hello"), user("and?")]
    ask(stub, request(conversation_id="c", messages=history))
    first, second = (turn.request.prompt_token_ids for turn in router.turns)
    kept = b"".join(token.to_bytes(4, "little") for token in said)
    assert second.startswith(first + kept)


def test_health_and_reflection(gateway: Gateway) -> None:
    with grpc.insecure_channel(gateway.chat) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="kvloop.v1alpha1.ChatService")
        assert health.Check(asked, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING


def session_of(
    stub: chat_service_pb2_grpc.ChatServiceStub, *said: pb.ChatServiceSessionRequest, **call: Any
) -> list[pb.ChatServiceSessionResponse]:
    return list(stub.Session(iter(said), timeout=TIMEOUT_S, **call))


def opening(**fields: Any) -> pb.ChatServiceSessionRequest:
    return pb.ChatServiceSessionRequest(open=pb.ChatSessionOpen(**fields))


CLOSE = pb.ChatServiceSessionRequest(close=router_service_pb2.SessionClose())


def test_a_session(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    metadata = (("authorization", "Bearer key-1"), ("x-session-id", "s-1"))
    answers = session_of(stub, opening(model="poet", cache_salt="pepper"), CLOSE, metadata=metadata)
    assert [answer.WhichOneof("event") for answer in answers] == ["opened", "closed"]
    assert answers[1].closed.released
    (session,) = router.sessions
    asked = session.opening
    assert (asked.conversation_id, asked.model, asked.adapter) == ("s-1", "smollm2", "poet")
    assert asked.cache_salt == "pepper"
    assert session.metadata["authorization"] == "Bearer key-1"
    assert session.closed


def test_bad_sessions(stub: chat_service_pb2_grpc.ChatServiceStub, router: FakeRouter) -> None:
    cases = [
        (opening(conversation_id="c", model="other"), Reason.ERROR_REASON_MODEL_NOT_FOUND, "model"),
        (opening(conversation_id="x" * 300), Reason.ERROR_REASON_INVALID_FIELD, "conversation_id"),
        (opening(), Reason.ERROR_REASON_INVALID_FIELD, "conversation_id"),
        (
            opening(conversation_id="c", cache_salt="x" * 300),
            Reason.ERROR_REASON_INVALID_FIELD,
            "cache_salt",
        ),
        (CLOSE, Reason.ERROR_REASON_INVALID_FIELD, "open"),
    ]
    for said, reason, field in cases:
        with pytest.raises(grpc.RpcError) as caught:
            session_of(stub, said)
        failure = from_rpc_error(caught.value, Reason.ERROR_REASON_UNSPECIFIED)
        assert (failure.reason, failure.field) == (reason, field)
    assert not router.sessions
