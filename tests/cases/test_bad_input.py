"""Bad input: a clear status with reason and field, nothing lost, no engine harmed."""

from typing import Any

import grpc
import pytest
from cases_kit import Case, failure_of

from kvloop.runtime import tokens
from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2

pytestmark = pytest.mark.parametrize("router", ["main"])

SCHEMA = sampling_pb2.StructuredOutputs
TRANSFER = '{"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "10.0.0.1"}}'


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        pytest.param({"temperature": -1.0}, "INVALID_FIELD", "sampling.temperature", id="temperature"),
        pytest.param({"temperature": float("nan")}, "INVALID_FIELD", "sampling.temperature", id="nan"),
        pytest.param({"top_p": 0.0}, "INVALID_FIELD", "sampling.top_p", id="top_p"),
        pytest.param({"top_k": -7}, "INVALID_FIELD", "sampling.top_k", id="top_k"),
        pytest.param({"min_p": 2.0}, "INVALID_FIELD", "sampling.min_p", id="min_p"),
        pytest.param({"presence_penalty": 9.0}, "INVALID_FIELD", "sampling.presence_penalty", id="presence"),
        pytest.param(
            {"repetition_penalty": 0.0}, "INVALID_FIELD", "sampling.repetition_penalty", id="repeat"
        ),
        pytest.param({"max_tokens": 0}, "INVALID_FIELD", "sampling.max_tokens", id="max_tokens"),
        pytest.param({"max_tokens": 99_999}, "PROMPT_TOO_LONG", "sampling.max_tokens", id="max_tokens-long"),
        pytest.param({"min_tokens": 50}, "INVALID_FIELD", "sampling.min_tokens", id="min_tokens"),
        pytest.param({"n": 2}, "MULTIPLE_COMPLETIONS", "sampling.n", id="n"),
        pytest.param({"stop": [""]}, "INVALID_FIELD", "sampling.stop", id="stop"),
        pytest.param(
            {"extra_args_json": TRANSFER},
            "TRANSFER_PARAMS_REFUSED",
            "sampling.extra_args_json",
            id="transfer",
        ),
        pytest.param({"extra_args_json": "{"}, "INVALID_FIELD", "sampling.extra_args_json", id="extra"),
        pytest.param({"model": "nobody"}, "MODEL_NOT_FOUND", "model", id="model"),
        pytest.param({"adapter": "nobody"}, "MODEL_NOT_FOUND", "adapter", id="adapter"),
        pytest.param({"request_id": "a\nb"}, "INVALID_FIELD", "request_id", id="request_id"),
        pytest.param({"cache_salt": "s" * 5000}, "INVALID_FIELD", "cache_salt", id="salt"),
    ],
)
@pytest.mark.case("bad", "a clear status")
async def test_fields(
    case: Case, history: list[int], fields: dict[str, Any], reason: str, field: str
) -> None:
    failure = await failure_of(case.stack.turn(history, **fields))
    assert (failure.reason_name, failure.field) == (reason, field)
    assert failure.code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        pytest.param(b"", "EMPTY_PROMPT", id="empty"),
        pytest.param(b"\x01\x02\x03", "INVALID_FIELD", id="odd"),
        pytest.param(b"\xff" * 64, "INVALID_FIELD", id="random"),
        pytest.param(tokens.pack([5] * 2048), "PROMPT_TOO_LONG", id="max_model_len"),
        pytest.param(tokens.pack([5] * 2049), "PROMPT_TOO_LONG", id="max_model_len+1"),
    ],
)
@pytest.mark.case("bad", "a clear status")
async def test_prompts(case: Case, packed: bytes, reason: str) -> None:
    request = case.stack.request([1], case.name())
    request.prompt_token_ids = packed
    failure = await failure_of(case.stack.finish(case.stack.start(request)))
    assert (failure.reason_name, failure.field) == (reason, "prompt_token_ids")


@pytest.mark.case("bad", "the longest prompt is served")
async def test_longest_prompt(case: Case) -> None:
    answer = await case.stack.turn([5] * 2047, case.name(), max_tokens=None)
    case.watch(case.name())
    assert len(answer.ids) == 1


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(SCHEMA(json_schema="{"), id="json"),
        pytest.param(SCHEMA(json_schema='{"type": "no such type"}'), id="schema"),
        pytest.param(SCHEMA(regex="(["), id="regex"),
        pytest.param(SCHEMA(grammar="root ::= "), id="grammar"),
        pytest.param(SCHEMA(choice={"values": []}), id="choice"),
    ],
)
@pytest.mark.case("bad", "a clear status")
async def test_constraints(
    case: Case, history: list[int], outputs: sampling_pb2.StructuredOutputs, engine: str
) -> None:
    call = case.turn(history, structured_outputs=outputs, check=False)
    compiled = outputs.regex or outputs.grammar or outputs.json_schema.startswith('{"')
    if engine == "simulated" and compiled:
        assert (await call).ids  # the simulated engine compiles nothing
        return
    failure = await failure_of(call)
    assert failure.reason_name == "INVALID_FIELD"
    assert failure.field is not None
    assert failure.field.startswith("sampling.structured_outputs")


@pytest.mark.case("bad", "a clear status")
async def test_no_deadline(case: Case, history: list[int]) -> None:
    stack = case.stack
    call = stack.routers["main"].router.Generate(
        stack.request(history, case.name()), metadata=stack.credentials("alpha")
    )
    assert (await failure_of(stack.finish(call))).reason_name == "DEADLINE_REQUIRED"


@pytest.mark.case("bad", "a clear status")
async def test_bytes_that_are_no_request(case: Case) -> None:
    stack = case.stack
    generate = stack.routers["main"].channel.unary_stream("/kvloop.v1alpha1.RouterService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in generate(b"\xff\xff\xff\xff", timeout=10, metadata=stack.credentials("alpha")):
            pass
    failure = from_rpc_error(raised.value, Reason.ERROR_REASON_INTERNAL)
    assert (failure.reason_name, failure.field) == ("INVALID_FIELD", "request")


@pytest.mark.case("bad", "a clear status")
async def test_credentials(case: Case, history: list[int]) -> None:
    stack = case.stack
    call = stack.routers["main"].router.Generate(
        stack.request(history), timeout=10, metadata=[("authorization", "Bearer nobody's")]
    )
    assert (await failure_of(stack.finish(call))).reason_name == "UNAUTHENTICATED"


@pytest.mark.case("bad", "a clear status")
async def test_unknown_conversation(case: Case) -> None:
    stack = case.stack
    asked = stack.routers["main"].router.GetConversation(
        router_service_pb2.GetConversationRequest(conversation_id="nobody's"),
        timeout=10,
        metadata=stack.credentials("alpha"),
    )
    assert (await failure_of(asked)).reason_name == "CONVERSATION_NOT_FOUND"
    assert not await stack.end("nobody's")
